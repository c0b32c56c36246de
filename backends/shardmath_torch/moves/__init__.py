"""Moves: tensors go where a plan has them, as often as wanted.

In reading order:

- `observing`: what a move does on this rank, and how long each part of it takes;
- `digests`: what ranks' tensors hold, compared by numbers;
- `commits`: what all ranks put in place, or none;
- `exchange`: tensors moved by a rank's part of a plan;
- `movers`: a plan made ready once, by which tensors are moved as often as wanted.
"""
