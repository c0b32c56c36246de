"""Pictures: values for people, as strings of text and SVG.

In reading order:

- `elements`: SVG as strings: elements, drawings made of them, scales, colors, and documents;
- `text`: values as text;
- `cells`: a layout divided into boxes that the same ranks hold, a local tensor into pieces;
- `layout_drawing`: layouts as SVG;
- `mesh_drawing`: meshes as SVG;
- `traffic`: bytes by sender and receiver;
- `plan_drawing`: plans as SVG;
- `lanes`: what ranks send and receive in each round of a program;
- `program_drawing`: programs as SVG;
- `certificate_drawing`: certificates as SVG;
- `stored_pieces`: what lies where in a stored tensor, and where a refit brings it from;
- `stored_drawing`: refits and stored tensors as SVG;
- `drawing`: any value as a picture, for files and for notebooks; a layout as a grid of ranks;
- `buffer_text`: flat buffers as text;
- `buffer_drawing`: flat buffers as SVG.

`show(value)` is text that a notebook draws; `svg(value)` is the picture alone.
"""
