"""Changes: moves that send only what changed since the move before.

    send = smt.compile_changes(plan)     # collective, once
    send(mine, out=theirs)               # the first is a whole move
    send(mine, out=theirs)               # from then on, what has changed at the sources

1. Each source rank keeps a snapshot of what it sent, or is told which cells have changed.
2. Destinations must still hold what the move before brought: what a rank changes there itself stays changed.
3. Every call is a turn of the group, as every move is (`mover`): what one rank objects to is an error on all, and no
   destination has changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import shown
from shardmath.plans.plan import Plan
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot, read_label
from shardmath_torch.agreement.party import is_time, word_bad_time
from shardmath_torch.agreement.transport import join
from shardmath_torch.agreement.turns import check_thread, in_thread
from shardmath_torch.changes.comparing import Snapshot, take
from shardmath_torch.changes.sparse import Changed
from shardmath_torch.changes.walking import Sorted, Walker
from shardmath_torch.commits.blocks import block_of
from shardmath_torch.exchange.compile import DEFAULT_TIMEOUT_S, LONGEST_GRACE_S, compile
from shardmath_torch.exchange.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.exchange.memory import mark_written
from shardmath_torch.exchange.mover import (
    Mover,
    describe_crossing,
    name_given,
    parts_of,
    word_objection,
)
from shardmath_torch.observing import laps
from shardmath_torch.observing.stopwatch import Ledger, Stopwatch

__all__ = ["Changes", "Sent", "compile_changes"]


class Sent(NamedTuple):
    """What a rank has sent to others.

    `elements` have changed, `whole` messages went whole, `nbytes` are all bytes. `seconds` are of each phase:
    "comparing", "agreeing", "moving"; a whole move has "moving" alone.
    """

    elements: int
    whole: int
    nbytes: int
    seconds: Mapping[str, float]


class _Call(NamedTuple):
    """What is called with."""

    src: Local
    out: Local
    positions: Mapping[str, Tensor] | None
    timeout: float | None
    label: str


class _Ready(NamedTuple):
    """What a rank brings to a vote."""

    walker: Walker
    src: Tensors
    dst: Tensors
    changed: list[Changed]
    sorted: Sorted


@public
class Changes:
    """A plan compiled to move what has changed: `send(src_tensors, out=dst_tensors)`, collective.

    `last` says what this rank sent in the last call, `snapshot_bytes` what its snapshots take. Raises ExchangeError.
    """

    def __init__(self, mover: Mover, snapshots: bool) -> None:
        self._mover = mover
        self._keeps_snapshots = snapshots
        self._part, self._party = parts_of(mover)
        self._wanted = wanted(self._part.plan, self._party.rank)
        self._snapshots: dict[str, Snapshot] = {}
        self._walker: Walker | None = None
        self._signed: object = None
        name = f"changes of {name_given(self._part.plan)}"
        self._ledger = Ledger(name, None, self._party.rank, self._part.rounds)
        self._calls = 0
        self.last: Sent | None = None

    def __repr__(self) -> str:
        return f"<changes of {self._mover!r}, {self._calls} sent>"

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of this rank's snapshots: those of its source tensors, once they were sent."""
        return sum(one.nbytes for one in self._snapshots.values())

    def __call__(
        self,
        src: Local,
        *,
        out: Local = None,
        positions: Mapping[str, Tensor] | None = None,
        whole: bool = False,
        timeout: float | None = None,
        label: str = "",
    ) -> Sent:
        """Bring `out` up to date with `src`; whole the first time, and where `whole` on all ranks alike.

        `positions` tells which cells have changed, by local key: int64 tensors of numbers of cells, row by row in the
        local shape, each once; of tensors that are not named nothing has. `timeout` and `label` are a move's.
        """
        call = _Call(src, out, positions, timeout, label)
        if whole is True or self._calls == 0:
            self.last = self._move_whole(call)
        else:
            with self._ledger.time(label, None) as watch:
                self.last = self._party.together(
                    lambda: self._move_changes(call, whole, watch),
                    lambda failure, rank: describe_crossing(self._part.plan, failure.tensor, rank),
                    "mover",
                    timeout if is_time(timeout) else 0.0,
                )
            self._calls += 1
        return self.last

    def _move_whole(self, call: _Call) -> Sent:
        """Move everything, and remember how things are."""
        started = time.perf_counter()
        self._mover(call.src, out=call.out, timeout=call.timeout, label=call.label)
        seconds = time.perf_counter() - started
        # All ranks have moved. What fails here on one of them is its objection to the next call.
        self._calls += 1
        self._signed = None
        # Let go of before others are made: both need not fit.
        self._snapshots = {}
        src, dst = self._name_tensors(call)
        part, party = self._part, self._party
        self._walker = Walker(part, party.group, party.wire, src, dst)
        if self._keeps_snapshots:
            self._snapshots = {key: Snapshot(tensor) for key, tensor in src.items()}
        self._signed = _sign(src, dst)
        sends = [m for one in part.rounds for m in one.sends]
        nbytes = sum(message.nbytes for message in sends)
        return Sent(0, len(sends), nbytes, {"moving": seconds})

    def _name_tensors(self, call: _Call) -> tuple[Tensors, Tensors]:
        """The tensors by local key. Raises ExchangeError."""
        here, there = self._wanted
        return by_key(here, call.src), by_key(there, call.out)

    def _move_changes(self, call: _Call, whole: object, watch: Stopwatch) -> Sent:
        """Compare, vote, and move what has changed."""
        watch.lap(laps.QUEUED)
        ready, objection = self._get_ready(call, whole)
        thread = in_thread(self._mover.thread)
        plan = name_given(self._part.plan)
        claim = f"changes {self._calls} of {plan} (mover {self._party.key}){thread}"
        watch.name = claim
        label = str(call.label) if isinstance(call.label, str) else ""
        patience = call.timeout if is_time(call.timeout) else None
        watch.lap(laps.COMPARED)
        self._party.vote(Ballot(claim, label, objection=objection), patience)
        watch.lap(laps.AGREED, self._party.turns.latest)
        assert ready is not None, "who objects does not get past the vote"
        self._party.answer_for(lambda: self._exchange(ready, watch))
        moved = watch.sum_up()
        seconds = {name: moved.seconds[name] for name in ("comparing", "agreeing")}
        return Sent(*ready.walker.measure(ready.sorted), seconds | {"moving": moved.moving_s})

    def _get_ready(self, call: _Call, whole: object) -> tuple[_Ready | None, str]:
        """What has changed, sorted by message; or what speaks against moving it, to be said in the vote."""
        try:
            _check_call(call, whole)
            check_thread(self._party.turns, self._mover.thread)
            if block_of(self._party.group) is not None:
                what = "in smt.commit nothing is in place before the block ends"
                raise ExchangeError(
                    f"{what}, and changes are put in place at once; send them after it"
                )
            src, dst = self._name_tensors(call)
            if self._walker is None or self._signed != _sign(src, dst):
                # What is wrong with a tensor says more than that it is another.
                check(self._wanted, (src, dst), self._party.wire.device_type)
                what = "these are not the tensors, in the same memory, of the last whole move"
                raise ExchangeError(f"{what}; call with whole=True on all ranks")
            changed = list(self._list_changed(src, call.positions))
            return _Ready(self._walker, src, dst, changed, self._walker.sort(changed)), ""
        except Exception as error:
            return None, word_objection(error)

    def _list_changed(
        self, src: Tensors, positions: Mapping[str, Tensor] | None
    ) -> Iterator[Changed]:
        """The changed cells of each source tensor. Raises ExchangeError for positions that cannot be."""
        if positions is None and not self._keeps_snapshots:
            raise ExchangeError("no snapshots are kept; pass positions=, or compile with snapshots")
        for key in positions or ():
            if key not in src:
                raise ExchangeError(f"positions of {key!r}, which is no source tensor of this rank")
        for key, tensor in src.items():
            if positions is None:
                cells = self._snapshots[key].find_changed(tensor)
            elif key in positions:
                cells = _check_positions(key, tensor, positions[key])
            else:
                continue
            if len(cells):
                yield Changed(key, cells, take(tensor, cells))

    def _exchange(self, ready: _Ready, watch: Stopwatch) -> None:
        """Move what is ready, and remember it."""
        mark_written(ready.dst.values())
        counts = ready.walker.exchange_counts(ready.sorted)
        watch.lap(laps.ARRIVED)
        ready.walker.walk(ready.sorted, counts, ready.src, ready.dst, watch)
        for key, cells, words in ready.changed:
            snapshot = self._snapshots.get(key)
            if snapshot is not None:
                snapshot.update(cells, words)
        watch.lap(laps.KEPT)


