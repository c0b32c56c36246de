"""`compile_transformed`: two sides and their wire tensors, compiled once, then moved any number of times.

1. Ranks agree on the transforms, and then on the plan, before they move anything. If a user's hook raises when it is
   asked for buffers, all ranks raise then.
2. A call takes tensors as they are held. Source tensors are prepared before ranks vote: if that fails, all ranks raise,
   nothing has moved, and the next call works.
3. Destination tensors are finalized once everything has arrived. If that fails, this rank has failed, and the group is
   broken; ranks that did not wait for this one raise in the next call, or in this one with `acknowledge=True`. With
   `commit="all"` finalizing writes to shadows: if it fails, all ranks raise, and destinations are as they were.
4. A tensor that an end does not transform is sent, or received, in its own memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.holdings import holdings_digest, windows_of
from shardmath.layouts.layout import Layout
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
"""How many hexadecimal digits of a digest a claim has."""


class _PartWorker(NamedTuple):
    """A local tensor of this rank, and its worker; None if it is moved in its own memory.

    `job.held` has (name, layout) of the caller's tensors, `job.wires` of the tensors that are sent for them.
    """

    job: WireJob
    worker: Worker | None


def _list_workers(parts: Iterable[_PartWorker]) -> list[Worker]:
    """The workers of the tensors that have one."""
    return [part.worker for part in parts if part.worker is not None]


def _list_keys(workers: Iterable[Worker]) -> Iterator[str]:
    """The keys of the workers' local tensors, companions (such as the scales of a quantized tensor) included."""
    for worker in workers:
        for key, _ in worker.job.held:
            yield key


class _BoundCall(NamedTuple):
    """A caller's arguments, and the wire tensors for them."""

    src: Local
    out: Local
    wires: tuple[Local, Local]


