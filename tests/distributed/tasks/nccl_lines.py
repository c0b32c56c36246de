"""What workers do: the lines of the NCCL wire, on the CPU and over gloo, which stands in the place of NCCL.

So they are run; NCCL is not. gloo, too, pairs messages by their order, but it knows no groups, and does not say whether
a message is done: where that is asked, it is waited for. Imported by workers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shardmath_torch as smt
from shardmath.base.errors import ExchangeError
from shardmath_nccl import batches, wire
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement import transport
from shardmath_torch.groups.agreement.wire import PeerFailure
from tests.distributed.tasks.breaks import Rows
from tests.distributed.tasks.scenarios import Case, move_cases


class _Work:
    """Done or not is found out by waiting."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        self._is_done = False

    def is_completed(self) -> bool:
        self.wait()
        return self._is_done

    def wait(self) -> None:
        """On the CPU the order of what is done is that of calls, so this returns when it is done."""
        if not self._is_done:
            self._work.wait(timedelta(seconds=30))
            self._is_done = True


def _start(*args: Any) -> list[Any]:
    return [_Work(work) for work in batches.start_batch(*args)]


def _gather(*args: Any, **how: Any) -> Any:
    work = batches.start_gather(*args, **how)
    return None if work is None else _Work(work)


@contextlib.contextmanager
def over_gloo() -> Iterator[None]:
    """Groups of gloo are moved over by the NCCL wire."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(wire.NcclWire, "device", torch.device("cpu")))
        enter(mock.patch.object(compat, "allow_seconds"))
        enter(mock.patch.object(wire, "start_batch", _start))
        enter(mock.patch.object(wire, "start_gather", _gather))
        enter(mock.patch.dict(transport.TRANSPORTS, gloo="shardmath_nccl"))
        yield


def move_over_gloo(rank: int, cases: Sequence[Case]) -> list[dict[str, bytes]]:
    """As `move_cases`."""
    with over_gloo():
        return move_cases(rank, cases)


def move_in_inference(rank: int) -> list[str]:
    """How a compile and two moves end in inference mode, whose tensors no other mode may write; and a wrong result."""
    rows, movers = Rows(rank, dist.get_world_size(), 16), []
    with over_gloo(), torch.inference_mode():
        found = [_tell(lambda: movers.append(smt.compile(rows.plan, timeout=20.0)))]
        out = torch.zeros_like(rows.out)
        for _ in range(2):
            found.append(_tell(lambda: movers[0](rows.src, out=out)))
    return [*found, "" if out.equal(rows.want) else "WRONG"]


PATIENCE_S = 1.5


def meet(rank: int, late: Sequence[int]) -> tuple[int | None, str, float]:
    """Whom a vote blames, and why, where these ranks do not come; and after how many seconds."""
    group = dist.new_group(list(range(8)))
    with over_gloo():
        mine = wire.NcclWire(group, PATIENCE_S)
        # Those who come do so at once, however busy the machine was.
        dist.barrier()
        began = time.monotonic()
        try:
            if rank not in late:
                mine.gather(b"here")
        except PeerFailure as failure:
            return failure.rank, failure.cause, time.monotonic() - began
    return None, "", 0.0


class _Never:
    """A group that no peer joins."""

    def is_completed(self) -> bool:
        return False


def start_and_fail(rank: int) -> list[str]:
    """What becomes of groups that do not end, of a batch that torch leaves in the middle, and of posts that wait."""
    group = compat.group_of(None)
    threads: set[int] = set()
    found = []
    with over_gloo(), mock.patch.object(wire, "start_batch", return_value=[_Never()]):
        mine = wire.NcclWire(group, 0.05)
        post = functools.partial(mine.send, torch.zeros(4, dtype=torch.uint8), (rank + 1) % 8)
        for _ in range(wire.MOST_AHEAD):
            post()
            mine.start()
        found.append(f"{wire.MOST_AHEAD} groups under way")
        post()
        found.append(_tell(mine.start))
        found.append(_tell(mine.finish))

    def fail(*args: object) -> None:
        threads.add(threading.get_ident())
        exec(compile("raise RuntimeError('connection closed')", torch.__file__, "exec"))

    ends = threading.Event()
    for act in (fail, lambda *args: ends.wait()):
        with over_gloo(), mock.patch.object(wire, "start_batch", act):
            mine = wire.NcclWire(group, 0.05)
            mine.send(torch.zeros(4, dtype=torch.uint8), (rank + 1) % 8)
            found.append(_tell(mine.start))
    ends.set()
    found.append(f"{len(threads - {threading.get_ident()})} other thread")
    with mock.patch.dict("os.environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}):
        found.append(_tell(lambda: wire.NcclWire(group, 1.0)))
    return found


def _tell(act: Any) -> str:
    try:
        act()
    except (PeerFailure, ExchangeError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def fail_in_batch(rank: int) -> list[str]:
    """What becomes of an error of torch's, and of one of somebody else's, in the midst of a batch."""
    mine = wire.NcclWire(compat.group_of(None), 0.05)
    found = []
    with over_gloo():
        # gloo refuses to send to the rank itself.
        mine.send(torch.zeros(4, dtype=torch.uint8), rank)
        found.append(_tell(mine.start))

        def handle(*given: object) -> None:
            raise RuntimeError("from a handler")

        with mock.patch.object(dist.ProcessGroup, "send", handle):
            mine.send(torch.zeros(4, dtype=torch.uint8), (rank + 1) % 8)
            try:
                mine.start()
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found
