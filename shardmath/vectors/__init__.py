"""Vectors: that rows say what real trainers and engines store.

In reading order:

- `systems`: how a recorded model is declared, and what its loader does otherwise;
- `recorded`: what the ranks of real trainers and engines stored, beside what rows say that they store.
"""
