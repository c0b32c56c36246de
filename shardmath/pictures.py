"""`shardmath.pictures`: values as text, SVG and HTML."""

from shardmath.display.pictures import *  # noqa: F403
from shardmath.display.pictures import __all__ as __all__