def _sign(src: Tensors, dst: Tensors) -> object:
    """Equal where destinations are in the same memory, and sources lie alike in theirs."""
    lying = {}
    for key, tensor in src.items():
        lying[key] = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return signature(({}, dst)), lying


def _check_call(call: _Call, whole: object) -> None:
    """Raise ExchangeError for arguments that mean nothing."""
    if not isinstance(whole, bool):
        raise ExchangeError(f"whole={shown(whole)}; pass True or False")
    if not (call.timeout is None or is_time(call.timeout)):
        raise ExchangeError(word_bad_time(call.timeout))
    read_label(call.label)
    positions: object = call.positions
    if not (positions is None or isinstance(positions, Mapping)):
        what = f"positions={shown(positions)}"
        raise ExchangeError(f"{what}; pass int64 tensors of cells by local key")


def _check_positions(key: str, tensor: Tensor, cells: object) -> Tensor:
    """The cells, where they are some of the tensor's, each once. Raises ExchangeError."""
    if not isinstance(cells, Tensor) or cells.dtype != torch.int64 or cells.ndim != 1:
        raise ExchangeError(f"positions of {key!r} are {shown(cells)}; pass a row of int64")
    if not len(cells):
        return cells
    low = int(cells.min())
    high = int(cells.max())
    if low < 0 or high >= tensor.numel():
        what = f"positions of {key!r} go from {low} to {high}"
        raise ExchangeError(f"{what}; the tensor has cells 0 to {tensor.numel() - 1}")
    if len(cells.unique()) != len(cells):
        raise ExchangeError(f"positions of {key!r} have a cell twice; pass each once")
    return cells


