"""Transformed: two sides as they are held, and the sides of what travels between them.

1. Rules go from a pattern to a transform. A pattern is a kind of layer or a glob, as in `shardmath.rules`; the first
   that matches a name counts, and one that no tensor falls to is an error, but for `*`.
2. The wire tensors of tensor `w` are `w.data`, `w.scale` and so on; a name that a tensor has already is an error.
   Where a plan is of two layouts, the names are `data` and `scale` alone.
3. A tensor that no rule takes travels as it is. Its dtypes are one, or that is an error, which names the cast.
4. What travels are sides like any others: plans, proofs, programs, certificates and collectives do not know.

>>> import numpy as np
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> from shardmath.proofs.simulate import simulate
>>> from shardmath.values.transforms.pointwise import Cast
>>> rows = Layout((4,), Mesh(tp=2), "(tp n)", dtype="float32")
>>> whole = Layout((4,), Mesh(tp=2), "n", dtype="float16")
>>> t = transformed({"w": rows}, {"w": whole}, {"*": Cast("float16")})
>>> print(t)
w: float32[4] to float16[4] by Cast(dtype='float16', at='source', lossy=False) as data float16
>>> p = plan(t.src, t.dst)
>>> local = np.array([1 / 3, 2 / 3], np.float32)
>>> held = {rank: t.prepare(rank, {"w": local}) for rank in p.src_ranks}
>>> t.finalize(0, simulate(p, held)[0])
{'w': array([0.3333, 0.6665, 0.3333, 0.6665], dtype=float16)}
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.arguments import as_integer
from shardmath.base.digest import digest
from shardmath.base.errors import PlanError
from shardmath.base.public import public_in
from shardmath.base.text import plural
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest, windows_of
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import Side, describe_form, key_by_name
from shardmath.values.formats.elements import Array
from shardmath.values.transforms.choosing import pair
from shardmath.values.transforms.components import End, Transform
from shardmath.values.transforms.local import Arrays, WireJob, finalize, find_array, prepare
from shardmath.values.transforms.wires import Held as WithCompanions
from shardmath.values.transforms.wires import Wired, wire

__all__ = ["Transformed", "transformed"]

Held: TypeAlias = Mapping[str, LayoutOrWindows]
"""How a side holds tensors, by name."""


@public_in("transforms")
@dataclass(frozen=True, slots=True, repr=False)
class Transformed:
    """Two sides and what travels between them; made by `transformed`.

    `held_src` and `held_dst` are the sides as held, `src` and `dst` those of wire tensors, which `plan` takes; `wired`
    are the tensors that have a transform. Equal values have equal layouts and equal transforms.
    """

    held_src: Held
    held_dst: Held
    src: Held
    dst: Held
    wired: Mapping[str, Wired]
    is_tree: bool

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        tensors = plural(self.held_src, "tensor")
        return f"<transforms of {len(self.wired)} of {tensors}, {self.digest[:12]}>"

    def __str__(self) -> str:
        lines = [f"{name or 'the tensor'}: {wired}" for name, wired in self.wired.items()]
        tensors = self._list_tensors(self.held_src, 0)
        others = len(tensors) - len(self.wired)
        if others:
            lines.append(f"{plural(others, 'tensor')} as held")
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """The same for equal layouts and transforms on every rank, however spelled: 64 hexadecimal digits."""
        held = []
        for side in (self.held_src, self.held_dst):
            for name in sorted(side):
                windows = windows_of(side[name], name, PlanError)
                held.append((name, [holdings_digest(one) for one in windows]))
        rules = []
        for name in sorted(self.wired):
            transform = self.wired[name].transform
            rules.append((name, str(transform)))
        return digest([held, rules])

    def _list_tensors(self, held: Held, end: int) -> list[str]:
        """The tensors of a side, 0 or 1, without companions."""
        beside: set[str] = set()
        for name, wired in self.wired.items():
            beside.update(name + suffix for suffix in wired.suffixes[end])
        return [name for name in held if name not in beside]

    def find_held(self, wires: Container[str]) -> list[str]:
        """The tensors of which something is among these wire tensors, without companions."""
        found = []
        for name in self._list_tensors(self.held_src, 0):
            wired = self.wired.get(name)
            first = name if wired is None else _name_wires(name, wired)[0]
            if first in wires:
                found.append(name)
        return found

    def jobs(self, rank: int, end: End) -> Iterator[WireJob]:
        """Every local tensor that the rank holds at an end, and what stands for it."""
        held, wires, number = self.held_src, self.src, 0
        if end == "destination":
            held, wires, number = self.held_dst, self.dst, 1
        for name in self._list_tensors(held, number):
            wired = self.wired.get(name)
            suffixes = () if wired is None else wired.suffixes[number]
            sent = [name] if wired is None else _name_wires(name, wired)
            kept = [name, *(name + suffix for suffix in suffixes)]
            local = zip(_list_locals(held, kept), _list_locals(wires, sent), strict=True)
            for mine, own in local:
                _, layout = mine[0]
                if rank in layout.mesh:
                    yield WireJob(name, mine, own, wired)

    def prepare(self, rank: int, arrays: Arrays) -> dict[str, Array]:
        """The rank's wire tensors at the source, of the local arrays that it holds; those without a transform as given.

        Elements of a type that numpy lacks are words (`elements`). Raises PlanError for arrays that are missing, or
        not as held, and for what a transform makes that is not as it says.
        """
        out: dict[str, Array] = {}
        number = as_integer(rank, "a rank", PlanError)
        for job in self.jobs(number, "source"):
            names = [key for key, _ in job.held]
            given = tuple(find_array(arrays, key, number) for key in names)
            out.update(prepare(job, number, given))
        return out

    def finalize(self, rank: int, arrays: Mapping[str, Array], out: Arrays | None = None) -> Arrays:
        """The rank's local arrays at the destination, of its wire tensors there; written into `out` if it is given.

        Cells that are not the tensor's own stay as they are in `out`, and are zeros otherwise. Raises PlanError as
        `prepare` does.
        """
        made: dict[str, Array] = {}
        number = as_integer(rank, "a rank", PlanError)
        for job in self.jobs(number, "destination"):
            given = [find_array(arrays, key, number) for key, _ in job.wires]
            into: Sequence[Array | None] = [None] * len(job.held)
            if out is not None:
                into = [find_array(out, key, number) for key, _ in job.held]
            made.update(finalize(job, number, given, into))
        if not self.is_tree and list(made) == [""]:
            return made[""]
        return made


def transformed(src: Side, dst: Side, rules: Mapping[str, Transform]) -> Transformed:
    """What travels so that the destination has what `rules` make of the source's tensors.

    Sides are two layouts, or two mappings from name to a layout or a tuple of them, as `plan` takes them; dtypes, and
    where a transform says so shapes and companions, may differ between them. Plan what travels: `plan(t.src, t.dst)`.
    Raises PlanError for a rule that no tensor falls to, a tensor without a rule whose dtypes differ, a layout that cuts
    a block, a companion that is missing, a name that would be two tensors', and for addends that would be transformed.
    """
    here, there, chosen = pair(src, dst, rules)
    _check_dtypes(here, there, chosen)
    wired = _wire_all(here, there, chosen)
    sent: dict[str, LayoutOrWindows] = {}
    received: dict[str, LayoutOrWindows] = {}
    for name, held in here.items():
        names = [name]
        ends = held, there[name]
        if name in wired:
            one = wired[name]
            names = _name_wires(name, one)
            ends = one.sent, one.received
            # Also names of tensors that are transformed themselves: a reader could not tell which is meant.
            _check_names(name, names, (here, sent))
        first, last = ends
        sent.update(zip(names, first, strict=True))
        received.update(zip(names, last, strict=True))
    held_src, held_dst = map(dict, key_by_name(src, dst))
    return Transformed(held_src, held_dst, sent, received, wired, isinstance(src, Mapping))


def _wire_all(
    here: Mapping[str, WithCompanions],
    there: Mapping[str, WithCompanions],
    chosen: Mapping[str, Transform],
) -> dict[str, Wired]:
    """What travels for each tensor that has a transform."""
    wired = {}
    known: dict[object, Wired] = {}
    for name, transform in chosen.items():
        ends = here[name], there[name]
        # Layers share layouts, and so what is made of them.
        key = id(transform), ends
        if key not in known:
            known[key] = wire(name, transform, *ends)
        wired[name] = known[key]
    return wired


def _check_dtypes(
    here: Mapping[str, WithCompanions],
    there: Mapping[str, WithCompanions],
    chosen: Mapping[str, Transform],
) -> None:
    """Raise PlanError for a tensor without a transform that has two dtypes, and for what is no layout."""
    for name, held in here.items():
        first = windows_of(held[0], name, PlanError)[0]
        last = windows_of(there[name][0], name, PlanError)[0]
        for beside in (*held[1:], *there[name][1:]):
            windows_of(beside, f"beside {name}", PlanError)
        if name not in chosen and first.dtype != last.dtype:
            what = f"tensor {name!r}: {describe_form(first)} here, {describe_form(last)} there"
            fix = f"give it a rule: {{{name!r}: transforms.Cast({last.dtype!r})}}"
            raise PlanError(f"{what}, and no rule takes it; {fix}")


def _list_locals(side: Held, names: Sequence[str]) -> Iterator[tuple[tuple[str, Layout], ...]]:
    """Window by window the local tensors of these names."""
    each = [windows_of(side[name], name, PlanError).locals(name) for name in names]
    return zip(*each, strict=True)


def _name_wires(name: str, wired: Wired) -> list[str]:
    """The names of what travels for the tensor."""
    return [f"{name}.{part.name}" if name else part.name for part in wired.components]


def _check_names(name: str, wires: Iterable[str], tensors: Iterable[Container[str]]) -> None:
    """Raise PlanError for a component that has the name of another tensor."""
    for own, others in itertools.product(wires, tensors):
        if own in others:
            fix = "rename the tensor, or the component"
            raise PlanError(f"{own!r} is a tensor, and a component of {name!r}; {fix}")
