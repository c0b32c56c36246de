"""Moves: tensors are moved by a plan, any number of times.

In reading order:

- `observing`: bytes, messages and times of a move on this rank;
- `digests`: checksums of ranks' tensors, compared;
- `commits`: changes that all ranks put in place, or none;
- `exchange`: engines that move tensors by a rank's part of a plan;
- `movers`: a plan made ready once, for any number of moves.
"""