def compile_changes(
    plan: Plan,
    *,
    group: compat.Group | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    max_inflight_bytes: int | None = None,
    thread: str | None = None,
    snapshots: bool = True,
) -> Changes:
    """The plan made ready to move what has changed. Collective, with the arguments of `compile`.

    `snapshots=False` keeps none: every call but whole ones then passes `positions`. Raises ExchangeError on every rank
    where ranks pass different plans or settings, for a plan that reduces, and for a program.
    """
    waiting = float(timeout) if is_time(timeout) else DEFAULT_TIMEOUT_S
    grace = min(LONGEST_GRACE_S, waiting / 5)
    party = join(compat.group_of(group), waiting - grace, grace)
    objection = _find_objection(plan, snapshots)
    claim = f"compile_changes(snapshots={snapshots!r})"
    party.together(
        lambda: party.vote(Ballot(claim, objection=objection)),
        lambda failure, rank: describe_crossing(plan, failure.tensor, rank),
    )
    mover = compile(
        plan, group=group, timeout=timeout, max_inflight_bytes=max_inflight_bytes, thread=thread
    )
    return Changes(mover, snapshots)


def _find_objection(plan: object, snapshots: object) -> str:
    """Why changes of this cannot be moved; "" where they can."""
    if not isinstance(snapshots, bool):
        return f"snapshots={shown(snapshots)}; pass True or False"
    if not isinstance(plan, Plan):
        what = f"compile_changes takes a Plan, got {type(plan).__name__}"
        return f"{what}; pass shardmath.plan(src, dst), of which no rank relays"
    for name, windows in (*plan.src.items(), *plan.dst.items()):
        if any(layout.partial for layout in windows):
            return f"{windows[0]} is Partial in tensor {name!r}: what changed is a sum; use compile"
    return ""
