"""Digests: checksums of ranks' tensors, compared.

In reading order:

- `library`: the arithmetic of digests by torch;
- `sides`: this rank's shares of a side, and all ranks' shares;
- `comparing`: comparison of replicas and sides, and the box in which they differ;
- `checking`: comparison of a move's source and destination.
"""
