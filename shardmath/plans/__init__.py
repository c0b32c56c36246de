"""Plans: who sends what to whom, and when.

In reading order:

- `flows`: integers on a network of ranks, without tensors;
- `reduction`: the reductions that Partial axes ask for;
- `template`: everything that a move depends on, except the ranks' names;
- `units`: the boxes of a unit, and the places where it may be cut;
- `demands`: the bytes that receivers ask of holders, as integers;
- `stretches`: the bytes from each sender to each receiver, given the cuts of lines;
- `balance`: the choice of cuts;
- `stretch_parts`: the parts of tensors in stretches of bytes;
- `boxes`: the boxes of parts, as their source and their destination see them;
- `transfers`: the pieces of a plan, each one box of one tensor between two ranks;
- `spelling`: the transfers of parts of stretches;
- `table`: the transfers of a plan as columns;
- `uncovered`: checks that the source holds, once, everything that the destination needs;
- `groups`: the tensors that have the same layouts on both sides;
- `tensors`: the tensors of a move, all of them or those that differ from the last move;
- `plan`: plans;
- `adjoint`: the transposed plan;
- `relabeling`: the choice of a rank for each destination coordinate;
- `collectives`: plans that are one textbook operation;
- `programs`: the rounds in which a plan is carried out;
- `membership`: plans that ranks leave, and their parts for the ranks that stay;
- `protocol`: the states of a rank while ranks act together, as a table of states and events.
"""
