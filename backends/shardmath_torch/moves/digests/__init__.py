"""Digests: what ranks' tensors hold, compared by numbers.

In reading order:

- `library`: the arithmetic of digests by torch;
- `sides`: this rank's shares of a side, and all ranks' shares;
- `comparing`: replicas and sides compared, and the box in which they differ;
- `checking`: a move compared, source and destination.
"""
