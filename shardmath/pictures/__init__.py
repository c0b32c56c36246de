"""Pictures: values for people, as strings.

In reading order:

- `text`: layouts and plans as text;
- `buffer_text`: flat buffers as text;
- `buffer_drawing`: flat buffers as SVG.
"""

from shardmath.pictures.buffer_drawing import buffer_svg
from shardmath.pictures.buffer_text import buffer_map
from shardmath.pictures.text import grid, show

__all__ = ["buffer_map", "buffer_svg", "grid", "show"]
