"""Relabeling: the choice of a rank for each destination coordinate.

In reading order:

- `common`: the bytes that ranks of both sides have in common;
- `relabeling`: the permutation that keeps most of them in place.
"""
