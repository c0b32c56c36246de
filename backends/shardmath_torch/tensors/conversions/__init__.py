"""Conversions: models whose checkpoints have other tensors than the models themselves.

In reading order:

- `unwrapped`: a module without wrappers such as torch.compile's;
- `saved`: what transformers saves of a module's tensors.
"""
