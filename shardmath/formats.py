"""`shardmath.formats`: weights as numbers of few bits, the scales that blocks of them share, and their amaxes."""

from shardmath.values.amaxes.amaxes import Amaxes, plan_amaxes
from shardmath.values.formats import *  # noqa: F403
from shardmath.values.formats import __all__ as _formats

__all__ = [*_formats, "Amaxes", "plan_amaxes"]
