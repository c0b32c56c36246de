"""Recordings: what ranks store as their loaders were seen to store it, in the place of rows.

In reading order:

- `pieces`: which elements lie in which cells, as strided blocks;
- `numbers`: element numbers in cells, as pieces;
- `boxes`: pieces along the dimensions of both tensors;
- `recorded`: what one rank was seen to store;
- `declared`: the same of what rows say;
- `views`: the pieces of one tensor as a view of what stores it;
- `sides`: the ranks of a side.
"""
