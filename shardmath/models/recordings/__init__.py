"""Recordings: storage recorded from trainers' and engines' weight loaders, as an alternative to rows.

In reading order:

- `pieces`: elements of a logical tensor in cells of a stored one, as strided blocks;
- `numbers`: pieces from the element numbers in cells;
- `boxes`: pieces along the dimensions of both tensors;
- `recorded`: the recorded storage of one rank;
- `declared`: a rank's storage by rows, as a recording;
- `views`: the pieces of one tensor as a view of its stored tensor;
- `sides`: the ranks of a side.
"""
