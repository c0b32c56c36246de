"""Exchange: tensors moved by a rank's part of a plan.

In reading order:

- `endpoints`: where the pieces of messages lie in memory;
- `memory`: the memory behind a tensor;
- `overlaps`: whether tensors share memory;
- `local`: a rank's tensors, checked against the plan;
- `staging`: memory for messages on their way;
- `rounds`: what a rank posts together, moved before its next round begins;
- `views`: tensors and staging as copies from views to views;
- `task`: what an engine is told;
- `engine`: a rank's part of a plan, moved over any wire.
"""
