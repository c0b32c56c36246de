"""`shardmath.formats`: weights as numbers of few bits, the scales that blocks of them share, and their amaxes."""

from shardmath.base.moved import forward_names
from shardmath.values.amaxes.amaxes import Amaxes, plan_amaxes
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.format import Format, Part
from shardmath.values.formats.fp8 import FP8, FP8Blocks
from shardmath.values.formats.listing import FormatRow, listing, show_listing
from shardmath.values.formats.mxfp8 import MXFP8
from shardmath.values.formats.nvfp4 import NVFP4
from shardmath.values.formats.swizzle import flattened, swizzle, swizzle_runs, swizzled, unswizzle

__all__ = [
    "Amaxes",
    "Blocks",
    "FP8",
    "FP8Blocks",
    "Format",
    "FormatRow",
    "MXFP8",
    "NVFP4",
    "Part",
    "flattened",
    "listing",
    "plan_amaxes",
    "show_listing",
    "swizzle",
    "swizzle_runs",
    "swizzled",
    "unswizzle",
]

__getattr__ = forward_names("shardmath.formats", {"Row": "shardmath.formats.FormatRow"})
