"""Parts: plain tensors with attributes that say which part of a larger tensor they are.

In reading order:

- `annotated`: types of the package spmd_types, read as a part;
- `checkpointable`: torch's CheckpointableTensor as a layout, and back.
"""
