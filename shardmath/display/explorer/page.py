"""Page: the explorer as HTML, which asks its server; and a page of one plan, which needs none."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from shardmath.base.arguments import instance
from shardmath.base.errors import PlanError
from shardmath.base.text import plural
from shardmath.display.explorer.answer import plan_answer
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan

__all__ = ["Page", "explore", "live_page", "plan_page"]

PLACE = "{{GIVEN}}"
"""What stands in the template where the answer is, or null."""

HIGH = 900
"""Pixels of a page in a notebook."""


def _template() -> str:
    """The page, with PLACE where the answer is to stand."""
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def live_page() -> str:
    """Return the page that asks the server it comes from."""
    return _template().replace(PLACE, "null")


def plan_page(plan: Plan, topology: Topology | None = None) -> str:
    """Return a page that shows `plan`, and needs no server: its proof, picture, cost and first transfers.

    `topology` is the plan's own by default. Raises ShardError if `verify` does.
    """
    where = plan.topology if topology is None else topology
    title = f"plan of {plural(plan.src, 'tensor')}, {len(plan.src_ranks)} to {plural(plan.dst_ranks, 'rank')}"
    return _template().replace(PLACE, _embed({"title": title, "answer": plan_answer(plan, where)}))


def explore(plan: Plan, *, topology: Topology | None = None) -> Page:
    """Return a page about `plan` that a notebook shows: end a cell with it. It has the plan's proof, picture, cost and
    transfers; ranks light up under the mouse, and a click on one shows only its transfers.

    `topology` is the plan's own if not given. `python -m shardmath explore` serves a page on which layouts are typed.
    Raises PlanError for anything but a plan, and if the plan cannot be proved.
    """
    instance(plan, Plan, "pass what shardmath.plan(src, dst) returns", PlanError)
    return Page(plan_page(plan, topology))


def _embed(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    return json.dumps(value).replace("<", "\\u003c")


class Page:
    """A page in a notebook's cell. `html` is the page."""

    def __init__(self, html: str) -> None:
        self.html = html

    def __repr__(self) -> str:
        return f"<a page of {len(self.html):,} characters, which a notebook shows>"

    def _repr_html_(self) -> str:
        """The page in a frame, so that neither it nor the notebook changes how the other looks."""
        style = f"width:100%;height:{HIGH}px;border:0"
        return f'<iframe title="shardmath" style="{style}" srcdoc="{escape(self.html)}"></iframe>'
