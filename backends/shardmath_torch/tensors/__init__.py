"""Tensors: what torch, FSDP2, Megatron and transformers hold, read as layouts, and moved.

In reading order:

- `fsdp`: what FSDP2 keeps to itself;
- `probes`: tensors that show whether a function only copies;
- `formats`: tensors as numbers of other types: cast, quantized and read again;
- `parts`: plain tensors that say themselves which part of a larger tensor they are;
- `dtensors`: DTensors read as layouts, moved, and made of plain modules;
- `transforms`: tensors that are moved by way of others: cast, computed, by Megatron's hooks;
- `changes`: moves that send only what changed since the move before;
- `contents`: what tensors hold, whatever their layout;
- `refits`: a trainer's module and an engine's module, bound to a refit by their own names;
- `conversions`: models whose checkpoints have other tensors than the models themselves.
"""
