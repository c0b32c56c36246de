"""Probes: tensors by which functions are told from copies.

In reading order:

- `patterns`: values of each element type, by their bits;
- `drawing`: the value of each element in each run of a loader.
"""
