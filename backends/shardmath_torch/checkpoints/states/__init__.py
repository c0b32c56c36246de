"""States: what a module and its optimizers need to go on, saved and restored under any parallelism.

In reading order:

- `values`: options and values as JSON, extra states of modules as bytes;
- `memory`: where a tensor lies, and which tensors meet;
- `modules`: what a module holds;
- `index`: the JSON that `save_state` writes;
- `wrappers`: optimizers in optimizers, and what they would lose;
- `optimizers`: what optimizers hold;
- `telling`: what is held by other ranks alone;
- `matching`: names, options and state, here and in a checkpoint;
- `restoring`: values into the memory that is there;
- `training`: `save_state`, `load_state`.
"""
