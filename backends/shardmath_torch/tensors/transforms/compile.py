"""`compile_transformed`: two sides and what travels between them, made ready; then moved as often as wanted.

1. Ranks agree on the transforms, and then on the plan, before they move anything. What a hook of the user's raises when
   it is asked for buffers is an error on all ranks then.
2. A call takes tensors as they are held. What is done at the source is done before ranks vote: where it fails, all
   ranks raise, nothing has moved, and the next call works.
3. What is done at the destination is done when all has arrived there. Where it fails, this rank has failed, and the
   group is broken; ranks that had nothing to wait for see it in the next call, or in this one with `acknowledge=True`.
   With `commit="all"` it is done beside the destination: where it fails, all ranks raise, and all is as it was.
4. A tensor for which nothing is done at an end is sent, or received, in its own memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.holdings import holdings_digest, windows_of
from shardmath.plans.plan import Plan, plan
from shardmath.plans.programs.program import Program
from shardmath.values.transforms.components import End
from shardmath.values.transforms.local import WireJob
from shardmath.values.transforms.transformed import Held, Transformed
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.naming import attempt, word_objection
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.commits.shadows import Pair, Shadows
from shardmath_torch.moves.exchange.local import Local, Tensors, Wanted, by_key, check, signature
from shardmath_torch.moves.exchange.memory import mark_written
from shardmath_torch.moves.movers.calls import EVERY
from shardmath_torch.moves.movers.compile import make_ready
from shardmath_torch.moves.movers.mover import Mover
from shardmath_torch.moves.movers.ready import Ready
from shardmath_torch.moves.movers.settings import ALL, DEFAULT_TIMEOUT_S, DIRECT, Settings
from shardmath_torch.moves.movers.stages import Stage
from shardmath_torch.tensors.transforms.agreeing import agree, join_group
from shardmath_torch.tensors.transforms.workers import Worker, count_bytes, make_worker

__all__ = [
    "EndStage",
    "TransformedMover",
    "agree_again",
    "compile_transformed",
    "make_ends",
]

SHOWN = 24
"""Hexadecimal digits of a digest that a claim has."""


class _Part(NamedTuple):
    """A local tensor of this rank, and its worker; None where it travels in its own memory."""

    job: WireJob
    worker: Worker | None


def _list_workers(parts: Iterable[_Part]) -> list[Worker]:
    """What is done for the tensors for which something is done."""
    return [part.worker for part in parts if part.worker is not None]


def _list_keys(workers: Iterable[Worker]) -> Iterator[str]:
    """The local tensors of these, companions too."""
    for worker in workers:
        for key, _ in worker.job.held:
            yield key


class _Bound(NamedTuple):
    """What callers gave, and what travels for it."""

    src: Local
    out: Local
    wires: tuple[Local, Local]


class EndStage(Stage):
    """What a rank does at both ends: before it sends, and of what has arrived.

    With `shadows` it makes that beside the tensors. `holds`: callers hold on to the mappings that they pass, and never
    change them.
    """

    def __init__(
        self,
        transforms: Transformed,
        party: Party,
        parts: Sequence[list[_Part]],
        commit: object,
        holds: bool = False,
    ) -> None:
        self._holds = holds
        self._parts = parts
        self._rank = party.rank
        self._device = party.wire.device
        sides = zip(("source", "destination"), parts, strict=True)
        first, last = (_want(transforms, side, party.rank, own) for side, own in sides)
        self._wanted = first, last
        # What a hook takes may have no plain memory; it knows what it can read.
        preparing, finalizing = map(_list_workers, parts)
        self._opaque = set(_list_keys(one for one in preparing if one.opaque))
        self._checked: object = None
        self._made = {one.job.key: one for one in finalizing}
        self._arriving: dict[str, Tensor] = {}
        self._bound: _Bound | None = None
        self._working = ""
        self.shadows: Shadows | None = None
        if commit == ALL:
            made = itertools.chain.from_iterable(one.job.held for one in finalizing)
            self.shadows = Shadows(dict(made), party.rank)

    @property
    def own(self) -> frozenset[str]:
        """The wire tensors at the destination that are made into others."""
        return frozenset(key for worker in self._made.values() for key, _ in worker.job.wires)

    @property
    def nbytes(self) -> int:
        """Bytes of wire buffers, whether they are made yet or not."""
        return sum(count_bytes(worker.job, self._rank) for worker in self._workers)

    @property
    def _workers(self) -> list[Worker]:
        return [worker for side in self._parts for worker in _list_workers(side)]

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """The wire tensors, those of the source made. Raises what speaks against moving them."""
        self._arriving = {}
        self._working = ""
        here, there = by_key(self._wanted[0], src), by_key(self._wanted[1], out)
        self._check(here, there)
        sources, targets = self._parts
        with torch.inference_mode():
            for worker in _list_workers(sources):
                _run(worker, here, "prepare")
        own = _list_keys(self._made.values())
        self._arriving = {key: there[key] for key in own if key in there}
        if self.shadows is not None:
            self.shadows.receive_into(self._arriving)
        bound = self._bound
        if bound is None or bound.src is not src or bound.out is not out:
            wires = _name_wires(sources, here), _name_wires(targets, there)
            bound = _Bound(src, out, wires)
        # The very mappings, for the very same: by them movers know what they have looked at.
        self._bound = bound if self._holds else None
        return bound.wires

    def _check(self, here: Tensors, there: Tensors) -> None:
        """Raise ExchangeError for tensors that are not as held, unless these were looked at already."""
        plain = {key: tensor for key, tensor in here.items() if key not in self._opaque}
        signed = signature((plain, there))
        if signed == self._checked:
            return
        self._checked = None
        first, last = self._wanted
        own = {key: held for key, held in first.tensors.items() if key not in self._opaque}
        is_direct = self.shadows is None
        wants = first._replace(tensors=own), last
        check(wants, (plain, there), self._device, apart=is_direct)
        self._checked = signed

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """Make of what has arrived what the destination holds: at once, or beside it."""
        if self.shadows is not None:
            self._make_all(self.shadows.tensors)
            return self.shadows.pair(self._arriving)
        self._make_all(self._arriving)
        return ()

    def unfold(self, arrived: Tensors) -> Tensors:
        """The tensors as they are held, wherever they were made."""
        made = self._arriving if self.shadows is None else self.shadows.tensors
        plain = {}
        for job, worker in self._parts[1]:
            if worker is None:
                for (key, _), (wire, _) in zip(job.held, job.wires, strict=True):
                    plain[key] = arrived[wire]
        return {**plain, **made}

    def _make_all(self, into: Tensors) -> None:
        mark_written(self._arriving.values())
        with torch.inference_mode():
            for key, worker in self._made.items():
                self._working = key
                _run(worker, into, "finalize")
        self._working = ""

    def end(self) -> None:
        """The caller's tensors are kept no longer."""
        self._arriving = {}

    def let_go(self) -> None:
        """No tensor of the caller's is kept, whose mapping that was, nor what travels for it."""
        self._arriving = {}
        self._bound = self._checked = None
        for worker in self._workers:
            worker.let_go()

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The tensors that travel in their own memory, and the one that was being made."""
        torn = []
        for job, worker in self._parts[1]:
            pairs = zip(job.held, job.wires, strict=True) if worker is None else ()
            torn += [key for (key, _), (wire, _) in pairs if wire in keys]
        if self._working in self._made:
            torn += [key for key, _ in self._made[self._working].job.held]
        return tuple(torn)


@public
class TransformedMover(Mover):
    """What `compile_transformed` returns: a mover of tensors as they are held.

    Tensors that a hook stores in memory of its own are left out of `out`. `transforms` is what it was made of, `plan`
    the plan of the wire tensors, which `check="digest"` compares. Raises ExchangeError.
    """

    def __init__(self, transforms: Transformed, ready: Ready, ends: EndStage) -> None:
        super().__init__(ready)
        self.transforms = transforms
        self._ends = ends

    def __repr__(self) -> str:
        return f"<mover of {self.transforms!r} by {super().__repr__()}>"

    @property
    def wire_bytes(self) -> int:
        """Bytes that wire buffers take on this rank, from a move on; staging is beside it."""
        return self._ends.nbytes

    @property
    def shadow_bytes(self) -> int:
        """Bytes of this rank's shadows, held from the first move on; 0 without commit="all"."""
        made = self._ends.shadows
        return super().shadow_bytes + (0 if made is None else made.nbytes)


