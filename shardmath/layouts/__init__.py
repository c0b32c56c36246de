"""Layouts: which ranks hold which elements of one tensor.

In reading order:

- `algebra`: one dimension, and the mesh that divides it;
- `placement`: how one mesh axis divides one dimension;
- `reader`: text as tokens with their positions;
- `words`: one digit as written, and the stages that words stand for;
- `notation`: text to dimensions;
- `unparse`: dimensions to text;
- `spelling`: the three ways to write how a tensor is divided;
- `layout`: the value of a layout;
- `per_axis`: a layout as one placement per mesh axis;
- `holdings`: what ranks hold, in one form for all spellings;
- `fitting`: layouts found from what each rank holds;
- `from_type`: how hypothesis finds out to draw layouts;
- `edits`: layouts made from another layout;
- `store`: the buffer that a local tensor lies in, and its view there;
- `styles`: how tensor parallelism divides each kind of layer.
"""
