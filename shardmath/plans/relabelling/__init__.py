"""Relabelling: which rank should take which destination coordinate.

In reading order:

- `common`: how many bytes ranks of both sides have in common;
- `relabelling`: the permutation that keeps most of them in place.
"""
