"""Certificate: a time compared with a bound that no schedule beats, and the ranks that force the bound.

>>> witness = Witness(ranks=(2, 3), direction="in", nbytes=10**9, bytes_per_s=1e11)
>>> print(make_certificate((0.01, witness), 0.0125))
12.5 ms, 1.25 times the bound of 10 ms: 2 ranks (2, 3) must take in 1 GB at 100 GB/s
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import count_ranks

__all__ = ["Certificate", "Witness", "make_certificate", "show_si"]


class Witness(NamedTuple):
    """The reason why no schedule of a move can be faster: at least `nbytes` must enter or leave `ranks`, as `direction`
    says, over links that together carry at most `bytes_per_s`.

    The program's other ranks, in the other direction, show the same;
    these are fewer.
    """

    ranks: tuple[int, ...]
    direction: str
    nbytes: int
    bytes_per_s: float


@public
@dataclass(frozen=True, slots=True)
class Certificate:
    """A comparison of the estimated time of a plan or program with a bound that no schedule can beat; made by
    `certify`.

    `plan_s` is the plan's time in seconds, `bound_s` a time that no plan can beat, and `witness`
    names the ranks and links that prove it. `ratio` is `plan_s / bound_s`; it is 1.0 if nothing
    has to move. `explain` says all of this in sentences.
    """

    bound_s: float
    plan_s: float
    ratio: float
    witness: Witness | None
    _compare: Callable[[], Sequence[tuple[str, float]]] | None = field(
        default=None, repr=False, compare=False
    )

    def explain(self) -> str:
        """Return sentences that say what the bound is, which ranks force it, and how long the plan takes; and what it
        would take without relays, and stage by stage, as other systems do it."""
        w = self.witness
        if w is None:
            return "Nothing has to move."
        bound = f"{show_si(self.bound_s)}s"
        lines = [
            f"No schedule takes less than {bound}: {self._word_witness(w)}.",
            f"This takes {show_si(self.plan_s)}s, {self.ratio:.4g} times the bound.",
        ]
        for what, seconds in self._compare() if self._compare else ():
            ratio = seconds / self.bound_s
            lines.append(f"{what} {show_si(seconds)}s, {ratio:.4g} times the bound.")
        return "\n".join(lines)

    @property
    def latency_s(self) -> float:
        """The seconds of the bound that are the latency of a message; the rest are the witness's bytes at its rate."""
        if self.witness is None:
            return 0.0
        return max(0.0, self.bound_s - self.witness.nbytes / self.witness.bytes_per_s)

    def svg(self) -> str:
        """Draw the bound and the plan's time as bars on one axis, with the witness below, as an SVG document."""
        return svg(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __str__(self) -> str:
        plan = f"{show_si(self.plan_s)}s"
        w = self.witness
        if w is None:
            return f"{plan}; nothing has to move"
        bound = f"{self.ratio:.4g} times the bound of {show_si(self.bound_s)}s"
        return f"{plan}, {bound}: {self._word_witness(w)}"

    def _word_witness(self, w: Witness) -> str:
        """The ranks that force the bound, their bytes and their rate."""
        verb = "take in" if w.direction == "in" else "give out"
        rate = f"{show_si(w.bytes_per_s)}B/s"
        # Latency is left out if the bytes explain the bound.
        has_latency = self.latency_s > self.bound_s / 100
        latency = f", after {show_si(self.latency_s)}s of latency" if has_latency else ""
        return f"{count_ranks(w.ranks)} must {verb} {show_si(w.nbytes)}B at {rate}{latency}"


def make_certificate(bound: tuple[float, Witness | None], plan_s: float) -> Certificate:
    """Compare `plan_s`, the seconds that a plan takes, with `bound`, from `find_bound`; return a Certificate.

    Raises PlanError if `plan_s` is not a time, or less than the bound by more than rounding.
    """
    bound_s, witness = bound
    if not 0 <= plan_s < math.inf:
        raise PlanError(f"plan_s is {plan_s!r} seconds; give a finite time of 0 or more")
    if plan_s < bound_s * (1 - 1e-9):
        shown = Certificate(bound_s, plan_s, plan_s / bound_s, witness)
        what = f"plan_s is less than a bound that no schedule beats: {shown}"
        raise PlanError(f"{what}; give the time of the whole plan, on the topology of the bound")
    if bound_s == 0:
        ratio = math.inf if plan_s else 1.0
        return Certificate(bound_s, plan_s, ratio, witness)
    return Certificate(bound_s, plan_s, max(1.0, plan_s / bound_s), witness)


PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3))
"""The SI prefixes and what they stand for; smaller values have the prefix u, 1e-6."""


def show_si(value: float) -> str:
    """The value with four digits, a space and the prefix of its unit.

    >>> show_si(1_073_741_824), show_si(0.5)
    ('1.074 G', '500 m')
    """
    for prefix, size in PREFIXES:
        if (
            value >= size * 0.99995
        ):  # with four digits, a value just below the size is rounded up to it
            return f"{value / size:.4g} {prefix}"
    if not value:
        return "0 "
    return f"{value / 1e-6:.4g} u"
