"""Refits: a trainer's stored weights into engines that store them otherwise.

In reading order:

- `coverage`: a rank's own list of tensors against what rows say that it stores;
- `plain`: tensors that ranks store each alone, under their logical names;
- `copying`: what is bound for one engine, for another that stores alike;
- `sharing`: engines that store a tensor alike, as one window of it;
- `pairing`: what moves, as both sides hold it;
- `tiling`: why an engine cannot store scales as its rows say;
- `refit`: the plan between a trainer and its engines, and where each rank has what moves;
- `selecting`: some of the tensors of a side, as a side;
- `grouping`: which tensors belong together, such as those of a layer;
- `dividing`: a refit as a refit of each group.
"""
