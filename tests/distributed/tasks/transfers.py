"""Trainers and stand-ins for engines: processes that meet, plan and move as vLLM's workers do, without vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.distributed_c10d import _get_default_store

import shardmath as sm
import shardmath_vllm as sv
from shardmath.base.errors import ExchangeError
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native
from shardmath_vllm import infos
from shardmath_vllm.board import Board
from shardmath_vllm.link import Life, Link
from shardmath_vllm.meeting import Given, Meeting
from shardmath_vllm.source import Told
from shardmath_vllm.update import Update

__all__ = [
    "TIMEOUT_S",
    "TRAINERS",
    "WORKERS",
    "act",
    "finish_alone",
    "halves",
    "part",
    "second",
    "update_slowly",
]

TRAINERS = 2
WORKERS = 2
ROWS = 6
SHAPES = {"layers.0.w": ((ROWS, 2), "float32"), "layers.1.w": ((ROWS, 2), "float32")}
TIMEOUT_S = 15.0


def act(rank: int, port: int, how: str, lag: float = 0.0) -> tuple[str, float, Any]:
    """What one rank of trainer or engine raised, after how many seconds, and what it has then.

    Ranks from TRAINERS on are workers of one engine, which do as vLLM would tell them. `how` is what goes wrong. Each
    rank comes later by so many seconds than the one before to what others say.
    """
    start = time.monotonic()
    made: list[Any] = []
    if rank >= TRAINERS + WORKERS:
        return "", 0.0, made
    try:
        with _lagging(rank * lag), mock.patch("shardmath_vllm.board.HEARD_S", TIMEOUT_S):
            (_train if rank < TRAINERS else _work)(rank, port, how, made)
    except (ExchangeError, ArithmeticError, ValueError) as error:
        return str(error), time.monotonic() - start, made
    return "", time.monotonic() - start, made


@contextmanager
def _lagging(seconds: float) -> Iterator[None]:
    """Whatever is asked of the store of ranks that have met, as where others have the processor."""

    def delay(act: Any) -> Any:
        def act_late(*given: Any) -> Any:
            time.sleep(seconds)
            return act(*given)

        return act_late

    with ExitStack() as stack:
        for name in ("_hear", "_confirm", "vote", "break_off"):
            stack.enter_context(mock.patch.object(Board, name, delay(getattr(Board, name))))
        yield


class _Client:
    """An engine whose workers are told what to do, but for what fails."""

    def __init__(self, how: str, port: int) -> None:
        self._how = how
        self._key = f"told/{port}"

    def _tell(self, what: str) -> None:
        if self._how == what:
            raise ConnectionError("nobody answers")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._tell("init")
        _get_default_store().set(self._key, json.dumps(init_info))

    def start_weight_update(self) -> None:
        self._tell("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._tell("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._tell("finish")


def _train(rank: int, port: int, how: str, made: list[Any]) -> None:
    whole = torch.arange(2 * ROWS, dtype=torch.float32).reshape(ROWS, 2)
    mesh = sm.Mesh(dp=TRAINERS)
    rows = ROWS // TRAINERS
    part = slice(rank * rows, (rank + 1) * rows)
    tensors = {"layers.0.w": whole[part].clone(), "layers.1.w": whole[part] + 100}
    side = {name: sm.Layout(shape, mesh, "(dp n) m") for name, (shape, _) in SHAPES.items()}
    info = sv.TrainerInfo(
        f"127.0.0.1:{port}", TRAINERS, workers=WORKERS, rank=rank, timeout=TIMEOUT_S
    )
    clients = [_Client(how, port)] * (2 if how == "clients" else 1) if rank == 0 else []
    named = 0 if how == "source" and rank == 1 else None
    source = sv.Source(tensors, side, SHAPES, rank=named)
    met = sv.Trainer.trainer_init(info, client=clients, source=source)
    made.append("met")
    if how == "shape" and rank == 1:
        tensors["layers.1.w"] = tensors["layers.1.w"][:1]
    try:
        met.send_weights()
        made.append("sent")
    finally:
        # At once, as where the process ends.
        met.shutdown()


def _work(rank: int, port: int, how: str, made: list[Any]) -> None:
    if how in ("clients", "source", "init"):
        # Nobody tells them.
        return
    said = _get_default_store().get(f"told/{port}")
    told = infos.Joining(**json.loads(said))

    def record(trainers: Told) -> sm.storage.Recorded:
        if how == "record" and rank == TRAINERS:
            raise ArithmeticError("cannot be recorded")
        return _record(rank - TRAINERS, trainers)

    link = Meeting(told, told.meeting, rank).join(Given(engine=0, record=record))
    made.append("met")
    if how in ("start", "update"):
        return
    own = {name: torch.zeros(ROWS, 1) for name in SHAPES}

    def receive() -> None:
        for number, refit in enumerate(link.refits):
            refit.prepare(dst={"engine 0": {name: own[name] for name in refit.planned.moved}})
            refit()
            if how == "process" and rank == TRAINERS and number == 0:
                raise ArithmeticError("cannot be processed")

    Life(link, Update(1)).receive(receive)
    made += [tensor.flatten().tolist() for tensor in own.values()]
    link.leave()


def _record(column: int, told: Told) -> sm.storage.Recorded:
    """A loader that takes a column of each tensor."""
    natives = []
    for name in told.shapes:
        piece = Piece(name, 0, column, ((ROWS, 1, 2),))
        natives.append(Native(name, (ROWS, 1), "float32", (piece,), "views", ""))
    shapes = tuple((name, shape, dtype) for name, (shape, dtype) in told.shapes.items())
    return sm.storage.Recorded(shapes, tuple(natives))


# A trainer's rank that was started anew


def second(
    rank: int, port: int, run: str = "", value: float = 2.0, timeout: float = TIMEOUT_S
) -> str:
    """What the second rank of a trainer raised, in a process that has met nobody before."""
    held = torch.full((2, 2), value)
    info = sv.TrainerInfo(f"127.0.0.1:{port}", 2, workers=1, rank=1, timeout=timeout, run=run)
    try:
        sv.Trainer.trainer_init(info, client=[], source=halves(held)).send_weights()
    except ExchangeError as error:
        return str(error)
    return ""


def halves(held: torch.Tensor) -> sv.Source:
    """What a rank of two holds of a weight."""
    side = {"weight": sm.Layout((4, 2), sm.Mesh(dp=2), "(dp n) m")}
    return sv.Source({"weight": held}, side, {"weight": ((4, 2), "float32")})


# An update that takes longer than ranks wait

SHORT_S = 6.0
SLOW_S = 1.1
LAYERS = 10


def update_slowly(rank: int, port: int) -> str:
    """Two stages of a trainer, each of which has nothing to send for half of an update, and workers that take long for
    each layer of the second one: what a rank raised."""
    if rank >= TRAINERS + WORKERS:
        return ""
    try:
        _update_slowly(rank, port)
    except ExchangeError as error:
        return str(error)
    return ""


def _update_slowly(rank: int, port: int) -> None:
    link = _meet(rank, port, SHORT_S)
    for number in (1, 2):
        act = partial(_move_slowly, link, SLOW_S * (number - 1))
        Life(link, Update(number)).receive(act)
    link.leave()


def _meet(rank: int, port: int, timeout: float) -> Link:
    """Join the others, of which trainers have half of the layers each."""
    names = [f"layers.{layer}.w" for layer in range(LAYERS)]
    shapes = dict.fromkeys(names, ((ROWS, 2), "float32"))
    side = {}
    for layer, name in enumerate(names):
        stage = layer * TRAINERS // LAYERS
        side[name] = sm.Layout((ROWS, 2), sm.Mesh(ranks=[stage]), "n m")
    given = Given(Told(side, shapes, shapes, None))
    if rank >= TRAINERS:
        given = Given(engine=0, record=lambda told: _record(rank - TRAINERS, told))
    address = f"127.0.0.1:{port}"
    info = infos.TrainerInfo(address, TRAINERS, workers=WORKERS, rank=0, timeout=timeout)
    return Meeting(info, "stages", rank).join(given)


def _move_slowly(link: Link, seconds: float) -> None:
    """Each portion, of which those of the second stage take a worker so long."""
    for number, refit in enumerate(link.refits):
        (name,) = refit.planned.moved
        if link.place >= TRAINERS:
            refit.prepare(dst={"engine 0": {name: torch.zeros(ROWS, 1)}})
        else:
            held = refit.planned.trainer.natives(link.place)
            refit.prepare(src={name: torch.ones(ROWS, 2)} if held else {})
        refit()
        refit.release()
        if link.place >= TRAINERS and number >= LAYERS // TRAINERS:
            time.sleep(seconds)


# A trainer that is gone before an update is finished

GONE_S = 3.0


def finish_alone(rank: int, port: int) -> str:
    """What place 0 raised where the other trainer leaves and has not heard that an update is finished."""
    if rank >= TRAINERS + WORKERS:
        return ""
    link = _meet(rank, port, GONE_S)
    try:
        if rank == 0:
            link.board.finish("finish update 1", lambda: None)
    except ExchangeError as error:
        return str(error)
    finally:
        link.leave()
    return ""


# A trainer that leaves as the others begin to move


def part(rank: int, port: int) -> tuple[str, list[float]]:
    """In what phase an update ended, and what arrived of the first layer, which the trainer's second rank does not
    have. That rank fails once all have said yes, before it begins to move.
    """
    if rank >= TRAINERS + WORKERS:
        return "", []
    link = _meet(rank, port, GONE_S)
    refit = link.refits[0]
    (name,) = refit.planned.moved
    arrived = [torch.zeros(ROWS, 1)] * (rank >= TRAINERS)

    def move() -> None:
        if arrived:
            refit.prepare(dst={"engine 0": {name: arrived[0]}})
        else:
            refit.prepare(src={name: torch.ones(ROWS, 2)})
        refit()

    def fail(life: Life) -> None:
        raise ExchangeError("interrupted")

    life = Life(link, Update(1))
    with ExitStack() as stack:
        stack.enter_context(suppress(ExchangeError))
        if rank == 1:
            stack.enter_context(mock.patch.object(Life, "_forget", fail))
        life.receive(move)
    return life.update.phase.value, [value for one in arrived for value in one.flatten().tolist()]
