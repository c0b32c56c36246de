"""Refits: a trainer's module and an engine's module, bound to a refit by their own names.

In reading order:

- `views`: views of stored tensors, by the local tensors of a plan;
- `refit`: stored tensors bound once, and moved as often as wanted.
"""
