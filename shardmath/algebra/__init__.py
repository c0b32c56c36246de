"""Algebra: one dimension, and the mesh that divides it.

In reading order:

- `runs`: which global positions lie at which local ones;
- `box`: products of ranges;
- `mesh`: named axes over ranks;
- `dimension`: every way of dividing a dimension is digits;
- `partition`: the distinct parts of a dimension;
- `spans`: sets of positions as ranges, and boxes of them.
"""
