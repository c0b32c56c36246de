"""`compile_transformed`: two sides and what travels between them, made ready; then moved as often as wanted.

1. Ranks agree on the transforms, and then on the plan, before they move anything. What a hook of the user's raises when
   it is asked for buffers is an error on all ranks then.
2. A call takes tensors as they are held. What is done at the source is done before ranks vote: where it fails, all
   ranks raise, nothing has moved, and the next call works.
3. What is done at the destination is done when all has arrived there. Where it fails, this rank has failed, and the
   group is broken; ranks that had nothing to wait for see it in the next call, or in this one with `acknowledge=True`.
4. A tensor for which nothing is done at an end is sent, or received, in its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.holdings import holdings_digest, windows_of
from shardmath.plans.plan import Movable, Plan, plan
from shardmath.programs.program import Program
from shardmath.transforms.components import End
from shardmath.transforms.transformed import Held, Job, Transformed
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.party import Party, is_time
from shardmath_torch.agreement.transport import join
from shardmath_torch.exchange.compile import DEFAULT_TIMEOUT_S, compile
from shardmath_torch.exchange.local import Local, Tensors, Wanted, by_key, check, signature
from shardmath_torch.exchange.memory import mark_written
from shardmath_torch.exchange.mover import Mover, move_bound, word_objection
from shardmath_torch.observing.bars import Progress
from shardmath_torch.observing.moved import Moved
from shardmath_torch.transforms.workers import Worker, make_worker

__all__ = ["TransformedMover", "compile_transformed"]

SHOWN = 24
"""Hexadecimal digits of a digest that a claim has."""

_T = TypeVar("_T")


class _Part(NamedTuple):
    """A local tensor of this rank, and its worker; None where it travels in its own memory."""

    job: Job
    worker: Worker | None


@public
class TransformedMover:
    """What `compile_transformed` returns: `move(src_tensors, out=dst_tensors)`, collective, as often as wanted.

    Sides are as in `Mover`, of tensors as they are held. Tensors that a hook stores in memory of its own are left out
    of `out`. `transforms` is what it was made of, `mover` what moves the wire tensors. Raises ExchangeError.
    """

    def __init__(
        self, transforms: Transformed, mover: Mover, party: Party, parts: tuple[list[_Part], ...]
    ) -> None:
        self.transforms = transforms
        self.mover = mover
        self._parts = parts
        self._device_type = party.wire.device_type
        sides = zip(("source", "destination"), parts, strict=True)
        first, last = (_want(transforms, side, party.rank, own) for side, own in sides)
        self._wanted = first, last
        # What a hook takes may have no plain memory; it knows what it can read.
        self._opaque = {part.job.key for part in parts[0] if part.worker and part.worker.opaque}
        self._checked: object = None
        self._arriving: list[tuple[Worker, Tensor | None]] = []

    def __repr__(self) -> str:
        return f"<mover of {self.transforms!r} by {self.mover!r}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises ExchangeError: copies would share wire buffers, and not know of each other."""
        what = "a mover belongs to its process group on this rank, and cannot be copied or pickled"
        raise ExchangeError(f"{what}; use this one, or compile the transforms again")

    @property
    def plan(self) -> Movable:
        """The plan of the wire tensors."""
        return self.mover.plan

    @property
    def last(self) -> Moved | None:
        """What the latest move did on this rank, as of `Mover.last`: of the wire tensors."""
        return self.mover.last

    @property
    def wire_bytes(self) -> int:
        """Bytes of this rank's wire buffers, which are there as long as this is; staging is beside it."""
        workers = [part.worker for side in self._parts for part in side if part.worker]
        return sum(one.nbytes for worker in workers for one in worker.buffers.values())

    def __call__(
        self,
        src: Local,
        *,
        out: Local = None,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
        progress: Progress | None = None,
    ) -> None:
        """Moves `src`, this rank's source tensors, into `out`, its destination tensors; arguments as of a `Mover`."""
        move_bound(
            self.mover,
            lambda: self._bind(src, out),
            timeout=timeout,
            acknowledge=acknowledge,
            label=label,
            finalize=self._finalize,
            progress=progress,
        )

    def _bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """The wire tensors, those of the source made. Raises what speaks against moving them."""
        self._arriving = []
        here, there = by_key(self._wanted[0], src), by_key(self._wanted[1], out)
        self._check(here, there)
        sources, targets = self._parts
        with torch.inference_mode():
            for job, worker in sources:
                if worker is not None:
                    _run(worker, here.get(job.key), "prepare")
        self._arriving = [
            (worker, there.get(job.key)) for job, worker in targets if worker is not None
        ]
        return _name_wires(sources, here), _name_wires(targets, there)

    def _check(self, here: Tensors, there: Tensors) -> None:
        """Raise ExchangeError for tensors that are not as held, unless these were looked at already."""
        plain = {key: tensor for key, tensor in here.items() if key not in self._opaque}
        signed = signature((plain, there))
        if signed == self._checked:
            return
        self._checked = None
        first, last = self._wanted
        own = {key: held for key, held in first.tensors.items() if key not in self._opaque}
        check((first._replace(tensors=own), last), (plain, there), self._device_type)
        self._checked = signed

    def _finalize(self, arrived: Tensors) -> tuple[()]:
        """Make of what has arrived what the destination holds: at once, so that nothing is left to be stored."""
        arriving, self._arriving = self._arriving, []
        mark_written(tensor for _, tensor in arriving if tensor is not None)
        with torch.inference_mode():
            for worker, tensor in arriving:
                _run(worker, tensor, "finalize")
        return ()


