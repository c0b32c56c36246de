"""Portions: a refit as several, of some tensors each, one after the other.

In reading order:

- `selecting`: some of the tensors of a side, as a side;
- `grouping`: which tensors belong together, such as those of a layer;
- `dividing`: a refit as a refit of each group.
"""
