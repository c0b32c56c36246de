"""Plans: what moves, and who sends it.

In reading order:

- `reduction`: what Partial asks for;
- `template`: all that a move depends on, but for the ranks' names;
- `pieces`: the boxes of a unit, and where it may be cut;
- `demands`: what is asked of whom, as integers;
- `stretches`: what goes from whom to whom, where lines are cut;
- `balance`: where lines are cut;
- `uncovered`: that everything asked for is held;
- `groups`: the tensors that are held alike on both sides;
- `plan`: plans and transfers;
- `adjoint`: the transposed plan.
"""
