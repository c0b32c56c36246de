"""Transformed: two sides as they are held, and the sides of what travels between them.

1. Rules go from a pattern to a transform. A pattern is a kind of layer or a glob, as in `shardmath.rules`; the first
   that matches a name counts, and one that no tensor falls to is an error, but for `*`.
2. The wire tensors of tensor `w` are `w.data`, `w.scale` and so on; a name that a tensor has already is an error.
   Where a plan is of two layouts, the names are `data` and `scale` alone.
3. A tensor that no rule takes travels as it is. Its dtypes are one, or that is an error, which names the cast.
4. What travels are sides like any others: plans, proofs, programs, certificates and collectives do not know.

>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> from shardmath.proofs.simulate import simulate
>>> from shardmath.transforms.pointwise import Cast
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

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.digest import digest
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest, windows_of
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import Side, describe_form, pair_by_name
from shardmath.transforms.choosing import choose
from shardmath.transforms.components import End, Transform
from shardmath.transforms.elements import Array, numpy_type, read_elements
from shardmath.transforms.packing import pack, unpack
from shardmath.transforms.wires import Wired, wire

__all__ = ["Job", "Transformed", "transformed"]

Held: TypeAlias = Mapping[str, LayoutOrWindows]
"""How a side holds tensors, by name."""

Arrays: TypeAlias = Mapping[str, Array] | Array
"""Local arrays by local name; the one array of a side without names."""


class Job(NamedTuple):
    """A local tensor `key` of a rank, and the wire tensors that stand for it, by local name; `wired` is None, and the
    names are one, where it travels as it is."""

    tensor: str
    key: str
    layout: Layout
    wires: tuple[tuple[str, Layout], ...]
    wired: Wired | None


@public
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
        others = len(self.held_src) - len(self.wired)
        if others:
            lines.append(f"{plural(others, 'tensor')} as held")
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """The same for equal layouts and transforms on every rank, however spelled: 64 hexadecimal digits."""
        tensors = []
        for name in sorted(self.held_src):
            sides = self.held_src[name], self.held_dst[name]
            held = [
                [holdings_digest(x) for x in windows_of(side, name, PlanError)] for side in sides
            ]
            transform = str(self.wired[name].transform) if name in self.wired else ""
            tensors.append((name, held, transform))
        return digest(tensors)

    def find_held(self, wires: Container[str]) -> list[str]:
        """The tensors of which something is among these wire tensors."""
        found = []
        for name in self.held_src:
            wired = self.wired.get(name)
            first = name if wired is None else _name_wires(name, wired)[0]
            if first in wires:
                found.append(name)
        return found

    def jobs(self, rank: int, end: End) -> Iterator[Job]:
        """Every local tensor that the rank holds at an end, and what stands for it."""
        sides = (self.held_src, self.src) if end == "source" else (self.held_dst, self.dst)
        held, wires = sides
        for name, one in held.items():
            wired = self.wired.get(name)
            names = [name] if wired is None else _name_wires(name, wired)
            there = [windows_of(wires[each], each, PlanError) for each in names]
            windows = windows_of(one, name, PlanError)
            for i, (key, layout) in enumerate(windows.locals(name)):
                if rank in layout.mesh:
                    pairs = zip(names, there, strict=True)
                    own = tuple((each.local_name(wire, i), each[i]) for wire, each in pairs)
                    yield Job(name, key, layout, own, wired)

    def prepare(self, rank: int, arrays: Arrays) -> dict[str, Array]:
        """The rank's wire tensors at the source, of the local arrays that it holds; those without a transform as given.

        Elements of a type that numpy lacks are words (`elements`). Raises PlanError for arrays that are missing, or
        not as held, and for what a transform makes that is not as it says.
        """
        out: dict[str, Array] = {}
        number = as_integer(rank, "a rank", PlanError)
        for job in self.jobs(number, "source"):
            given = _find_array(arrays, job.key, number)
            out.update(_prepare(job, number, given))
        return out

    def finalize(self, rank: int, arrays: Mapping[str, Array], out: Arrays | None = None) -> Arrays:
        """The rank's local arrays at the destination, of its wire tensors there; written into `out` if it is given.

        Cells that are not the tensor's own stay as they are in `out`, and are zeros otherwise. Raises PlanError as
        `prepare` does.
        """
        made: dict[str, Array] = {}
        number = as_integer(rank, "a rank", PlanError)
        for job in self.jobs(number, "destination"):
            given = [_find_array(arrays, key, number) for key, _ in job.wires]
            into = None if out is None else _find_array(out, job.key, number)
            made[job.key] = _finalize(job, number, given, into)
        if not self.is_tree and list(made) == [""]:
            return made[""]
        return made


def transformed(src: Side, dst: Side, rules: Mapping[str, Transform]) -> Transformed:
    """What travels so that the destination has what `rules` make of the source's tensors.

    Sides are two layouts, or two mappings from name to a layout or a tuple of them, as `plan` takes them; dtypes, and
    where a transform says so shapes, may differ between them. Plan what travels: `plan(t.src, t.dst)`. Raises PlanError
    for a rule that no tensor falls to, a tensor without a rule whose dtypes differ, a layout that cuts a block, a name
    that would be two tensors', and for addends that would be transformed.
    """
    here, there = pair_by_name(src, dst)
    chosen = choose(rules, list(here))
    _check_dtypes(here, there, chosen)
    sent: dict[str, LayoutOrWindows] = {}
    received: dict[str, LayoutOrWindows] = {}
    wired: dict[str, Wired] = {}
    known: dict[object, Wired] = {}
    for name, held in here.items():
        if name not in chosen:
            sent[name], received[name] = held, there[name]
            continue
        # Layers share layouts, and so what is made of them.
        key = id(chosen[name]), held, there[name]
        if key not in known:
            known[key] = wire(name, chosen[name], held, there[name])
        wired[name] = known[key]
        # Also names of tensors that are transformed themselves: a reader could not tell which is meant.
        for own, a, b in _pair_wires(name, known[key]):
            if own in here or own in sent:
                fix = "rename the tensor, or the component"
                raise PlanError(f"{own!r} is a tensor, and a component of {name!r}; {fix}")
            sent[own], received[own] = a, b
    is_tree = isinstance(src, Mapping)
    return Transformed(dict(here), dict(there), sent, received, wired, is_tree)


def _check_dtypes(here: Held, there: Held, chosen: Mapping[str, Transform]) -> None:
    """Raise PlanError for a tensor without a transform that has two dtypes, and for what is no layout."""
    for name, held in here.items():
        first = windows_of(held, name, PlanError)[0]
        last = windows_of(there[name], name, PlanError)[0]
        if name not in chosen and first.dtype != last.dtype:
            what = f"tensor {name!r}: {describe_form(first)} here, {describe_form(last)} there"
            fix = f"give it a rule: {{{name!r}: transforms.Cast({last.dtype!r})}}"
            raise PlanError(f"{what}, and no rule takes it; {fix}")


def _name_wires(name: str, wired: Wired) -> list[str]:
    """The names of what travels for the tensor."""
    return [f"{name}.{part.name}" if name else part.name for part in wired.components]


def _pair_wires(name: str, wired: Wired) -> Iterator[tuple[str, LayoutOrWindows, LayoutOrWindows]]:
    """Each wire tensor, and how it lies at both ends."""
    return zip(_name_wires(name, wired), wired.sent, wired.received, strict=True)


def _find_array(arrays: Arrays, key: str, rank: int) -> Array:
    """The local array of that name. Raises PlanError where it is missing."""
    if not isinstance(arrays, Mapping):
        arrays = {"": arrays}
    if key not in arrays:
        names = ", ".join(map(repr, arrays)) or "none"
        raise PlanError(f"rank {rank} gives no array {key!r}; it gives {names}")
    return arrays[key]


def _read_local(given: object, key: str, layout: Layout, rank: int) -> Array:
    """The array as it is held there. Raises PlanError for one of another shape or dtype."""
    what = f"rank {rank}: array {key!r}"
    array = read_elements(given, layout.dtype, what)
    expected = layout.local_shape(rank)
    if array.shape != expected:
        there = f"{layout} has {expected} there"
        raise PlanError(f"{what} has shape {array.shape}, {there}; pass that local array")
    return array


def _prepare(job: Job, rank: int, given: Array) -> dict[str, Array]:
    """The wire tensors of a local array."""
    if job.wired is None or job.wired.as_held.source:
        ((key, _),) = job.wires
        return {key: given}
    wired = job.wired
    packed = pack(job.layout, rank, _read_local(given, job.key, job.layout, rank))
    if not packed.size:
        return _make_empty(job.wires, rank)
    made = tuple(wired.transform.prepare(packed, wired.src, wired.dst))
    if len(made) != len(job.wires):
        what = f"tensor {job.tensor!r}: {wired.transform} makes {plural(made, 'array')}"
        raise PlanError(f"{what} for {plural(job.wires, 'component')}; make one for each")
    return {
        key: _read_local(array, key, layout, rank)
        for array, (key, layout) in zip(made, job.wires, strict=True)
    }


def _make_empty(wires: tuple[tuple[str, Layout], ...], rank: int) -> dict[str, Array]:
    """The wire tensors of a rank that holds nothing: no function has to be written for that."""
    return {key: np.zeros(own.local_shape(rank), numpy_type(own.dtype)) for key, own in wires}


def _finalize(job: Job, rank: int, given: list[Array], into: Array | None) -> Array:
    """The local array of the wire tensors; `into` itself where that is given."""
    layout, wired = job.layout, job.wired
    if wired is None or wired.as_held.destination:
        (array,) = given
        if into is None:
            return array
        packed = pack(layout, rank, array)
    else:
        packed = _compute(job, wired, rank, given)
    out = np.zeros(layout.local_shape(rank), packed.dtype) if into is None else into
    if wired is None:
        unpack(layout, rank, packed, out)
        return out
    # As words on both sides, where the arrays are another library's.
    own = _read_local(out, job.key, layout, rank)
    unpack(layout, rank, read_elements(packed, layout.dtype, f"array {job.key!r}"), own)
    return out


def _compute(job: Job, wired: Wired, rank: int, given: list[Array]) -> Array:
    """What the rank holds of the tensor, packed."""
    wires = zip(given, job.wires, strict=True)
    arrays = tuple(_read_local(array, key, own, rank) for array, (key, own) in wires)
    expected = tuple(runs.size for runs in job.layout.runs(rank))
    if 0 in expected:
        return np.zeros(expected, numpy_type(job.layout.dtype))
    made = wired.transform.finalize(arrays, wired.src, wired.dst)
    what = f"what {wired.transform} makes of {job.key!r}"
    packed = read_elements(made, job.layout.dtype, what)
    if packed.shape != expected:
        raise PlanError(
            f"{what} has shape {packed.shape}, rank {rank} holds {expected}; make that shape"
        )
    return packed
