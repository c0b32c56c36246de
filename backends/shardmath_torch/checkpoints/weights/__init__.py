"""Weights: a module's weights from any checkpoint, quantized ones dequantized while they are loaded.

In reading order:

- `quantized`: stored tensors with scales, and the parts of both that a rank reads;
- `dequantizing`: a rank's values from data and scales;
- `converted`: stored tensors that transformers stacks;
- `filling`: `load_weights`.
"""
