"""Transforms: what travels need not be what is held.

In reading order:

- `components`: what a transform says of itself;
- `pointwise`: functions of each number, such as casts;
- `quantising`: data and scales in the place of numbers;
- `custom`: functions of the user's own;
- `packing`: what a rank holds, without holes and in ascending order;
- `wires`: how the tensors that travel lie, which follows from how those that are held do;
- `choosing`: which transform a tensor has, by its name;
- `local`: what one rank does, in numpy;
- `transformed`: two sides, and what travels between them.
"""
