"""`shardmath.pictures`: values as text, SVG and HTML."""

from shardmath.display.pictures.buffer_drawing import buffer_svg
from shardmath.display.pictures.buffer_text import buffer_map
from shardmath.display.pictures.drawing import grid, svg
from shardmath.display.pictures.text import show

__all__ = ["buffer_map", "buffer_svg", "grid", "show", "svg"]
