"""Collectives: plans that are one textbook operation within groups of ranks.

In reading order:

- `spans`: sets of positions as ranges, and boxes of them;
- `kinds`: the operations that fit groups of ranks;
- `moves`: the boxes that ranks hold before and after, by class;
- `collective`: the operation that moves one layout to another.
"""
