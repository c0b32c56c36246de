"""Refits: moves of a trainer's weights into engines that store them differently.

In reading order:

- `coverage`: comparison of a rank's own tensors with the tensors that its side's rows store there;
- `plain`: sides that store each tensor separately, under its logical name;
- `copying`: the binding of one engine, reused for another with the same storage;
- `sharing`: engines that store a tensor in the same way, as one window of it;
- `pairing`: the layouts of both sides of a refit's plan;
- `tiling`: errors for engines that cut a tensor inside a tile of its scales;
- `refit`: the plan between a trainer and its engines, and where each rank has what moves;
- `selecting`: some of the tensors of a side, as a side;
- `grouping`: tensors that move together, such as a layer's;
- `dividing`: a refit as one refit per group of tensors.
"""