class EndStage(Stage):
    """A stage (extra work of a move) that applies transforms on this rank, before sending and after receiving.

    With `shadows` it finalizes into these, not into the destination. `holds` promises that callers keep the mappings
    that they pass, and never change them.
    """

    def __init__(
        self,
        transforms: Transformed,
        party: Party,
        parts: Sequence[list[_PartWorker]],
        commit: object,
        holds: bool = False,
    ) -> None:
        self._holds = holds
        self._parts = parts
        self.rank = party.rank
        self._device = party.wire.device
        sides = zip(("source", "destination"), parts, strict=True)
        src, dst = (
            _make_wanted(transforms, side, party.rank, side_parts) for side, side_parts in sides
        )
        self._wanted = src, dst
        # A hook's tensors may have no plain memory; the hook checks what it can read.
        preparing, finalizing = map(_list_workers, parts)
        self._opaque_keys = set(_list_keys(worker for worker in preparing if worker.opaque))
        self._checked_signature: object = None
        self._finalizers = {worker.job.key: worker for worker in finalizing}
        # The tensors of the current call that are finalized, companions included.
        self._finalize_targets: dict[str, Tensor] = {}
        self._bound_call: _BoundCall | None = None
        # The tensor that is being finalized, which is torn if that fails; "" while none is.
        self._finalizing_key = ""
        self.shadows: Shadows | None = None
        if commit == ALL:
            layouts = itertools.chain.from_iterable(worker.job.held for worker in finalizing)
            self.shadows = Shadows(dict(layouts), party.rank)

    @property
    def own(self) -> frozenset[str]:
        """The plan's names of the destination tensors that are received into buffers, because a transform then
        computes the caller's tensors from them.
        """
        return frozenset(key for worker in self._finalizers.values() for key, _ in worker.job.wires)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers for transformed tensors, whether or not they are allocated yet."""
        return sum(count_bytes(worker.job, self.rank) for worker in self._workers)

    @property
    def _workers(self) -> list[Worker]:
        """The workers of this rank at both ends."""
        return [worker for side in self._parts for worker in _list_workers(side)]

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """Apply the transforms at the source to the tensors in `src`; return the tensors to send and those to receive
        into. Raises ExchangeError if a tensor in `src` or `out` is not as planned, or if a transform fails.
        """
        # Those of the previous call, in case this one fails.
        self._finalize_targets = {}
        self._finalizing_key = ""
        src_wanted, dst_wanted = self._wanted
        sending, receiving = by_key(src_wanted, src), by_key(dst_wanted, out)
        self._check(sending, receiving)
        sources, targets = self._parts
        with torch.inference_mode():
            for worker in _list_workers(sources):
                _run_worker(worker, sending, "prepare")
        finalized = _list_keys(self._finalizers.values())
        self._finalize_targets = {key: receiving[key] for key in finalized if key in receiving}
        if self.shadows is not None:
            self.shadows.receive_into(self._finalize_targets)
        bound = self._bound_call
        if bound is None or bound.src is not src or bound.out is not out:
            wires = _name_wires(sources, sending), _name_wires(targets, receiving)
            bound = _BoundCall(src, out, wires)
        # The same mapping objects for the same arguments: movers recognize by identity what they have checked.
        self._bound_call = bound if self._holds else None
        return bound.wires

    def _check(self, sending: Tensors, receiving: Tensors) -> None:
        """Raise ExchangeError for tensors that do not fit; tensors that were checked before are not checked again."""
        plain = {key: tensor for key, tensor in sending.items() if key not in self._opaque_keys}
        current_signature = signature((plain, receiving))
        if current_signature == self._checked_signature:
            return
        self._checked_signature = None
        src, dst = self._wanted
        checkable = {
            key: wanted for key, wanted in src.tensors.items() if key not in self._opaque_keys
        }
        is_direct = self.shadows is None
        wants = src._replace(tensors=checkable), dst
        check(wants, (plain, receiving), self._device, is_direct, current_signature)
        self._checked_signature = current_signature

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """Compute the caller's destination tensors from the received ones, and return an empty tuple. With
        `commit="all"`, compute into copies instead, and return pairs of destination and copy, to be written at the
        commit.
        """
        if self.shadows is not None:
            self._make_all(self.shadows.tensors)
            return self.shadows.pair(self._finalize_targets)
        self._make_all(self._finalize_targets)
        return ()

    def unfold(self, arrived: Tensors) -> Tensors:
        """Return the destination tensors by the caller's names, with their new values. Those received without a
        transform are taken from `arrived`; the others were computed by `finish`.
        """
        finalized = self._finalize_targets if self.shadows is None else self.shadows.tensors
        plain = {}
        _, targets = self._parts
        for job, worker in targets:
            if worker is None:
                for (key, _), (wire, _) in zip(job.held, job.wires, strict=True):
                    plain[key] = arrived[wire]
        return {**plain, **finalized}

    def _make_all(self, into: Tensors) -> None:
        """Compute all tensors that are finalized here, in the tensors `into`."""
        mark_written(self._finalize_targets.values())
        with torch.inference_mode():
            for key, worker in self._finalizers.items():
                self._finalizing_key = key
                _run_worker(worker, into, "finalize")
        self._finalizing_key = ""

    def end(self) -> None:
        """Drop the references to the caller's tensors."""
        self._finalize_targets = {}

    def let_go(self) -> None:
        """Drop the caller's tensors and mappings, and free the buffers for transformed tensors. A Megatron hook (a
        ReshardTransform that the caller has passed) keeps its buffers.
        """
        self._finalize_targets = {}
        self._bound_call = self._checked_signature = None
        for worker in self._workers:
            worker.let_go()

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the caller's destination tensors that a failed move can have left partly overwritten.
        These are tensors received directly, without a transform, if `keys` has their names in the plan, and tensors
        that a transform was computing at the failure.
        """
        torn = []
        _, targets = self._parts
        for job, worker in targets:
            if worker is None:
                pairs = zip(job.held, job.wires, strict=True)
                torn += [key for (key, _), (wire, _) in pairs if wire in keys]
        if self._finalizing_key in self._finalizers:
            torn += [key for key, _ in self._finalizers[self._finalizing_key].job.held]
        return tuple(torn)


@public
class TransformedMover(Mover):
    """A mover that applies transforms to its tensors on the way, such as casts; made by `compile_transformed`.

    Leave tensors that a hook stores in its own memory out of `out`. `transforms` is what was compiled, `plan` the plan
    of the wire tensors, which `check="digest"` compares. Raises ExchangeError.
    """

    def __init__(self, transforms: Transformed, ready: Ready, ends: EndStage) -> None:
        super().__init__(ready)
        self.transforms = transforms
        self._ends = ends

    def __repr__(self) -> str:
        return f"<mover of {self.transforms!r} by {super().__repr__()}>"

    @property
    def wire_bytes(self) -> int:
        """The size in bytes of this rank's buffers for transformed tensors, including those that the first move will
        allocate.

        A hook's buffers are allocated at compile time, others by the first move. Memory in which messages are packed
        (`staging_bytes`) is not counted.
        """
        return self._ends.nbytes

    @property
    def shadow_bytes(self) -> int:
        """The bytes of memory that holds new values on this rank until they are committed; 0 without commit="all".

        The first move allocates it.
        """
        shadows = self._ends.shadows
        return super().shadow_bytes + (0 if shadows is None else shadows.nbytes)


def _run_worker(worker: Worker, tensors: Tensors, what: str) -> None:
    """Run the worker. Raises ExchangeError, which names the tensor, if the user's function raises."""
    # A worker that holds its tensors is passed none.
    arguments = [] if worker.holds else [tensors[key].detach() for key, _ in worker.job.held]
    try:
        worker.run(*arguments)
    except Exception as error:
        name = worker.job.key or "the tensor"
        raise ExchangeError(
            f"the transform's {what} of {name!r} failed: {word_objection(error)}; correct the "
            f"transform, or leave {name!r} out of its rules"
        ) from error


