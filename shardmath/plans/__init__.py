"""Plans: what moves, and who sends it.

In reading order:

- `reduction`: what Partial asks for;
- `overlay`: two partitions of a dimension laid over each other;
- `template`: all that a move depends on, but for the ranks' names;
- `demands`: what is asked of whom, as integers;
- `balance`: which holder sends what;
- `cover`: that everything asked for is held;
- `plan`: plans and transfers;
- `adjoint`: the transposed plan;
- `relabelling`: which rank should take which destination coordinate.
"""
