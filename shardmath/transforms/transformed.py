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

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.digest import digest
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest, windows_of
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import Side, describe_form, key_by_name
from shardmath.transforms.choosing import pair
from shardmath.transforms.components import End, Transform
from shardmath.transforms.elements import Array, numpy_type, read_elements
from shardmath.transforms.packing import pack, unpack
from shardmath.transforms.wires import Held as WithCompanions
from shardmath.transforms.wires import Wired, wire

__all__ = ["Job", "Transformed", "transformed"]

Held: TypeAlias = Mapping[str, LayoutOrWindows]
"""How a side holds tensors, by name."""

Arrays: TypeAlias = Mapping[str, Array] | Array
"""Local arrays by local name; the one array of a side without names."""


class Job(NamedTuple):
    """A local tensor of a rank with its companions, and the wire tensors that stand for it, by local name; `wired` is
    None, and the names are one, where it travels as it is."""

    tensor: str
    held: tuple[tuple[str, Layout], ...]
    wires: tuple[tuple[str, Layout], ...]
    wired: Wired | None

    @property
    def key(self) -> str:
        """The tensor's local name."""
        return self.held[0][0]

    @property
    def layout(self) -> Layout:
        """The tensor's layout."""
        return self.held[0][1]


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
        others = len(self._list_tensors(self.held_src, 0)) - len(self.wired)
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
        rules = [(name, str(self.wired[name].transform)) for name in sorted(self.wired)]
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

    def jobs(self, rank: int, end: End) -> Iterator[Job]:
        """Every local tensor that the rank holds at an end, and what stands for it."""
        number = 0 if end == "source" else 1
        held, wires = ((self.held_src, self.src), (self.held_dst, self.dst))[number]
        for name in self._list_tensors(held, number):
            wired = self.wired.get(name)
            suffixes = () if wired is None else wired.suffixes[number]
            sent = [name] if wired is None else _name_wires(name, wired)
            kept = [name, *(name + suffix for suffix in suffixes)]
            local = zip(_list_locals(held, kept), _list_locals(wires, sent), strict=True)
            for mine, own in local:
                _, layout = mine[0]
                if rank in layout.mesh:
                    yield Job(name, mine, own, wired)

    def prepare(self, rank: int, arrays: Arrays) -> dict[str, Array]:
        """The rank's wire tensors at the source, of the local arrays that it holds; those without a transform as given.

        Elements of a type that numpy lacks are words (`elements`). Raises PlanError for arrays that are missing, or
        not as held, and for what a transform makes that is not as it says.
        """
        out: dict[str, Array] = {}
        number = as_integer(rank, "a rank", PlanError)
        for job in self.jobs(number, "source"):
            given = tuple(_find_array(arrays, key, number) for key, _ in job.held)
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
            into: Sequence[Array | None] = [None] * len(job.held)
            if out is not None:
                into = [_find_array(out, key, number) for key, _ in job.held]
            made.update(_finalize(job, number, given, into))
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
    sent: dict[str, LayoutOrWindows] = {}
    received: dict[str, LayoutOrWindows] = {}
    wired: dict[str, Wired] = {}
    known: dict[object, Wired] = {}
    for name, held in here.items():
        if name not in chosen:
            ((sent[name],), (received[name],)) = held, there[name]
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
    held_src, held_dst = map(dict, key_by_name(src, dst))
    return Transformed(held_src, held_dst, sent, received, wired, isinstance(src, Mapping))


def _check_dtypes(
    here: Mapping[str, WithCompanions],
    there: Mapping[str, WithCompanions],
    chosen: Mapping[str, Transform],
) -> None:
    """Raise PlanError for a tensor without a transform that has two dtypes, and for what is no layout."""
    for name, held in here.items():
        first = windows_of(held[0], name, PlanError)[0]
        last = windows_of(there[name][0], name, PlanError)[0]
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


def _prepare(job: Job, rank: int, given: tuple[Array, ...]) -> dict[str, Array]:
    """The wire tensors of a local array and its companions."""
    wired = job.wired
    if wired is None or wired.as_held.source:
        return {key: array for array, (key, _) in zip(given, job.wires, strict=True)}
    packed = []
    for array, (key, layout) in zip(given, job.held, strict=True):
        packed.append(pack(layout, rank, _read_local(array, key, layout, rank)))
    if not packed[0].size:
        return _make_empty(job.wires, rank)
    values: Any = tuple(packed) if len(packed) > 1 else packed[0]
    made = tuple(wired.transform.prepare(values, wired.src, wired.dst))
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


def _finalize(
    job: Job, rank: int, given: Sequence[Array], into: Sequence[Array | None]
) -> dict[str, Array]:
    """The local array of the wire tensors, and its companions; those of `into` themselves where they are given."""
    wired = job.wired
    is_held = wired is None or wired.as_held.destination
    arrays = given if wired is None or is_held else _compute(job, wired, rank, given)
    made = {}
    for array, out, (key, layout) in zip(arrays, into, job.held, strict=True):
        if is_held and out is None:
            made[key] = array
            continue
        packed = pack(layout, rank, array) if is_held else array
        made[key] = np.zeros(layout.local_shape(rank), packed.dtype) if out is None else out
        _put(job, key, layout, rank, packed, made[key])
    return made


def _put(job: Job, key: str, layout: Layout, rank: int, packed: Array, out: Array) -> None:
    """What was made into the local array."""
    if job.wired is None:
        unpack(layout, rank, packed, out)
        return
    # As words on both sides, where the arrays are another library's.
    own = _read_local(out, key, layout, rank)
    unpack(layout, rank, read_elements(packed, layout.dtype, f"array {key!r}"), own)


def _compute(job: Job, wired: Wired, rank: int, given: Sequence[Array]) -> list[Array]:
    """What the rank holds of the tensor and its companions, packed."""
    wires = zip(given, job.wires, strict=True)
    arrays = tuple(_read_local(array, key, own, rank) for array, (key, own) in wires)
    shapes = [tuple(runs.size for runs in layout.runs(rank)) for _, layout in job.held]
    if 0 in shapes[0]:
        kinds = [numpy_type(layout.dtype) for _, layout in job.held]
        return [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    made: Any = wired.transform.finalize(arrays, wired.src, wired.dst)
    values = (made,) if len(job.held) == 1 else tuple(made)
    if len(values) != len(job.held):
        what = f"{wired.transform} makes {plural(values, 'array')} of {job.key!r}"
        raise PlanError(f"{what}, and {plural(job.held, 'tensor')} hold it; make one for each")
    packed = []
    for value, expected, (key, layout) in zip(values, shapes, job.held, strict=True):
        what = f"what {wired.transform} makes of {key!r}"
        array = read_elements(value, layout.dtype, what)
        _check_shape(what, array.shape, expected, rank)
        packed.append(array)
    return packed


def _check_shape(what: str, found: tuple[int, ...], expected: tuple[int, ...], rank: int) -> None:
    """Raise PlanError for another shape than the rank holds."""
    if found != expected:
        fix = "make that shape"
        raise PlanError(f"{what} has shape {found}, rank {rank} holds {expected}; {fix}")