def _run(worker: Worker, tensors: Tensors, what: str) -> None:
    """Do it. Raises ExchangeError, which names the tensor, where the user's function raises."""
    own = [] if worker.holds else [tensors[key].detach() for key, _ in worker.job.held]
    try:
        worker.run(*own)
    except Exception as error:
        name = worker.job.key or "the tensor"
        raise ExchangeError(f"{what} of {name!r} failed: {word_objection(error)}") from error


def _name_wires(parts: Iterable[_Part], tensors: Tensors) -> dict[str, Tensor]:
    """The wire tensors of a side by local name: buffers, and tensors that travel in their own memory."""
    wires: dict[str, Tensor] = {}
    for job, worker in parts:
        if worker is not None:
            wires.update(worker.buffers)
        else:
            for (key, _), (wire, _) in zip(job.held, job.wires, strict=True):
                wires[wire] = tensors[key]
    return wires


def _want(t: Transformed, side: str, rank: int, parts: Iterable[_Part]) -> Wanted:
    """What the rank passes for a side."""
    tensors = {}
    for job, worker in parts:
        if worker is None or not worker.holds:
            for key, layout in job.held:
                tensors[key] = layout.local_shape(rank), layout
    held = t.held_src if side == "source" else t.held_dst
    single = not t.is_tree and not isinstance(held[""], tuple)
    return Wanted(side, rank, tensors, single)


