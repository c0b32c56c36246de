"""Probes: tensors whose values distinguish copies from computations.

In reading order:

- `patterns`: values of each element type, by their bits;
- `drawing`: the values of elements in each run of a loader.
"""
