"""Contents: what tensors hold, whatever their layout.

In reading order:

- `digest`: `digest`.
"""
