"""Sources: what trainers hold.

In reading order:

- `converting`: a module's tensors as checkpoints have them;
- `source`: what a trainer's rank holds, and how all of its ranks do;
- `megatron`: the same of Megatron-Core's models.
"""
