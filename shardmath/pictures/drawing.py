"""Drawing: any value as a picture, for files and for notebooks.

>>> from shardmath.algebra.mesh import Mesh
>>> print(svg(Mesh(tp=2)).splitlines()[1])
<title>Mesh(tp=2)</title>
"""

from __future__ import annotations

from html import escape

from shardmath.algebra.mesh import Mesh
from shardmath.base.errors import ShardError
from shardmath.base.text import shown
from shardmath.flows.topology import Topology, checked
from shardmath.layouts.layout import Layout
from shardmath.pictures.layout_drawing import layout_svg
from shardmath.pictures.mesh_drawing import mesh_svg
from shardmath.pictures.plan_drawing import plan_svg
from shardmath.pictures.text import show
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.program import Program

__all__ = ["html", "svg"]


def svg(
    value: Mesh | Layout | Plan | Transposed | Program,
    *,
    topology: Topology | None = None,
    tensor: str | None = None,
    inline: bool = False,
) -> str:
    """A picture as SVG: a document, or an element of a page if `inline`.

    `topology` marks the nodes of a mesh, a plan or a program; `tensor` is the one of a plan whose layouts are drawn.
    Raises ShardError for anything else.
    """
    where = None if topology is None else checked(topology)
    if isinstance(value, Layout):
        return layout_svg(value, inline=inline)
    if isinstance(value, Mesh):
        return mesh_svg(value, topology=where, inline=inline)
    if isinstance(value, Plan | Transposed | Program):
        return plan_svg(value, topology=where, tensor=tensor, inline=inline)
    raise ShardError(
        f"{shown(value)} has no picture; draw a Mesh, a Layout, a Plan or a Program, or show it as text"
    )


def html(value: object) -> str:
    """What a notebook shows: the picture, or the text of a value that has none."""
    if isinstance(value, Mesh | Layout | Plan | Transposed | Program):
        return svg(value, inline=True)
    return f"<pre>{escape(show(value))}</pre>"
