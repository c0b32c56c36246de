"""Changes: which elements changed since the last move, and where each of them goes.

In reading order:

- `boxes`: which boxes of a tensor cells lie in, for many cells at once;
- `windows`: a box of a tensor whose cells have numbers of their own;
- `routing`: from cells of sources to elements of messages;
- `placing`: from elements of messages to cells of memory.
"""
