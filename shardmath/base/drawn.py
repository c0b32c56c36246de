"""Drawn: pictures of values of every wing; the wing that draws them is imported when a picture is asked for.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> svg(Mesh(tp=2)) == Mesh(tp=2).svg()
True
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["html", "page", "svg"]

DRAWING = "shardmath.display.pictures.drawing"
"""The module that draws, by name: no wing imports the wing that displays it."""

EXPLORER = "shardmath.display.explorer.page"
"""The module that makes pages."""


def svg(value: object, **options: object) -> str:
    """Return a picture of `value` (a mesh, layout, plan, program, certificate or refit) as SVG text.

    `options` are keyword arguments of `shardmath.display.pictures.drawing.svg`.
    """
    picture: str = import_module(DRAWING).svg(value, **options)
    return picture


def html(value: object) -> str:
    """The HTML with which a notebook shows `value`: its picture, or its text if it has no picture.

    Raises ShardError for anything but an object that `show` accepts.
    """
    page: str = import_module(DRAWING).html(value)
    return page


def page(value: object, **options: object) -> str:
    """The page, as HTML, on which people look at `value`, a plan.

    `options` are keyword arguments of `shardmath.display.explorer.page.plan_page`.
    """
    whole: str = import_module(EXPLORER).plan_page(value, **options)
    return whole
