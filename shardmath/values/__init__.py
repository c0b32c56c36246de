"""Values: what is sent where it is not simply what is held.

In reading order:

- `formats`: weights as numbers of few bits, and scales that blocks of them share;
- `transforms`: casts, computed parameters, functions of the user's own;
- `amaxes`: ranks that cut blocks of a quantised tensor, and what they tell each other;
- `digests`: numbers that stand for what a tensor holds, however it is laid out;
- `changes`: which elements changed since the last move, and where each of them goes.
"""
