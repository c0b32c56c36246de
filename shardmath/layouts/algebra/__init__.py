"""Algebra: one dimension, and the mesh that divides it.

In reading order:

- `runs`: the global position of each local one;
- `box`: products of ranges;
- `gaps`: the first element that is in no product of ranges;
- `mesh`: named axes over ranks;
- `cuts`: the ways in which a piece is divided into parts;
- `stages`: sequences of cuts, and the ranks that keep the parts;
- `dimension`: every way of dividing a dimension is stages of digits;
- `partition`: the distinct parts of a dimension;
- `overlay`: two partitions of a dimension laid over each other.
"""