def _name_wires(parts: Iterable[_PartWorker], tensors: Tensors) -> dict[str, Tensor]:
    """The wire tensors of a side by local name: buffers, and tensors that are moved in their own memory."""
    wires: dict[str, Tensor] = {}
    for job, worker in parts:
        if worker is not None:
            wires.update(worker.buffers)
        else:
            for (key, _), (wire, _) in zip(job.held, job.wires, strict=True):
                wires[wire] = tensors[key]
    return wires


def _make_wanted(t: Transformed, side: str, rank: int, parts: Iterable[_PartWorker]) -> Wanted:
    """The tensors that the rank must pass for a side."""
    tensors = {}
    for job, worker in parts:
        # A worker that holds a tensor itself is passed none.
        if worker is None or not worker.holds:
            for key, layout in job.held:
                tensors[key] = layout.local_shape(rank), layout
    layouts = t.held_src if side == "source" else t.held_dst
    # A call may pass a tensor without a name if it is the only one, without companions.
    single = not t.is_tree and not isinstance(layouts[""], tuple)
    return Wanted(side, rank, tensors, single)


@compat.untraced
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
    """Return a TransformedMover, which moves tensors by `plan` and applies `transforms`, such as casts, before sending
    and after receiving. By default the plan is made from `transforms`; the other arguments are the same as for
    `compile`. Collective.

    `plan` is a plan from `transforms.src` to `transforms.dst`, or a program of it. Raises ExchangeError on every rank
    if ranks pass different transforms, if the plan is of other sides, and if a hook does not give the tensors that it
    stated.
    """
    process_group = compat.group_of(group)
    agreed_plan, ends = make_ends(transforms, plan, process_group, timeout, commit)
    settings = Settings(timeout, max_inflight_bytes, engine, thread, commit, agree)
    agree_first = functools.partial(agree_again, transforms, ends.rank)
    ready = make_ready(agreed_plan, process_group, settings, (ends,), agree_first=agree_first)
    return TransformedMover(transforms, ready, ends)


def agree_again(
    transforms: Transformed,
    rank: int,
    plan: object,
    group: compat.Group | None,
    settings: Settings,
    planned: Transformed | None = None,
) -> None:
    """Check that a mover with `transforms` can replace its plan by `plan`; otherwise raise ExchangeError on all ranks.
    Collective, with the timeout of `settings`. If `planned` (the transforms for which `plan` was made) is given, it
    must equal `transforms`.

    `plan` must move the transformed tensors, and `transforms` must be equal on all ranks. `rank` is the one for which
    this process made its buffers, which it must be in `group`, too.
    """
    party = join_group(group, settings.timeout)

    def check_all() -> None:
        _check_rank(rank, party.rank)
        _check_plan(transforms, plan)
        if planned is not None:
            _check_equal(transforms, planned)

    _, objection = attempt(check_all)
    _agree(party, transforms, objection)


def make_ends(
    transforms: Transformed,
    plan: Plan | Program | None,
    group: compat.Group,
    timeout: float,
    commit: object,
    holds: bool = False,
) -> tuple[Plan | Program, EndStage]:
    """Return the plan of the transformed tensors (`plan`, or a new one if None), and the object that applies
    `transforms` on this rank in moves. If `commit` is "all", results are computed in copies, and written to the
    destination tensors after all ranks have succeeded. `holds=True` promises that callers never change a mapping of
    tensors that they have passed to a move. Collective.
    """
    party = join_group(group, timeout)
    plan_and_stage, objection = attempt(
        lambda: _check_and_make(party, transforms, plan, commit, holds)
    )
    _agree(party, transforms, objection)
    assert plan_and_stage is not None, "who objects does not get past the vote"
    return plan_and_stage


def _agree(party: Party, transforms: Transformed, objection: str) -> None:
    """Ranks agree on the transforms. Raises ExchangeError."""
    claim = "compile transforms"
    if not objection:
        claim = f"compile transforms {transforms.digest[:SHOWN]}"
    agree(party, claim, objection)


