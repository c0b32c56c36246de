"""Weights: a module's weights from any checkpoint, those of few bits dequantised as they arrive.

In reading order:

- `quantised`: which stored tensors have scales, and what of both a rank reads;
- `dequantising`: a rank's numbers from data and scales;
- `converted`: tensors that transformers stacks;
- `filling`: `load_weights`.
"""
