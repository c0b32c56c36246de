"""Exchange: a plan made ready, and tensors moved by it.

In reading order:

- `cells`: which cells of a local tensor are its own;
- `pack`: pieces into messages and out of them;
- `memory`: the memory behind a tensor;
- `local`: a rank's tensors, checked against the plan;
- `staging`: memory for messages on their way;
- `task`: what an engine is told;
- `engine`: rounds of messages over any wire;
- `mover`: a plan made ready;
- `compile`: `compile`.
"""