def _check_and_make(
    party: Party, t: object, wire_plan: Plan | Program | None, commit: object, holds: bool
) -> tuple[Plan | Program, EndStage]:
    """The plan, and what this rank does at both ends. Raises ExchangeError, with which this rank objects, for arguments
    that do not fit each other."""
    if not isinstance(t, Transformed):
        what = f"transforms= is {type(t).__name__}, where transformed layouts are needed"
        raise ExchangeError(
            f"{what}; pass the result of sm.transforms.transformed(src, dst, rules)"
        )
    if wire_plan is None:
        wire_plan = plan(t.src, t.dst)
    else:
        _check_plan(t, wire_plan)
    device = party.wire.device
    ends: tuple[End, End] = ("source", "destination")
    parts: list[list[_PartWorker]] = []
    for end in ends:
        jobs = t.jobs(party.rank, end)
        parts.append([_PartWorker(job, make_worker(job, party.rank, end, device)) for job in jobs])
    _, at_destination = parts
    _check_commit(at_destination, commit)
    return wire_plan, EndStage(t, party, parts, commit, holds)


def _check_commit(parts: Iterable[_PartWorker], commit: object) -> None:
    """Raise ExchangeError for `commit="all"` with tensors that a hook stores itself, which cannot have shadows."""
    for job, worker in parts:
        if worker is not None and worker.holds and commit == ALL:
            what = (
                f"commit='all' is given, but a hook stores {job.key!r} itself as soon as it arrives"
            )
            raise ExchangeError(f"{what}; compile with commit={DIRECT!r}")


def _check_rank(before: int, now: int) -> None:
    """Raise ExchangeError if this process has another rank than the one that its transforms were made for."""
    if before != now:
        what = (
            f"transforms were made for rank {before}, but this process is rank {now} in the group"
        )
        fix = (
            "give all processes the ranks they had, or make another mover or smt.Refit on all ranks"
        )
        raise ExchangeError(f"{what}; {fix}")


def _check_plan(t: Transformed, given: object) -> None:
    """Raise ExchangeError for a plan of other sides than the wire tensors', even if ranks have left it."""
    fix = "pass sm.plan(transforms.src, transforms.dst), or a program of it"
    if not isinstance(given, Plan | Program):
        raise ExchangeError(f"plan= is {type(given).__name__}, which is not a plan; {fix}")
    planned_of = given.plan if isinstance(given, Program) else given
    whole = planned_of.whole or planned_of
    for side, planned in ((t.src, whole.src), (t.dst, whole.dst)):
        wrong = side.keys() ^ planned.keys()  # the names of tensors of one side only
        if not wrong:
            wrong = _find_other(side, planned)
        if wrong:
            name = min(wrong)
            ours, theirs = _show_held(side, name, str), _show_held(planned, name, str)
            if ours == theirs:
                # Meshes of other ranks: only the repr has them.
                ours, theirs = _show_held(side, name, repr), _show_held(planned, name, repr)
            raise ExchangeError(
                f"plan= has {theirs} for {name or 'the tensor'!r}, but the transforms need {ours}; {fix}"
            )


def _check_equal(made: Transformed, planned: Transformed) -> None:
    """Raise ExchangeError for other transforms than the mover was made with."""
    if planned is made or planned.digest == made.digest:
        return
    for name in sorted(made.wired):
        before, now = made.wired[name], planned.wired.get(name)
        if now is not None and str(before.transform) != str(now.transform):
            what = f"the new refit transforms {name!r} by {now.transform}, but this one by {before.transform}"
            raise ExchangeError(f"{what}, which stays; make another smt.Refit")
    what = f"the new refit has {planned!r}, but this one was made with {made!r}, which stay"
    raise ExchangeError(f"{what}: they hold tensors in other ways; make another smt.Refit")


def _show_held(side: Held, name: str, show: Callable[[Layout], str]) -> str:
    """The layouts of a tensor of a side, for messages."""
    if name not in side:
        return "no tensor"
    return ", ".join(map(show, windows_of(side[name], name, ExchangeError)))


def _find_other(side: Held, planned: Held) -> set[str]:
    """The names of the tensors that the planned side holds otherwise."""
    return {name for name in side if _digest(side, name) != _digest(planned, name)}


def _digest(side: Held, name: str) -> list[object]:
    """A value to compare: equal if two sides hold the tensor in the same way."""
    windows = windows_of(side[name], name, ExchangeError)
    return [plural(windows, "window"), *map(holdings_digest, windows)]
