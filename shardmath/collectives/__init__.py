"""Collectives: plans that are one textbook operation within groups of ranks.

In reading order:

- `kinds`: which operations groups of ranks fit;
- `collective`: the operation that moves one layout to another.
"""
