"""Plans: who sends what to whom, and when.

In reading order:

- `flows`: integers on a network of ranks; nothing here knows of tensors;
- `reduction`: what Partial asks for;
- `template`: all that a move depends on, but for the ranks' names;
- `pieces`: the boxes of a unit, and where it may be cut;
- `demands`: what is asked of whom, as integers;
- `stretches`: what goes from whom to whom, where lines are cut;
- `balance`: where lines are cut;
- `uncovered`: that the source holds, once, all that the destination needs;
- `groups`: the tensors that are held alike on both sides;
- `plan`: plans and transfers;
- `adjoint`: the transposed plan;
- `relabelling`: which rank should take which destination coordinate;
- `collectives`: plans that are one textbook operation;
- `programs`: in which rounds a plan is carried out;
- `membership`: ranks that leave a plan, and what stays for those that do not;
- `protocol`: what a rank goes through when ranks act together, as a table of states and events.
"""