def _run(worker: Worker, tensor: Tensor | None, what: str) -> None:
    """Do it. Raises ExchangeError, which names the tensor, where the user's function raises."""
    try:
        worker.run(None if tensor is None else tensor.detach())
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
            ((key, _),) = job.wires
            wires[key] = tensors[job.key]
    return wires


def _want(t: Transformed, side: str, rank: int, parts: Iterable[_Part]) -> Wanted:
    """What the rank passes for a side."""
    tensors = {}
    for job, worker in parts:
        if worker is None or not worker.holds:
            tensors[job.key] = job.layout.local_shape(rank), job.layout
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
) -> TransformedMover:
    """The sides and what travels between them, made ready on this rank. Collective over `group` (default: all ranks).

    `plan` is that of `transforms.src` to `transforms.dst`, or a program of it; it is made where it is not given. The
    other arguments are those of `compile`. Raises ExchangeError on every rank where ranks pass other transforms, where
    the plan is of other sides, and where a hook does not give what it said.
    """
    found = compat.group_of(group)
    patience = float(timeout) if is_time(timeout) else DEFAULT_TIMEOUT_S
    party = join(found, patience, min(5.0, patience / 5))
    made, objection = _attempt(lambda: _check_and_make(party, transforms, plan))
    claim = "compile transforms"
    if made is not None:
        claim = f"compile transforms {transforms.digest[:SHOWN]}"
    ballot = Ballot(claim, objection=objection)
    party.together(lambda: party.vote(ballot), lambda failure, rank: "ranks were to agree")
    assert made is not None, "who objects does not get past the vote"
    given, parts = made
    mover = compile(
        given,
        group=found,
        timeout=timeout,
        max_inflight_bytes=max_inflight_bytes,
        engine=engine,
        thread=thread,
    )
    return TransformedMover(transforms, mover, party, parts)


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """What is made, or why not."""
    try:
        return make(), ""
    except Exception as error:
        # The others wait for this rank's vote, whatever went wrong here.
        return None, word_objection(error)


def _check_and_make(
    party: Party, t: object, given: Plan | Program | None
) -> tuple[Plan | Program, tuple[list[_Part], ...]]:
    """The plan, and what this rank does at both ends. Raises to object."""
    if not isinstance(t, Transformed):
        what = f"transforms are {type(t).__name__}"
        raise ExchangeError(f"{what}; pass what sm.transformed(src, dst, rules) gives")
    if given is None:
        given = plan(t.src, t.dst)
    else:
        _check_plan(t, given)
    device = torch.device(party.wire.device_type)
    ends: tuple[End, End] = ("source", "destination")
    parts: list[list[_Part]] = []
    for end in ends:
        jobs = t.jobs(party.rank, end)
        parts.append([_Part(job, make_worker(job, party.rank, end, device)) for job in jobs])
    return given, tuple(parts)


def _check_plan(t: Transformed, given: Plan | Program) -> None:
    """Raise ExchangeError for a plan of other sides than those of the wire tensors."""
    fix = "pass sm.plan(transforms.src, transforms.dst), or a program of it"
    if not isinstance(given, Plan | Program):
        raise ExchangeError(f"the plan is {type(given).__name__}; {fix}")
    for side, planned in ((t.src, given.src), (t.dst, given.dst)):
        wrong = side.keys() ^ planned.keys() or _find_other(side, planned)
        if wrong:
            raise ExchangeError(f"the plan is of other tensors: {min(wrong)!r} is not alike; {fix}")


def _find_other(side: Held, planned: Held) -> set[str]:
    """The tensors that are held otherwise."""
    return {name for name in side if _digest(side, name) != _digest(planned, name)}


def _digest(side: Held, name: str) -> list[object]:
    windows = windows_of(side[name], name, ExchangeError)
    return [plural(windows, "window"), *map(holdings_digest, windows)]
