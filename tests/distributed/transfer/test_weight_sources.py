"""What vLLM 0.33 and 0.32 call a WeightSource is a source: its layouts are read, and its tensors are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardmath as sm
from shardmath import ExchangeError, StoreError
from shardmath_vllm import Trainer, TrainerInfo
from shardmath_vllm.source import read_layout, read_source
from shardmath_vllm.trainer import _read
from tests.distributed.pool import Pool, free_port
from tests.distributed.tasks.weight_sources import (
    METAS,
    Meta,
    Old,
    Pieces,
    Replicate,
    Shard,
    Strided,
    Whole,
    send,
)
from tests.distributed.transfer.plain_engine import PlainEngine

WHOLE = {meta.name: torch.zeros(meta.shape) for meta in METAS}


@pytest.mark.parametrize(
    ("name", "text", "axes"),
    [
        ("all", "n", {"a": 4}),
        ("uneven", "(a n) m", {"a": 4}),
        ("strided", "(tp dp n) m", {"dp": 2, "tp": 2}),
        ("both", "(b n) (a m)", {"a": 2, "b": 2}),
        ("hybrid", "(b n) m", {"a": 2, "b": 2}),
    ],
)
def test_layouts_are_as_the_metadata_says(name: str, text: str, axes: dict[str, int]) -> None:
    (meta,) = [meta for meta in METAS if meta.name == name]
    expected = sm.Layout(meta.shape, sm.Mesh(axes), text)
    assert sm.equivalent(read_layout(meta, 4), expected)


def test_pieces_are_as_torch_chunks_them() -> None:
    """For all sizes, along both axes of a mesh."""
    for rows in range(1, 12):
        meta = Meta("w", (rows,), (0, 1, 2, 3, 4, 5), (3, 2), (Shard(0), Shard(0)))
        layout = read_layout(meta, 6)
        for rank in range(6):
            (mine,) = _chunk(*_chunk(torch.arange(rows), 3, rank // 2), 2, rank % 2)
            assert layout.indices(rank)[0].tolist() == mine.tolist()


def _chunk(tensor: torch.Tensor, parts: int, part: int) -> list[torch.Tensor]:
    chunks = tensor.chunk(parts)
    return [chunks[part] if part < len(chunks) else tensor[:0]]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("make", [Pieces, Whole, Old])
def test_an_engine_gets_what_is_yielded_at_each_update(
    pool: Pool, make: Callable[..., Any], dtype: str | None
) -> None:
    first, *others = pool.run(send, free_port(), make, dtype)
    assert first == [True] * 2 * (1 + len(METAS))
    assert others[:3] == [[True, True]] * 3


def test_whole_tensors_are_sent_by_one_owner_each() -> None:
    """All ranks yield each; a rank keeps its share."""
    sources = [read_source(Whole(r, METAS, WHOLE), rank=r, trainers=4) for r in range(4)]
    kept = [set(source.renewed().tensors) for source in sources]
    assert sorted(name for names in kept for name in names) == sorted(WHOLE)
    assert kept[2] >= {"one"}
    assert max(map(len, kept)) < len(WHOLE)


class _Other(Pieces):
    """Yields the pieces in another order."""

    def iter_local(self) -> Any:
        return reversed(list(super().iter_local()))


class _More(Pieces):
    """Yields another rank's, too."""

    def iter_local(self) -> Any:
        yield from super().iter_local()
        yield "one", self.whole["one"]


class _Less(Pieces):
    """Ends too early."""

    def iter_local(self) -> Any:
        return iter(list(super().iter_local())[:-1])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_Other, "yields 'hybrid' where this rank owns 'all' by"),
        (_More, "yields 'one' where this rank owns 'nothing' by"),
        (_Less, "yields 'nothing' where this rank owns 'hybrid' by"),
    ],
)
def test_what_is_yielded_is_what_is_declared(make: Callable[..., Any], why: str) -> None:
    source = read_source(make(0, METAS, WHOLE), rank=0, trainers=4)
    with pytest.raises(StoreError, match=why):
        source.renewed()


class _Failing(Pieces):
    """Fails once."""

    fails = True

    def iter_local(self) -> Any:
        if self.fails:
            raise OSError("no such shard")
        return super().iter_local()


def test_a_source_that_fails_leaves_engines_as_they_are() -> None:
    whole = {"w": torch.ones(4)}
    source = _Failing(0, [Meta("w", (4,), (0,))], whole)
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(4), requires_grad=False))
    engine = PlainEngine(module)
    info = TrainerInfo(f"127.0.0.1:{free_port()}", 1, 1, rank=0, timeout=20.0)
    trainer = Trainer.trainer_init(info, client=engine, source=source)
    with pytest.raises(ExchangeError, match="OSError: no such shard"):
        trainer.send_weights()
    assert not module.get_parameter("w").any()
    source.fails = False
    trainer.send_weights()
    assert torch.equal(module.get_parameter("w"), whole["w"])
    trainer.shutdown()
    assert engine.link is not None
    engine.link.leave()


class _Divided(Old):
    """Of which each rank has some layers."""

    def held_names(self) -> list[str]:
        return []


class _Meshed(Old):
    """As those for nccl_m2n were, which yield pieces."""

    def mesh(self) -> None:
        """Nothing that is read."""


class _Mute(Old):
    """Metadata alone."""

    __iter__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "metas", "kind", "why"),
    [
        (Pieces, METAS[:1] * 2, ValueError, "declares 'all' twice"),
        (
            Pieces,
            [Meta("w", (4,), (0, 1), (2,), (Strided(),))],
            TypeError,
            "'w' with the placement Strided.*axis of tensor parallelism first",
        ),
        (_Divided, METAS, TypeError, "_Divided, a WeightSource of vLLM 0.32 that is divided"),
        (_Meshed, METAS, TypeError, "_Meshed, a WeightSource of vLLM 0.32 that is divided"),
        (_Mute, METAS, TypeError, "has metadata but no iter_local"),
    ],
)
def test_what_is_not_read_is_an_error(
    make: Callable[..., Any], metas: list[Meta], kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        read_source(make(0, metas, WHOLE), rank=0, trainers=4)


def test_a_source_around_a_module_is_read_by_what_it_declares() -> None:
    """As one that renames or merges what a module has."""
    made = Pieces(0, [Meta("all", (3,))], WHOLE)
    made._module = nn.Linear(2, 2)  # type: ignore[attr-defined]
    assert set(read_source(made, trainers=4).shapes) == {"all"}


def test_replicas_need_no_placements() -> None:
    meta = Meta("w", (4,), (1, 2), None, (Replicate(),))
    assert read_layout(meta, 4).mesh.ranks == (1, 2)


def test_a_rank_that_is_not_there_is_an_error() -> None:
    made = Pieces(0, [Meta("w", (4,), (0, 5))], WHOLE)
    with pytest.raises(
        (ValueError, ExchangeError), match="on rank 5, but TrainerInfo has trainers=2"
    ):
        _read(made, TrainerInfo("127.0.0.1:1", 2, 1, rank=0))
