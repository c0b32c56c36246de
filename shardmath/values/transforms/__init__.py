"""Transforms: changes to tensors on their way, such as casts and quantization.

In reading order:

- `components`: the tensors that a transform sends, and the protocol that transforms follow;
- `pointwise`: functions of each number, such as casts;
- `quantizing`: numbers as data and scales, and back;
- `custom`: functions that users write;
- `packing`: a local array without holes and in ascending order;
- `wires`: layouts of the tensors that travel, derived from those that ranks hold;
- `choosing`: the transform of each tensor, chosen by its name;
- `local`: one rank's work, in numpy;
- `transformed`: two sides, and the tensors that travel between them.
"""
