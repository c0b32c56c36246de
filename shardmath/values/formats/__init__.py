"""Formats: weights as numbers of few bits, and scales that blocks of them share.

In reading order:

- `elements`: element types as numpy has them;
- `casting`: conversion of numbers from one type to another;
- `exponential`: exp, bit for bit the same in numpy and torch;
- `floats`: numbers of 8 and 4 bits, to the bit;
- `blocks`: positions that share a scale, legal cuts, and slices of scales;
- `windows`: parts of a tensor that cut blocks, and the largest magnitudes of blocks;
- `scales`: layouts of scales, derived from the tensor's layout;
- `legal`: the sizes at which no rank cuts a block;
- `format`: the interface of every format;
- `mxfp8`: blocks of 32 that share a power of two;
- `fp8`: float32 scales per tile, per channel or per tensor;
- `nvfp4`: blocks of 16 numbers of 4 bits;
- `swizzle`: scales in tiles, as tensor cores read them;
- `listing`: the table of formats.
"""
