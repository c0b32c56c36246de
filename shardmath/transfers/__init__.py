"""Transfers: those of many stretches at once, in columns.

In reading order:

- `parts`: what stretches have of the tensors of rows;
- `spelling`: the transfers that they are.
"""
