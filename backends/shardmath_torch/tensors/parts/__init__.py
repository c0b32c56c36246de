"""Parts: plain tensors with attributes that say which part of a larger tensor they are.

In reading order:

- `checkpointable`: torch's CheckpointableTensor as a layout, and back.
"""
