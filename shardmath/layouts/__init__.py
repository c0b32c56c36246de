"""Layouts: who holds what of one tensor.

In reading order:

- `placement`: what people say about a dimension and a mesh axis;
- `reader`: text as tokens that know where they stand;
- `notation`: text to dimensions and back;
- `layout`: who holds what;
- `store`: which buffer, and which view of it.
"""
