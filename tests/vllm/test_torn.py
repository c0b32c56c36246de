"""A worker whose update failed refuses to answer until all that it wrote is written again, by whatever trainer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import shardmath as sm
from shardmath import ExchangeError
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native
from shardmath_vllm.cells import Cells
from shardmath_vllm.update import Phase
from shardmath_vllm.workers import worker
from shardmath_vllm.workers.coverage import list_written
from shardmath_vllm.workers.worker import WorkerEngine

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "q": ((2,), "float32"),
    "k": ((2,), "float32"),
    "o": ((4,), "float32"),
    "f": ((4,), "float32"),
}
PIECES = {
    "q": ("qk", Piece("q", 0, 0, ((2, 1, 1),))),
    "k": ("qk", Piece("k", 2, 0, ((2, 1, 1),))),
    "o": ("o", Piece("o", 0, 0, ((4, 1, 1),))),
    "f": ("qk", Piece("f", 0, 0, ((4, 1, 1),))),
}


def plan(given: dict[int, str]) -> sm.Refit:
    """The refit of tensors of a trainer to one engine, by the workers that store them, which have places from 1 on."""
    ranks = {}
    names = "".join(given.values())
    tensors = {name: SHAPES[name] for name in names}
    for place, own in given.items():
        natives = []
        for native in ("qk", "o"):
            pieces = tuple(
                piece for name, (at, piece) in PIECES.items() if at == native and name in own
            )
            natives.append(Native(native, (4,), "float32", pieces, "views", ""))
        ranks[place] = sm.storage.Recorded(
            tuple((name, shape, dtype) for name, (shape, dtype) in tensors.items()), tuple(natives)
        )
    side = {name: sm.Layout(shape, sm.Mesh(ranks=[0]), "n") for name, (shape, _) in tensors.items()}
    return sm.refit(side, {"engine 0": sm.storage.RecordedSide(ranks)}, tensors)


class Model(nn.Module):
    def compute_logits(self, hidden: object) -> str:
        return "logits"


class Worker:
    """A worker's engine without vLLM's own constructor, whose updates end as the test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Any = WorkerEngine.__new__(WorkerEngine)
        self.engine.model = self.model = Model()
        self.engine._link = SimpleNamespace()
        self.engine._meeting = ""
        self.engine._torn = Cells({})
        self._patch = monkeypatch

    def update(self, planned: sm.Refit, place: int, state: Phase) -> None:
        """An update that ends so at this rank."""
        self.engine._writes = list_written(planned, place)

        class Ending:
            def __init__(self, link: object, update: Any) -> None:
                self.update = update

            def receive(self, act: Callable[[], None]) -> None:
                self.update = type(self.update)(
                    1, state, writes=self.update.writes, torn=self.update.torn
                )
                if state is not Phase.MOVED:
                    raise ExchangeError("rank 3 left")

        self._patch.setattr(worker, "Life", Ending)
        try:
            self.engine.receive_weights(SimpleNamespace(number=1, meeting=""))
        except ExchangeError:
            assert state is not Phase.MOVED

    @property
    def is_torn(self) -> bool:
        try:
            answer = self.model.compute_logits(None)
        except ExchangeError as error:
            return "an update failed (rank 3 left)" in str(error)
        assert answer == "logits"
        return False


def test_an_update_of_some_tensors_leaves_others_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stored tensor, too: "q" and "k" are written to one."""
    own = Worker(monkeypatch)
    everything, some = plan({1: "qko"}), plan({1: "qo"})
    for phase in (Phase.KEPT, Phase.PARTED):
        own.update(everything, 1, phase)
        assert not own.is_torn
    own.update(everything, 1, Phase.TORN)
    assert own.is_torn
    own.update(some, 1, Phase.MOVED)
    assert own.is_torn
    for phase in (Phase.KEPT, Phase.PARTED):
        own.update(everything, 1, phase)
        assert own.is_torn
    own.update(plan({1: "k"}), 1, Phase.MOVED)
    assert not own.is_torn
    own.update(some, 1, Phase.TORN)
    own.update(everything, 1, Phase.MOVED)
    assert not own.is_torn


def test_a_trainer_that_names_the_same_cells_otherwise_makes_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one tensor what the other has as two, and the other way round."""
    own = Worker(monkeypatch)
    fused, apart = plan({1: "fo"}), plan({1: "qko"})
    for torn, whole in ((fused, apart), (apart, fused)):
        own.update(torn, 1, Phase.TORN)
        assert own.is_torn
        own.update(whole, 1, Phase.MOVED)
        assert not own.is_torn


def test_what_another_worker_of_the_engine_stores_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage of an engine is asked for its logits, which come of the weights of all stages."""
    last = Worker(monkeypatch)
    both = plan({1: "qk", 2: "o"})
    last.update(both, 2, Phase.TORN)
    last.update(plan({1: "", 2: "o"}), 2, Phase.MOVED)
    assert last.is_torn
    last.update(both, 2, Phase.MOVED)
    assert not last.is_torn


def test_a_rank_that_is_interrupted_between_two_steps_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may have moved."""
    own = Worker(monkeypatch)
    own.update(plan({1: "qko"}), 1, Phase.BEGUN)
    assert own.is_torn
