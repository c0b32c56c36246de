"""Movers: a plan made ready once, by which tensors are moved as often as wanted.

In reading order:

- `calls`: what a mover is called with;
- `settings`: what every rank must pass alike;
- `stages`: what a move does at its two ends;
- `carriers`: how its bytes come from one to the other;
- `bound`: which tensors were looked at;
- `ready`: what a mover is made of, and what of that goes on where it is planned anew;
- `handles`: moves that go on beside the thread that called;
- `leaving`: what is done to a mover between its moves;
- `mover`: a move, from the vote to the last byte in place;
- `compile`: what ranks agree on before the first.
"""
