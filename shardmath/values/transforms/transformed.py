"""Transformed: two sides as ranks hold them, and the sides of the wire tensors between them.

1. Rules map a pattern to a transform. A pattern is a kind of layer or a glob, as in `shardmath.rules`; the first that
   matches a name counts. Except `*`, a rule that takes no tensor is an error.
2. The wire tensors of tensor `w` are `w.data`, `w.scale` and so on; a name that a tensor has already is an error.
   Between two single layouts, the names are just `data` and `scale`.
3. A tensor that no rule takes travels as it is. If its dtypes differ, PlanError names the missing cast.
4. Wire tensors form ordinary sides: plans, proofs, programs, certificates and collectives treat them like any others.

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
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest, label, windows_of
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
"""The layouts, or windows, of a side's tensors, by name."""


@public_in("transforms")
@dataclass(frozen=True, slots=True, repr=False)
class Transformed:
    """A move that converts tensors, made by `transformed`. `held_src` and `held_dst` have the layouts of the tensors
    before and after the move; `src` and `dst` have the layouts of the tensors that are sent in their place, at the
    source and at the destination.

    `plan` takes `src` and `dst`, and `wired` has the transformed tensors by name. Equal values have equal layouts and
    equal transforms.
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
        source = 0
        tensors = self._list_tensors(self.held_src, source)
        others = len(tensors) - len(self.wired)
        if others:
            lines.append(f"{plural(others, 'tensor')} as held")
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """A digest of 64 hexadecimal digits, which ranks compare; it is equal for equivalent layouts and equal
        transforms."""
        held = []
        for side in (self.held_src, self.held_dst):
            for name in sorted(side):
                windows = windows_of(side[name], name, PlanError)
                held.append((name, [holdings_digest(layout) for layout in windows]))
        rules = []
        for name in sorted(self.wired):
            transform = self.wired[name].transform
            rules.append((name, str(transform)))
        return digest([held, rules])

    def _list_tensors(self, held: Held, end: int) -> list[str]:
        """The tensors of an end, 0 or 1, without companions."""
        companions: set[str] = set()
        for name, wired in self.wired.items():
            companions.update(name + suffix for suffix in wired.suffixes[end])
        return [name for name in held if name not in companions]

    def find_held(self, wires: Container[str]) -> list[str]:
        """Return the names of the source's tensors that are sent under a name in `wires`; companions, such as scales,
        are left out. If several tensors are sent for one source tensor, such as data and scales, only the name of the
        first must be in `wires`."""
        names = []
        for name in self._list_tensors(self.held_src, end=0):
            wired = self.wired.get(name)
            first = name if wired is None else _name_wires(name, wired)[0]
            if first in wires:
                names.append(name)
        return names

    def jobs(self, rank: int, end: End) -> Iterator[WireJob]:
        """Yield a WireJob for each local tensor that `rank` has at `end`, the source or the destination of the move. It
        lists the tensor, its companions (such as scales), and the tensors that are sent or received in their place."""
        held, wires, end_index = self.held_src, self.src, 0
        if end == "destination":
            held, wires, end_index = self.held_dst, self.dst, 1
        for name in self._list_tensors(held, end_index):
            wired = self.wired.get(name)
            suffixes = () if wired is None else wired.suffixes[end_index]
            wire_names = [name] if wired is None else _name_wires(name, wired)
            held_names = [name, *(name + suffix for suffix in suffixes)]
            windows = zip(
                _list_locals(held, held_names), _list_locals(wires, wire_names), strict=True
            )
            for local_held, local_wires in windows:
                _, layout = local_held[0]
                if rank in layout.mesh:
                    yield WireJob(name, local_held, local_wires, wired)

    def prepare(self, rank: int, arrays: Arrays) -> dict[str, Array]:
        """Return a dict of the arrays that `rank` sends, computed from its local source `arrays`. Keys are the local
        names of the sent tensors; a tensor without a transform is sent as it is.

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
        """Return the local arrays of `rank` at the destination (a dict by name, or a single array), made from the
        received `arrays`; write them to `out` if given.

        Without `out`, a tensor that arrives as it is held is the received array itself, unchecked. Holes of other
        arrays stay as they are in `out`, and are zeros otherwise. Raises PlanError as `prepare` does.
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
    """Return a Transformed: the tensors that are sent so that tensors with layouts `src` arrive as tensors with layouts
    `dst`; `rules` maps patterns of tensor names to the transforms that convert them. The layouts of the sent tensors
    are the Transformed's `src` and `dst`.

    Sides are two layouts, or two mappings from name to a layout or a tuple of them, as `plan` takes them. Dtypes may
    differ between them, and so may shapes and companions if a transform says so. Plan the wire tensors with
    `plan(t.src, t.dst)`. Raises PlanError for a rule that takes no tensor, a tensor without a rule whose dtypes differ,
    a layout that cuts a block, a missing companion, two tensors with one name, and addends that would be transformed.
    """
    src_tensors, dst_tensors, chosen = pair(src, dst, rules)
    _check_dtypes(src_tensors, dst_tensors, chosen)
    wired = _wire_all(src_tensors, dst_tensors, chosen)
    sent: dict[str, LayoutOrWindows] = {}
    received: dict[str, LayoutOrWindows] = {}
    for name, held in src_tensors.items():
        names = [name]
        src_windows, dst_windows = held, dst_tensors[name]
        if name in wired:
            wires = wired[name]
            names = _name_wires(name, wires)
            src_windows, dst_windows = wires.sent, wires.received
            # Names of transformed tensors count too, although they do not travel: readers would confuse the two.
            _check_names(name, names, (src_tensors, sent))
        sent.update(zip(names, src_windows, strict=True))
        received.update(zip(names, dst_windows, strict=True))
    held_src, held_dst = map(dict, key_by_name(src, dst))
    return Transformed(held_src, held_dst, sent, received, wired, isinstance(src, Mapping))


def _wire_all(
    src_tensors: Mapping[str, WithCompanions],
    dst_tensors: Mapping[str, WithCompanions],
    chosen: Mapping[str, Transform],
) -> dict[str, Wired]:
    """The wire tensors of each tensor that has a transform."""
    wired = {}
    known: dict[object, Wired] = {}
    for name, transform in chosen.items():
        ends = src_tensors[name], dst_tensors[name]
        # Layers that share layouts share their wire tensors; `chosen` keeps transforms alive, so that no id is reused.
        key = id(transform), ends
        if key not in known:
            known[key] = wire(name, transform, *ends)
        wired[name] = known[key]
    return wired


def _check_dtypes(
    src_tensors: Mapping[str, WithCompanions],
    dst_tensors: Mapping[str, WithCompanions],
    chosen: Mapping[str, Transform],
) -> None:
    """Raise PlanError for an untransformed tensor with two dtypes, and for a value that is not a layout."""
    for name, held in src_tensors.items():
        first = windows_of(held[0], name, PlanError)[0]
        last = windows_of(dst_tensors[name][0], name, PlanError)[0]
        for companion in (*held[1:], *dst_tensors[name][1:]):
            windows_of(companion, f"{name} (its companion)", PlanError)
        if name not in chosen and first.dtype != last.dtype:
            what = f"{label(name)}: {describe_form(first)} at the source, {describe_form(last)} at the destination"
            fix = f"add a rule such as {{{name!r}: transforms.Cast({last.dtype!r})}}"
            raise PlanError(f"{what}, and no rule matches it; {fix}")


def _list_locals(side: Held, names: Sequence[str]) -> Iterator[tuple[tuple[str, Layout], ...]]:
    """The local tensors of these names, window by window."""
    by_name = [windows_of(side[name], name, PlanError).locals(name) for name in names]
    return zip(*by_name, strict=True)


def _name_wires(name: str, wired: Wired) -> list[str]:
    """The names of the tensor's wire tensors."""
    return [f"{name}.{part.name}" if name else part.name for part in wired.components]


def _check_names(name: str, wires: Iterable[str], tensors: Iterable[Container[str]]) -> None:
    """Raise PlanError for a component that has the name of another tensor."""
    for wire_name, names in itertools.product(wires, tensors):
        if wire_name in names:
            fix = "rename the tensor or the component"
            raise PlanError(f"{wire_name!r} is both a tensor and a component of {name!r}; {fix}")
