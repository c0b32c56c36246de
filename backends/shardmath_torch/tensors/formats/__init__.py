"""Formats: tensors as numbers of other types, cast, quantised and read again.

In reading order:

- `casting`: numbers of one type as those of another;
- `slabs`: a tensor in boxes that fit a cache;
- `rounding`: float32 as numbers of 8 and 4 bits, and back;
- `scaling`: scales of blocks, and numbers divided by them and multiplied;
- `quantising`: tensors as data and scales, and back;
- `views`: what other libraries' quantised tensors hold, as formats and plain tensors.
"""
