"""Changes: routing of the elements that changed since the last move.

In reading order:

- `boxes`: the boxes of a tensor that contain given cells, for many cells at once;
- `windows`: a box of a tensor whose cells are numbered separately;
- `routing`: from cells of sources to elements of messages;
- `placing`: from elements of messages to cells of memory.
"""
