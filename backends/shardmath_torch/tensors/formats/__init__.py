"""Formats: tensors cast, quantized and dequantized.

In reading order:

- `casting`: numbers cast between dtypes;
- `slabs`: a tensor in boxes that fit a cache;
- `rounding`: float32 as numbers of 8 and 4 bits, and back;
- `scaling`: scales of blocks, and numbers divided and multiplied by them;
- `quantizing`: tensors as data and scales, and back;
- `views`: other libraries' quantized tensors as formats and plain tensors.
"""
