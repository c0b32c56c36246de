"""Layouts: who holds what of one tensor.

In reading order:

- `algebra`: one dimension, and the mesh that divides it;
- `placement`: what people say about a dimension and a mesh axis;
- `reader`: text as tokens that know where they stand;
- `words`: one digit as written, and what words stand for;
- `notation`: text to dimensions;
- `unparse`: dimensions to text;
- `spelling`: the three ways to say how a tensor is divided;
- `layout`: who holds what;
- `holdings`: what ranks hold, in one form however callers spelled it;
- `fitting`: what each coordinate holds, as the dimension that people would write;
- `edits`: layouts made from another one;
- `store`: which buffer, and which view of it;
- `styles`: how tensor parallelism divides which layer.
"""
