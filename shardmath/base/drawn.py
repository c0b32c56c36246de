"""Drawn: values of every wing have pictures; what draws them is imported when a picture is asked for.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> svg(Mesh(tp=2)) == Mesh(tp=2).svg()
True
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["html", "svg"]

DRAWING = "shardmath.display.pictures.drawing"
"""By name: nothing imports what displays it."""


def svg(value: object, **options: object) -> str:
    """The value as an SVG document."""
    picture: str = import_module(DRAWING).svg(value, **options)
    return picture


def html(value: object) -> str:
    """What a notebook shows of the value."""
    page: str = import_module(DRAWING).html(value)
    return page
