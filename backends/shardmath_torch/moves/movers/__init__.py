"""Movers: a plan made ready once, for any number of moves.

In reading order:

- `calls`: a mover's arguments, and their check;
- `settings`: the arguments of `compile`, and their check;
- `stages`: work at both ends of a move, besides carrying bytes;
- `carriers`: bytes carried from sources to destinations;
- `bound`: the tensors that a mover has checked;
- `ready`: the parts of a mover, and those kept by a replan;
- `handles`: moves in background threads;
- `leaving`: closing a mover, and dropping its tensors;
- `mover`: a move, from the vote to the last byte in place;
- `compile`: the votes that make a mover.
"""
