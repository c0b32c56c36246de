"""Exchange: tensors moved by a rank's part of a plan.

In reading order:

- `endpoints`: the pieces of messages in memory;
- `memory`: the memory behind a tensor;
- `overlaps`: whether tensors share memory;
- `glance`: checks of many tensors at once;
- `local`: a rank's tensors, checked against the plan;
- `staging`: memory for messages in flight;
- `rounds`: messages that a rank posts together, and completes before its next round;
- `views`: copies between tensors and staging;
- `handing`: messages that stay in staging between two other ranks;
- `task`: the interface of engines;
- `engine`: a rank's part of a plan, moved over any wire.
"""
