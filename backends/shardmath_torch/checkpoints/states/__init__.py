"""States: a module and its optimizers, saved and restored under any parallelism.

In reading order:

- `values`: options and values as JSON, extra states of modules as bytes;
- `memory`: where a tensor lies, and which tensors share memory;
- `modules`: what a module holds;
- `index`: the JSON that `save_state` writes;
- `sharing`: state that is one object under several keys;
- `wrappers`: optimizers in optimizers, and state that a save would lose;
- `optimizers`: what optimizers hold;
- `telling`: reports on parameters that only other ranks hold;
- `matching`: names, options and state, here and in a checkpoint;
- `restoring`: values written into existing memory;
- `training`: `save_state`, `load_state`.
"""
