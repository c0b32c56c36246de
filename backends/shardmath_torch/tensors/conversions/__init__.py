"""Conversions: models whose checkpoints have other tensors than the models themselves.

In reading order:

- `saved`: what transformers saves of a module's tensors.
"""
