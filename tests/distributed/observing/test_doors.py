"""Every `progress=` of the library is called alike: with this rank's bytes that are done, and all of them."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn, optim

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from shardmath_torch.moves.observing import bars
from shardmath_torch.moves.observing.bars import Tally

Told = list[tuple[int, int]]
WIDTH = 2048
WHOLE = sm.Layout((WIDTH * 2, WIDTH), sm.Mesh(), "n h")
NARROW = sm.Layout(WHOLE.shape, sm.Mesh(), "n h", dtype="bfloat16")
ROWS = sm.Layout(WHOLE.shape, sm.Mesh(tp=2), "(tp n) h")
COLUMNS = sm.Layout(WHOLE.shape, sm.Mesh(tp=2), "n (tp h)")
NBYTES = 4 * 2 * WIDTH * WIDTH


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """One process is all ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> tuple[nn.Module, optim.Optimizer]:
    module = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    return module, optim.SGD(module.parameters(), lr=0.1)


def full(value: float = 1.0) -> dict[str, Tensor]:
    return {"weight": torch.full(WHOLE.shape, value)}


def strided() -> dict[str, Tensor]:
    return {"weight": torch.ones(WHOLE.shape[::-1]).T}


def load(path: Path, layout: sm.Layout, tell: Any) -> None:
    smt.export(path, full(), {"weight": WHOLE})
    smt.load(path, {"weight": layout}, progress=tell)


def load_checked(path: Path, tell: Any) -> None:
    """Each row is a part of a chunk, all of which are read for their checksums."""
    smt.save(path, full(), {"weight": WHOLE})
    smt.load(path, {"weight": COLUMNS}, progress=tell)


def load_remote(path: Path, tell: Any) -> None:
    smt.save("memory://doors", full(), {"weight": WHOLE})
    smt.load("memory://doors", {"weight": WHOLE}, progress=tell)


def load_state(path: Path, tell: Any) -> None:
    smt.save_state(path, *made())
    smt.load_state(path, *made(), progress=tell)


def load_weights(path: Path, tell: Any) -> None:
    smt.export(path, made()[0])
    smt.load_weights(path, made()[0].bfloat16(), progress=tell)


def refit(path: Path, tell: Any) -> None:
    shapes = {"weight": (WHOLE.shape, "float32")}
    move = smt.Refit(sm.refit({"weight": WHOLE}, {"weight": WHOLE}, shapes))
    move.prepare(full(), full())
    move(progress=tell)


def transformed(path: Path, tell: Any) -> None:
    cast = sm.transforms.transformed(
        {"weight": WHOLE}, {"weight": NARROW}, {"weight": transforms.Cast("bfloat16")}
    )
    out = {"weight": torch.zeros(WHOLE.shape).bfloat16()}
    smt.compile_transformed(cast)(full(), out=out, progress=tell)


PLAN = sm.plan({"weight": WHOLE}, {"weight": WHOLE})
DOORS: dict[str, Callable[[Path, Any], object]] = {
    "save": lambda path, tell: smt.save(path, full(), {"weight": WHOLE}, progress=tell),
    "save, strided": lambda path, tell: smt.save(path, strided(), {"weight": WHOLE}, progress=tell),
    "load": lambda path, tell: load(path, WHOLE, tell),
    "load, rows": lambda path, tell: load(path, ROWS, tell),
    "load, columns": lambda path, tell: load(path, COLUMNS, tell),
    "load, checked": load_checked,
    "load, from a URL": load_remote,
    "save_state": lambda path, tell: smt.save_state(path, *made(), progress=tell),
    "load_state": load_state,
    "load_weights": load_weights,
    "export": lambda path, tell: smt.export(path, full(), {"weight": WHOLE}, progress=tell),
    "Mover": lambda path, tell: smt.compile(PLAN)(full(), out=full(0.0), progress=tell),
    "Changes": lambda path, tell: smt.compile_changes(PLAN)(full(), out=full(0.0), progress=tell),
    "Refit": refit,
    "TransformedMover": transformed,
}


def test_all_doors_are_here() -> None:
    """What is added to the library with a `progress=` is added to the table."""
    found = set()
    for name in smt.__all__:
        door = getattr(smt, name)
        call = door.__call__ if inspect.isclass(door) else door
        if callable(call) and "progress" in inspect.signature(call).parameters:
            found.add(name)
    assert found == {name.split(",")[0] for name in DOORS}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_tells_bytes_that_are_done_and_all_of_them(tmp_path: Path, door: str) -> None:
    """From none to all; of files, at most 16 MiB apart, and a bar shows it."""
    told: Told = []
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with smt.progress_bar("bytes", console=screen) as bar:

        def tell(*numbers: int) -> None:
            told.append(numbers)  # type: ignore[arg-type]
            bar(*numbers)

        DOORS[door](tmp_path, tell)
    done, totals = [one for one, _ in told], {total for _, total in told}
    (total,) = totals
    assert done == sorted(done) and done[0] == 0 and done[-1] == total
    if door[0].islower():
        assert total >= NBYTES // 2
        assert max(b - a for a, b in pairwise(done)) <= 16 << 20
    shown = f"{total / 1e6:.1f}/{total / 1e6:.1f} MB" if total else "0/0 bytes"
    assert shown in screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("door", [door for door in DOORS if door[0].islower()])
def test_what_cannot_be_called_is_refused(tmp_path: Path, door: str) -> None:
    """Before a file is written."""
    with pytest.raises(sm.ShardError, match="progress=3 cannot be called"):
        DOORS[door](tmp_path, 3)


def test_what_takes_long_is_told_between_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    told: Told = []
    tally = bars.Tally(lambda *numbers: told.append(numbers))
    tally.begin(10)
    for at in (0.1, 0.2, 0.3, 0.5):
        now[0] = at
        tally.add(1)
    assert told == [(0, 10), (2, 10), (4, 10)]
    tally.add(6)
    assert told[-1] == (10, 10)


def test_parts_that_do_not_divide_16_mib_are_told_as_often() -> None:
    """Parts a little smaller than 16 MiB were told two at a time."""
    told: list[int] = []
    tally = Tally(lambda done, _: told.append(done))
    source = torch.zeros(1 << 21, 24)[:, ::2]
    tally.begin(source.nbytes)
    tally.copy(torch.empty(1 << 21, 12), source)
    assert told[-1] == source.nbytes
    assert max(b - a for a, b in pairwise(told)) <= 16 << 20
