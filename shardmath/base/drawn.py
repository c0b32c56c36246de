"""Drawn: values on lower floors have pictures; what draws them is imported when a picture is asked for.

>>> from shardmath.algebra.mesh import Mesh
>>> svg(Mesh(tp=2)) == Mesh(tp=2).svg()
True
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["html", "svg"]

DRAWING = "shardmath.pictures.drawing"
"""By name: a floor does not import what stands on it."""


def svg(value: object, **options: object) -> str:
    """The value as an SVG document."""
    picture: str = import_module(DRAWING).svg(value, **options)
    return picture


def html(value: object) -> str:
    """What a notebook shows of the value."""
    page: str = import_module(DRAWING).html(value)
    return page
