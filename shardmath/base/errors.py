"""Errors: every error that shardmath raises on purpose.

1. One base, `ShardError`, a `ValueError`: catch it to catch all of them.
2. A message says what is wrong, shows both operands, and names the fix.
3. An error is raised where a value is made, not where it is used.

>>> try:
...     raise MeshError("axis 'tp' has size 0; give every axis at least one coordinate")
... except ShardError as error:
...     print(error)
axis 'tp' has size 0; give every axis at least one coordinate
"""

from __future__ import annotations

from typing import ClassVar

from shardmath.base.public import public

__all__ = [
    "DigestError",
    "ExchangeError",
    "FormatError",
    "LayoutError",
    "MeshError",
    "NotationError",
    "ParamLayoutError",
    "PlacementError",
    "PlanError",
    "RunsError",
    "ShardError",
    "StoreError",
]


@public
class ShardError(ValueError):
    """The base class of all error classes of shardmath, such as LayoutError; catch it to catch all of them."""

    code: ClassVar[str] = "SM100"


@public
class RunsError(ShardError):
    """Error for malformed Runs (maps from a rank's local positions to global positions), and for Runs that cannot be
    inverted, or composed with others."""

    code: ClassVar[str] = "SM101"


@public
class MeshError(ShardError):
    """Error for an impossible mesh, and for a rank or an axis that a mesh does not have."""

    code: ClassVar[str] = "SM102"


@public
class PlacementError(ShardError):
    """Error for an invalid placement, and for a placement that cannot divide the dimension to which it is applied."""

    code: ClassVar[str] = "SM103"


SHOWN = 100
"""The most characters of a text that a message shows."""


def _around(text: str, position: int) -> str:
    """The text near the position on one line, all of a short text, with a caret below the position."""
    line = "".join(" " if character.isspace() else character for character in text)
    start = min(position - SHOWN // 2, len(line) - SHOWN)
    start = max(0, start)
    stop = start + SHOWN
    head = "... " if start else ""
    tail = " ..." if stop < len(line) else ""
    before_caret = " " * (len(head) + position - start)
    return f"{head}{line[start:stop]}{tail}\n    {before_caret}^"


@public
class NotationError(ShardError):
    """Error for text that cannot be read as a layout, as a mesh, or as a declaration of how ranks store tensors.

    A caret (^) in the message marks the error.
    """

    code: ClassVar[str] = "SM104"

    def __init__(
        self, what: str, text: str | None = None, position: int = 0, fix: str = ""
    ) -> None:
        """`what` is wrong in `text` at 0-based `position`; `fix` says what to write instead."""
        self.what = what
        self.text = text
        self.position = position
        self.fix = fix
        lines = [what]
        if text is not None:
            lines.append(f"    {_around(text, position)}")
        if fix:
            lines.append(fix)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[NotationError], tuple[str, str | None, int, str]]:
        return NotationError, (self.what, self.text, self.position, self.fix)


@public
class LayoutError(ShardError):
    """Error for a layout whose shape, mesh and placements do not fit, and for other invalid arguments about layouts."""

    code: ClassVar[str] = "SM105"


@public
class StoreError(ShardError):
    """Error for a description of how ranks store tensors that is invalid or does not fit the tensors' layouts. The
    description can be offsets in buffers, a declaration in text, or a record of the slices that a weight loader copied.

    For example, views overlap or reach outside a buffer, or a row is wrong.
    """

    code: ClassVar[str] = "SM106"


@public
class ParamLayoutError(ShardError):
    """Error for parameters or options from which no flat buffer can be laid out, and for a buffer layout that
    contradicts itself."""

    code: ClassVar[str] = "SM107"


@public
class PlanError(ShardError):
    """Error for a plan that cannot be made or used, or that does not move tensors from their source layouts to their
    destination layouts."""

    code: ClassVar[str] = "SM108"


@public
class DigestError(ShardError):
    """Error of functions that compare tensors by digests of their elements: an array does not fit its layout, replicas
    differ, or the tensors have different names, shapes or dtypes, for example."""

    code: ClassVar[str] = "SM109"


@public
class FormatError(ShardError):
    """Error for a quantized format, such as FP8, that is unknown, has an invalid argument, or cannot be applied to the
    given array, slice or layout."""

    code: ClassVar[str] = "SM110"


@public
class ExchangeError(ShardError):
    """Error for a move that cannot start or fails, for example if ranks disagree or tensors do not fit the plan."""

    code: ClassVar[str] = "SM111"
