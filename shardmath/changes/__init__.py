"""Changes: which elements changed since the last move, and where each of them goes.

In reading order:

- `boxes`: which boxes of a tensor cells lie in, for many cells at once;
- `routing`: from cells of sources to elements of messages, and from those to cells of destinations.
"""