def compile_transformed(
    transforms: Transformed,
    plan: Plan | Program | None = None,
    *,
    group: compat.Group | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    max_inflight_bytes: int | None = None,
    engine: str = "auto",
    thread: str | None = None,
    commit: str = DIRECT,
    agree: str = EVERY,
) -> TransformedMover:
    """The sides and what travels between them, made ready on this rank. Collective over `group` (default: all ranks).

    `plan` is that of `transforms.src` to `transforms.dst`, or a program of it; it is made where it is not given. The
    other arguments are those of `compile`. Raises ExchangeError on every rank where ranks pass other transforms, where
    the plan is of other sides, and where a hook does not give what it said.
    """
    found = compat.group_of(group)
    given, ends = make_ends(transforms, plan, found, timeout, commit)
    settings = Settings(timeout, max_inflight_bytes, engine, thread, commit, agree)
    again = functools.partial(agree_again, transforms)
    ready = make_ready(given, found, settings, (ends,), agree_first=again)
    return TransformedMover(transforms, ready, ends)


def agree_again(
    transforms: Transformed, plan: object, group: compat.Group | None, settings: Settings
) -> None:
    """Ranks agree that the plan is of these wire tensors, whoever has left it. Collective; raises ExchangeError."""
    _, objection = attempt(lambda: _check_plan(transforms, plan))
    _agree(join_group(group, settings.timeout), transforms, objection)


def make_ends(
    transforms: Transformed,
    plan: Plan | Program | None,
    group: compat.Group,
    timeout: float,
    commit: object,
    holds: bool = False,
) -> tuple[Plan | Program, EndStage]:
    """The plan of the wire tensors, and what this rank does at both ends. Collective."""
    party = join_group(group, timeout)
    made, objection = attempt(lambda: _check_and_make(party, transforms, plan, commit, holds))
    _agree(party, transforms, objection)
    assert made is not None, "who objects does not get past the vote"
    return made


def _agree(party: Party, transforms: Transformed, objection: str) -> None:
    """Ranks agree on the transforms. Raises ExchangeError."""
    claim = "compile transforms"
    if not objection:
        claim = f"compile transforms {transforms.digest[:SHOWN]}"
    agree(party, claim, objection)


def _check_and_make(
    party: Party, t: object, given: Plan | Program | None, commit: object, holds: bool
) -> tuple[Plan | Program, EndStage]:
    """The plan, and what this rank does at both ends. Raises to object."""
    if not isinstance(t, Transformed):
        what = f"transforms are {type(t).__name__}"
        raise ExchangeError(f"{what}; pass what sm.transforms.transformed(src, dst, rules) gives")
    if given is None:
        given = plan(t.src, t.dst)
    else:
        _check_plan(t, given)
    device = party.wire.device
    ends: tuple[End, End] = ("source", "destination")
    parts: list[list[_Part]] = []
    for end in ends:
        jobs = t.jobs(party.rank, end)
        parts.append([_Part(job, make_worker(job, party.rank, end, device)) for job in jobs])
    _check_commit(parts[1], commit)
    return given, EndStage(t, party, parts, commit, holds)


def _check_commit(parts: Iterable[_Part], commit: object) -> None:
    """Raise ExchangeError for tensors that cannot be made beside their destination."""
    for job, worker in parts:
        if worker is not None and worker.holds and commit == ALL:
            what = f"a hook stores {job.key!r} in memory of its own as soon as it has come"
            raise ExchangeError(f"{what}; compile with commit={DIRECT!r}")


def _check_plan(t: Transformed, given: object) -> None:
    """Raise ExchangeError for a plan of other sides than those of the wire tensors, whoever has left it."""
    fix = "pass sm.plan(transforms.src, transforms.dst), or a program of it"
    if not isinstance(given, Plan | Program):
        raise ExchangeError(f"the plan is {type(given).__name__}; {fix}")
    planned_of = given.plan if isinstance(given, Program) else given
    whole = planned_of.whole or planned_of
    for side, planned in ((t.src, whole.src), (t.dst, whole.dst)):
        wrong = side.keys() ^ planned.keys() or _find_other(side, planned)
        if wrong:
            raise ExchangeError(f"the plan is of other tensors: {min(wrong)!r} is not alike; {fix}")


def _find_other(side: Held, planned: Held) -> set[str]:
    """The tensors that are held otherwise."""
    return {name for name in side if _digest(side, name) != _digest(planned, name)}


def _digest(side: Held, name: str) -> list[object]:
    windows = windows_of(side[name], name, ExchangeError)
    return [plural(windows, "window"), *map(holdings_digest, windows)]
