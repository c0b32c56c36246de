"""From type: hypothesis is told how to draw meshes, layouts and runs, without an import of hypothesis.

>>> from hypothesis import find, strategies as st
>>> register_strategies()
>>> find(st.from_type(Mesh), lambda mesh: mesh.size == 2).size
2
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout

__all__ = ["register_strategies"]

STRATEGIES = {Mesh: "meshes", Layout: "layouts", Runs: "runs"}
"""The functions of `shardmath.testing` that draw values of each class."""


def register_strategies() -> None:
    """Let `st.from_type` of hypothesis draw Mesh, Layout and Runs, if hypothesis is imported. `shardmath.testing` is
    imported at the first draw: it takes half a second, which most programs with hypothesis would wait for in vain."""
    strategies: Any = sys.modules.get("hypothesis.strategies")
    if strategies is not None:
        for drawn, name in STRATEGIES.items():
            strategies.register_type_strategy(drawn, _import_later(name))


def _import_later(name: str) -> Callable[[type], Any]:
    """A function that imports `shardmath.testing`, and returns the strategy that its function `name` returns."""
    return lambda _: getattr(import_module("shardmath.testing"), name)()
