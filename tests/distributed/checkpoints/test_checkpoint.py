"""Checkpoints: every layout to every layout, beside what torch.distributed.checkpoint itself does; crashes; bad input.

The names c04 to c44 are those of cases on which torch 2.13 fails.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import shardmath as sm
import shardmath_torch as smt
from shardmath.layouts.edits import window
from shardmath.layouts.store import flat_windows
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.sealed import BEGIN
from shardmath_torch.checkpoints.loading import LoadPlanner
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.reading import Reader
from shardmath_torch.checkpoints.safetensors import archive
from tests.distributed.pool import Pool
from tests.distributed.tasks import checkpoints as work
from tests.distributed.tasks.cases import thinned

DP, HSDP, ODD = (
    sm.Mesh(dp=4, tp=2),
    sm.Mesh(hsdp=2, dp=2, tp=2),
    sm.Mesh(dp=2, tp=2, ranks=(7, 0, 3, 5)),
)
SHAPE = (13, 6)

LAYOUTS: dict[str, Any] = {
    "FSDP over tensor parallel, uneven": sm.Layout(SHAPE, DP, "(tp dp n) h"),
    "the splits as written, uneven": sm.Layout(SHAPE, DP, (sm.StridedShard(0, 2), sm.Shard(0))),
    "packed": sm.Layout(SHAPE, DP, "([7 3 3] tp n | dp n) h"),
    "ragged": sm.Layout(SHAPE, DP, "(dp[1 0 9 3] n) (tp h)"),
    "cyclic": sm.Layout(SHAPE, DP, "(n dp 1) (h tp 2)"),
    "balanced over all": sm.Layout(SHAPE, DP, "(dp*tp~ n) h"),
    "replicas": sm.Layout(SHAPE, HSDP, "(tp dp n) h"),
    "replicated": sm.Layout(SHAPE, DP, {}),
    "padded": sm.Layout(SHAPE, DP, "(tp n)=16 h"),
    "some ranks": sm.Layout(SHAPE, ODD, "(dp n) (tp h)"),
    "one rank": sm.Layout(SHAPE, sm.Mesh(ranks=[6]), {}),
    "flat": flat_windows(
        "flat", SHAPE, {0: (0, 17), 3: (17, 18), 5: (18, 70), 2: (70, 78)}, dtype="float32"
    )[0],
}


def names_of(layouts: dict[str, Any]) -> dict[str, str]:
    return {f"{a} -> {b}": a for a, b in itertools.product(layouts, repeat=2)}


def test_every_layout_to_every_layout(pool: Pool, tmp_path: Path) -> None:
    """Saved under each, loaded under each; the elements are where they belong, and holes are zero."""
    path = str(tmp_path / "all")
    pool.run(work.saved, path, LAYOUTS)
    names = dict(thinned([*names_of(LAYOUTS).items()]))
    assert (
        pool.run(work.loaded, path, {name: LAYOUTS[name.split(" -> ")[1]] for name in names}, names)
        == [[]] * 8
    )


DTYPES = [
    "bfloat16",
    "float16",
    "float64",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
]


def test_every_type_and_odd_shapes(pool: Pool, tmp_path: Path) -> None:
    """Types that safetensors has no name for, scalars, tensors without elements, more ranks than rows."""
    shapes: dict[tuple[int, ...], str] = {
        (9, 5): "(tp dp n) h",
        (): "",
        (0, 3): "(dp n) h",
        (3,): "(dp tp n)",
    }
    layouts = {
        f"{dtype} {shape}": sm.Layout(shape, DP, text, dtype=dtype)
        for dtype in [*DTYPES, "float8_e8m0fnu"]
        for shape, text in shapes.items()
    }
    path = str(tmp_path / "types")
    pool.run(work.saved, path, layouts)
    other = {
        n: sm.Layout(x.shape, ODD, {"tp": sm.Shard(0)} if x.ndim else {}, dtype=x.dtype)
        for n, x in layouts.items()
    }
    assert pool.run(work.loaded, path, layouts) == pool.run(work.loaded, path, other) == [[]] * 8


def test_one_process_loads_what_eight_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(work.saved, str(tmp_path), LAYOUTS)
    found = smt.load(tmp_path, {name: sm.Layout(SHAPE, sm.Mesh(), {}) for name in LAYOUTS})
    assert all(work.same(t, work.elements(SHAPE, "float32")) for t in found.values()) and len(
        found
    ) == len(LAYOUTS)


def test_eight_load_what_one_process_saved(pool: Pool, tmp_path: Path) -> None:
    smt.save(
        tmp_path, {"w": work.elements(SHAPE, "float32")}, {"w": sm.Layout(SHAPE, sm.Mesh(), {})}
    )
    names = dict.fromkeys(LAYOUTS, "w")
    assert pool.run(work.loaded, str(tmp_path), LAYOUTS, names) == [[]] * 8


def test_every_element_is_written_once_and_replicas_share_the_work(
    pool: Pool, tmp_path: Path
) -> None:
    """Eight tensors that eight ranks hold whole: an eighth each."""
    layouts = {f"w{i}": sm.Layout((4096, 32), HSDP, {}) for i in range(8)} | LAYOUTS
    pool.run(work.saved, str(tmp_path), layouts)
    found, by_file = open_checkpoint(tmp_path), {}
    for name, saved in found.tensors.items():
        assert sum(piece.length for piece in saved.pieces) == 4 * torch.Size(saved.shape).numel(), (
            name
        )
        for piece in saved.pieces:
            by_file[piece.file.name[:33]] = by_file.get(piece.file.name[:33], 0) + piece.length
    assert (
        len(by_file) == 8
        and max(by_file.values()) - min(by_file.values()) < max(by_file.values()) / 16
    )


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """A rank asks for the bytes that it holds and no other."""
    layout = LAYOUTS["FSDP over tensor parallel, uneven"]
    smt.save(
        tmp_path, {"w": work.elements(SHAPE, "float32")}, {"w": sm.Layout(SHAPE, sm.Mesh(), {})}
    )
    metadata = Reader(tmp_path).read_metadata()
    for rank in DP.ranks:
        planner = LoadPlanner({"w": layout}, rank=rank)
        planner.set_up_planner({}, metadata)
        asked = sum(item.lengths.numel() for item in planner.create_local_plan().items)
        assert asked == torch.Size(layout.local_shape(rank)).numel()


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    wrote: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    layouts = {"w": whole_of(SHAPE), "v": whole_of((5,), "bfloat16"), "x": None}
    tensors = {"w": torch.ones(SHAPE), "v": torch.ones(5, dtype=torch.bfloat16), "x": b"abc"}
    smt.save(tmp_path, tensors, layouts, progress=lambda *numbers: wrote.append(numbers))
    smt.load(tmp_path, layouts, progress=lambda *numbers: read.append(numbers))
    total = 3 + 10 + 4 * 13 * 6
    for told in (wrote, read):
        assert told[0] == (0, total) and told[-1] == (total, total)


# Beside torch


@pytest.mark.parametrize("reader", ["torch", "safetensors"])
def test_torchs_readers_read_ours(pool: Pool, tmp_path: Path, reader: str) -> None:
    """Also where a rank has several boxes of a tensor."""
    layouts = {
        "a": sm.Layout((9, 4), DP, (sm.StridedShard(0, 2), sm.Shard(0))),
        "b": sm.Layout((16, 3), DP, "(n dp 1) h"),
        "s": sm.Layout((), DP, ""),
    }
    pool.run(work.saved, str(tmp_path), layouts)
    assert pool.run(work.by_torchs_reader, str(tmp_path), reader) == [(True, True, 0.0)] * 8


def test_c04_c37_torchs_checkpoints_load_into_any_layout(pool: Pool, tmp_path: Path) -> None:
    """Plain tensors, shards, replicas, tensors that are not contiguous, scalars."""
    pool.run(work.by_torchs_writer, str(tmp_path))
    shapes = {"plain": (9, 4), "shard": (16, 6), "plane": (9, 5)}
    texts = ["(tp dp n) h", "(3 tp n | dp n) h", "(n tp 1) (dp h)", "n h"]
    layouts = {
        f"{name} {text}": sm.Layout(shape, DP, text)
        for name, shape in shapes.items()
        for text in texts
    }
    assert (
        pool.run(work.loaded, str(tmp_path), layouts, {name: name.split()[0] for name in layouts})
        == [[]] * 8
    )
    found = smt.load(
        tmp_path, {"column": sm.Layout((3, 16), sm.Mesh(), {}), "scalar": scalar("bfloat16")}
    )
    assert found["column"].equal(work.whole((16, 3)).t()) and found["scalar"] == 2.5
    assert smt.load(tmp_path, {"nested.lr": None})["nested.lr"].dtype == torch.uint8


def scalar(dtype: str) -> sm.Layout:
    return sm.Layout((), sm.Mesh(), {}, dtype=dtype)


def test_our_planners_with_torchs_storage(pool: Pool, tmp_path: Path) -> None:
    layouts = {
        name: one
        for name, one in LAYOUTS.items()
        if not isinstance(one, tuple) and name != "cyclic"
    }
    into = dict(
        zip(layouts, [*list(layouts.values())[3:], *list(layouts.values())[:3]], strict=True)
    )
    assert pool.run(work.by_both, str(tmp_path), layouts, into) == [[]] * 8


def test_c04_c37_torch_still_refuses_both_ways(pool: Pool, tmp_path: Path) -> None:
    """What it saved of FSDP2 as a plain tensor, and a plain one into FSDP2. If this fails, torch was mended."""
    path = str(tmp_path / "fsdp2")
    pool.run(work.fsdp2_by_torch, path, (4, 2), 9)
    for out, back in pool.run(work.plain_by_torch, path):
        assert out.startswith("CheckpointException") and "mismatch" in out
        assert back.startswith("CheckpointException") and "mismatch" in back


@pytest.mark.parametrize(("mesh", "rows"), [((4, 2), 9), ((4, 2), 8), ((2, 4), 7), ((4, 2), 7)])
def test_c43_rows_of_fsdp2_over_tensor_parallel_survive(
    pool: Pool, tmp_path: Path, mesh: tuple[int, int], rows: int
) -> None:
    assert pool.run(work.fsdp2_by_us, str(tmp_path), mesh, rows) == [[True, True]] * 8


def test_c43_torch_still_loses_a_row(pool: Pool, tmp_path: Path) -> None:
    """If this fails, torch was mended. What it wrote is refused by us, naming the tensor and what is wrong."""
    got = pool.run(work.fsdp2_by_torch, str(tmp_path), (4, 2), 9)
    assert all(rows == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, -1.0] for rows in got)
    answers = pool.run(
        work.attempted, "load", str(tmp_path), {"weight": sm.Layout((9, 2), DP, "n h")}
    )
    assert all(
        kind == "CheckpointError"
        and "'weight'" in said
        and "elements of the tensor are lost" in said
        for kind, said in answers
    )


def test_c44_a_vocabulary_that_does_not_divide(pool: Pool, tmp_path: Path) -> None:
    """GPT-2's; torch refuses to save it."""
    assert pool.run(work.vocabulary, str(tmp_path / "ours"), "us") == [[True, True]] * 8
    got = pool.run(work.vocabulary, str(tmp_path / "torch"), "torch")
    assert all(isinstance(said, str) and said.startswith("save:") for said in got)


STRIDED = {
    "c06 c07, one axis": ((4,), "SS0,2", (16,)),
    "c08, with another dimension": ((2, 2), "SS0,2 S1", (8, 4)),
    "c29, uneven": ((4,), "SS0,2", (13,)),
}


@pytest.mark.parametrize("case", STRIDED)
def test_c06_c07_c08_strided_shards(pool: Pool, tmp_path: Path, case: str) -> None:
    assert pool.run(work.strided_by_us, str(tmp_path), *STRIDED[case]) == [(True, True)] * 8


def test_torch_still_cannot_save_strided_shards_or_loads_them_wrong(
    pool: Pool, tmp_path: Path
) -> None:
    """If this fails, torch was mended."""
    for case, (mesh, text, shape) in STRIDED.items():
        if case.startswith("c06"):
            assert any(
                x != "saved"
                for x in pool.run(
                    work.strided_by_torch, str(tmp_path / "s"), mesh, text, shape, "save"
                )
            )
        if not case.startswith("c29"):
            path = str(tmp_path / case.split(",")[0])
            assert False in pool.run(work.strided_by_torch, path, mesh, text, shape, "load")


def test_what_torch_saved_over_ours_is_what_is_loaded(pool: Pool, tmp_path: Path) -> None:
    """And the other way round."""
    layout = sm.Layout((9, 4), DP, "(dp n) h", dtype="float64")
    pool.run(work.saved, str(tmp_path), {"plain": layout})
    pool.run(work.by_torchs_writer, str(tmp_path))
    assert (
        pool.run(work.loaded, str(tmp_path), {"plain": sm.Layout((9, 4), DP, "(dp n) h")})
        == [[]] * 8
    )
    pool.run(work.saved, str(tmp_path), {"plain": layout})
    assert pool.run(work.loaded, str(tmp_path), {"plain": layout}) == [[]] * 8


# Bytes of a rank's own


def test_bytes_of_each_rank(pool: Pool, tmp_path: Path) -> None:
    """A rank gets its own back, or those of the lowest rank that has any; equal ones are stored once."""
    got = pool.run(work.own_bytes, str(tmp_path), (2, 3, 4, 5, 7), tuple(range(8)))
    assert got == [b"\2\2\2"] * 3 + [b"odd", b"\4" * 5, b"odd", b"\2\2\2", b"odd"]
    assert sorted(open_checkpoint(tmp_path).tensors) == ["state", "state@3", "state@4"]
    assert open_checkpoint(tmp_path).shapes == {"state": ((3,), "uint8")}


# Whole or not at all

LINE = sm.Layout((6,), sm.Mesh(), {})


def crash(path: str, at: str, turn: int) -> None:
    """Saves sevens, and ends at the `turn`-th call of a step."""
    owner = {"write": archive, "replace": os, "fsync": os, "unlink": Path}[at]
    real, calls = getattr(owner, at), itertools.count()

    def ends(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == turn:
            os._exit(7)
        return real(*args, **kwargs)

    setattr(owner, at, ends)
    smt.save(path, {"w": torch.full((6,), 7.0)}, {"w": LINE})
    os._exit(8)


@pytest.mark.parametrize(
    ("at", "turn"),
    [
        ("write", 0),
        *(("fsync", i) for i in range(5)),
        *(("replace", i) for i in range(3)),
        ("unlink", 0),
    ],
)
def test_a_crash_in_the_middle_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, at: str, turn: int
) -> None:
    """The former one until `.metadata` is replaced, from then on the new one; for torch's reader as for ours."""
    from torch.distributed.checkpoint import load as by_torch

    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": LINE})
    process = mp.get_context("fork").Process(target=crash, args=(str(tmp_path), at, turn))
    process.start()
    process.join(60)
    assert process.exitcode == 7
    found = smt.load(tmp_path, {"w": LINE})["w"]
    assert found.tolist() in ([0, 1, 2, 3, 4, 5], [7] * 6)
    theirs = {"w": torch.zeros(6)}
    by_torch(theirs, checkpoint_id=tmp_path, no_dist=True)
    assert theirs["w"].equal(found)
    smt.save(tmp_path, {"w": torch.ones(6)}, {"w": LINE})
    assert len(work.files(str(tmp_path))) == 3 and smt.load(tmp_path, {"w": LINE})["w"].equal(
        torch.ones(6)
    )


def test_a_failed_save_leaves_the_former(pool: Pool, tmp_path: Path) -> None:
    """One rank's objection is everybody's error, and names it."""
    layouts = {"w": sm.Layout((8, 2), DP, "(dp n) h")}
    pool.run(work.saved, str(tmp_path), layouts)
    before = work.files(str(tmp_path))
    for spoil, said in {
        (3, "w", torch.zeros(5)): "rank 3 could not save: source tensor 'w' has shape (5,)",
        (5, "w", None): "rank 5 could not save: source tensor 'w' is missing",
        (0, "w", torch.zeros(2, 2, dtype=torch.float64)): "has dtype float64",
        (2, "w", sm.Layout((8, 2), DP, "(tp n) h")): "could not save",
    }.items():
        answers = pool.run(work.attempted, "save", str(tmp_path), layouts, spoil)
        assert all(kind == "CheckpointError" and said in text for kind, text in answers), answers
    assert work.files(str(tmp_path)) == before
    assert pool.run(work.loaded, str(tmp_path), layouts) == [[]] * 8


def test_a_rank_that_ends_in_the_middle(tmp_path: Path) -> None:
    """The others hear of it, and what was saved before is whole."""
    alone, layouts = Pool(3), {"w": sm.Layout((9, 2), sm.Mesh(dp=3), "(dp n) h")}
    try:
        alone.run(work.saved, str(tmp_path), layouts)
        answers = alone.attempt(work.lost, str(tmp_path), layouts, ranks=[0, 2])
        assert all(
            kind == "CheckpointError" and "rank 1 failed" in said for kind, said in answers
        ), answers
    finally:
        alone.close()
    found = smt.load(tmp_path, {"w": sm.Layout((9, 2), sm.Mesh(), {})})
    assert found["w"].equal(work.elements((9, 2), "float32"))


ODD_ERRORS: list[tuple[str, int, str, str]] = [
    ("save", 0, "two", "Two: the disk is tired"),
    ("save", 3, "two", "Two: the disk is tired"),
    ("save", 0, "locked", "Locked: locked"),
    ("save", 3, "silent", "Silent: its message cannot be printed"),
    ("save", 3, "stopped", "interrupted by Stopped"),
    ("create_local_plan", 3, "two", "Two: the disk is tired"),
    ("create_global_plan", 0, "locked", "Locked: locked"),
    ("resolve_data", 3, "stopped", "interrupted by Stopped"),
    ("load", 3, "silent", "Silent: its message cannot be printed"),
]


@pytest.mark.parametrize(("where", "at", "kind", "said"), ODD_ERRORS)
def test_errors_that_do_not_survive_the_way_to_other_ranks(
    pool: Pool, tmp_path: Path, where: str, at: int, kind: str, said: str
) -> None:
    """They are told in words, and kept by their rank; the group goes on."""
    layouts = {"w": sm.Layout((8, 2), DP, "(dp tp n) h")}
    pool.run(work.saved, str(tmp_path), layouts)
    ended = pool.run(work.odd_error, str(tmp_path), layouts, where, at, kind)
    step = "load" if where == "load" else "save"
    told = f"rank {at} could not {step}: {said}"
    for rank, (text, is_cause, then) in enumerate(ended):
        is_own = rank == at
        assert text == ("Stopped" if is_own and kind == "stopped" else told)
        assert is_cause == is_own
        assert then == []


def test_a_group_of_some_ranks(pool: Pool, tmp_path: Path) -> None:
    ranks = (6, 1, 3)
    layouts = {
        "w": sm.Layout((9, 2), sm.Mesh(dp=3, ranks=ranks), "(dp n) h"),
        "v": sm.Layout((4,), sm.Mesh(ranks=[1]), "n"),
    }
    assert pool.run(work.among_some, str(tmp_path), ranks, layouts) == [[]] * 8


def test_ranks_that_save_different_things(pool: Pool, tmp_path: Path) -> None:
    """The local tensors fit on every rank, the layouts differ."""
    one, other = sm.Layout((8, 2), DP, "(dp n) h"), sm.Layout((8, 2), DP, "(n dp 1) h")
    answers = pool.run(work.attempted, "save", str(tmp_path), {"w": one}, (4, "w", other))
    assert all(
        "ranks 0 and 4 save different tensors, layouts or paths" in said for _, said in answers
    ), answers


BAD_SAVES: dict[str, tuple[Any, str]] = {
    "addends": (sm.Layout((8, 2), DP, "n h {sum: tp}"), "is Partial"),
    "nobody has it all": (sm.Layout((8, 2), DP, "(n)=<0:5> h"), "no source rank holds it"),
    "other ranks": (sm.Layout((8, 2), sm.Mesh(dp=2, ranks=(7, 8)), "(dp n) h"), "the group has"),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_what_cannot_be_saved(pool: Pool, tmp_path: Path, case: str) -> None:
    layout, said = BAD_SAVES[case]
    answers = pool.run(work.attempted, "save", str(tmp_path / "none"), {"w": layout})
    assert all(kind == "CheckpointError" and said in text for kind, text in answers), answers


def test_bytes_without_a_layout_are_bytes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has the layout None, for bytes, but is"):
        smt.save(tmp_path, {"w": torch.zeros(3)}, {"w": None})
    with pytest.raises(CheckpointError, match="has the layout None, for bytes, but is"):
        smt.save(tmp_path, {"w": {"lr": 1}}, {"w": None})  # type: ignore[dict-item]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(CheckpointError, match="cannot be written"):
        smt.save(tmp_path / "file" / "below", {"w": torch.zeros(6)}, {"w": LINE})


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("none")
    with pytest.raises(CheckpointError, match="link is a link to none, which does not exist"):
        smt.save(tmp_path / "link", {"w": torch.zeros(6)}, {"w": LINE})
    with pytest.raises(CheckpointError, match="link is a link to none, which does not exist"):
        smt.export(tmp_path / "link", {"w": torch.zeros(6)})


def test_filters_of_warnings(tmp_path: Path) -> None:
    """A save in one process never changes them: one in another thread that ends meanwhile would leave them changed."""
    seen: list[Any] = []

    def look(done: int, total: int) -> None:
        seen.append(list(warnings.filters))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filters = list(warnings.filters)
        smt.save(tmp_path, {"w": torch.zeros(6)}, {"w": LINE}, progress=look)
    assert seen and all(each == filters for each in seen)


# What is asked for, and what lies there


def whole_of(shape: tuple[int, ...], dtype: str = "float32") -> sm.Layout:
    return sm.Layout(shape, sm.Mesh(), {}, dtype=dtype)


NAMES = [
    "frame/0",
    "frame/1",
    "__metadata__",
    "__metadata___",
    "empty e",
    "w[0]",
    "a/b.c",
    "ü",
    " ",
    "x@0",
    "w#1",
]
NAMES += ["\ud800", "\\ud800", "\ud800_"]


def test_odd_names(tmp_path: Path) -> None:
    """Names that something here uses for itself; an empty tensor and bytes beside them."""
    layouts: dict[str, Any] = {name: whole_of((i + 1,)) for i, name in enumerate(NAMES)}
    tensors = {name: work.elements((i + 1,), "float32") + i for i, name in enumerate(NAMES)}
    smt.save(
        tmp_path,
        {**tensors, "e": torch.empty(0, 2), "x": b"abc"},
        {**layouts, "e": whole_of((0, 2)), "x": None},
    )
    found = smt.load(tmp_path, {**layouts, "e": whole_of((0, 2)), "x": None})
    assert all(found[name].equal(tensors[name]) for name in NAMES)
    assert found["e"].shape == (0, 2) and bytes(found["x"].tolist()) == b"abc"
    read = {name: torch.zeros(i + 1) for i, name in enumerate(NAMES)}
    torch.distributed.checkpoint.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(read[name].equal(tensors[name]) for name in NAMES)
    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as file:
        assert (
            len(file.keys()) == 2 * (len(NAMES) + 2) + 1
        )  # each with its frame, and one after the last
        assert all(
            file.get_tensor(name).equal(tensors[name])
            for name in set(file.keys()).intersection(NAMES[4:-3])
        )


def test_ranks_in_any_order_share_the_work(pool: Pool, tmp_path: Path) -> None:
    """The disk is no rank of theirs."""
    layouts = {
        "w": sm.Layout((4096, 16), sm.Mesh(dp=3, ranks=(6, 4, 3)), {}),
        "v": sm.Layout((9,), sm.Mesh(ranks=[4]), {}),
    }
    pool.run(work.saved, str(tmp_path), layouts)
    assert len({piece.file for piece in open_checkpoint(tmp_path)["w"].pieces}) == 3
    assert pool.run(work.loaded, str(tmp_path), layouts) == [[]] * 8


def test_rows_dealt_one_by_one(pool: Pool, tmp_path: Path) -> None:
    """Many boxes on few files; torch's reader finds them, the one of safetensors says that it cannot."""
    layouts = {"w": sm.Layout((1000, 3), DP, "(n dp 1) h")}
    pool.run(work.saved, str(tmp_path), layouts)
    assert len(work.files(str(tmp_path))) <= 2 + 8 * 16
    assert (
        pool.run(work.loaded, str(tmp_path), {"w": sm.Layout((1000, 3), DP, "(tp dp n) h")})
        == [[]] * 8
    )
    theirs = {"w": torch.zeros(1000, 3)}
    torch.distributed.checkpoint.load(theirs, checkpoint_id=tmp_path, no_dist=True)
    assert work.same(theirs["w"], work.elements((1000, 3), "float32"))
    with pytest.raises(KeyError):
        torch.distributed.checkpoint.HuggingFaceStorageReader(str(tmp_path)).read_metadata()


def test_rows_dealt_one_by_one_beside_a_tensor_called_like_one_of_them(
    pool: Pool, tmp_path: Path
) -> None:
    """Boxes are numbered in the last file, where the other tensor has a box of its own."""
    layouts = {name: sm.Layout((144, 3), DP, "(n dp 1) h") for name in ("w", "w#1", "w#2")}
    pool.run(work.saved, str(tmp_path), layouts)
    assert pool.run(work.loaded, str(tmp_path), layouts) == [[]] * 8


class Sub(torch.Tensor):
    pass


def test_tensors_of_a_subclass(tmp_path: Path) -> None:
    """Are saved as tensors, which torch's reader takes."""
    smt.save(tmp_path, {"w": torch.arange(6.0).as_subclass(Sub)}, {"w": LINE})
    theirs = {"w": torch.zeros(6)}
    torch.distributed.checkpoint.load(theirs, checkpoint_id=tmp_path, no_dist=True)
    assert theirs["w"].equal(torch.arange(6.0))


@pytest.mark.parametrize("view", ["conj", "neg", "transposed"])
def test_views_that_torch_saved(tmp_path: Path, view: str) -> None:
    """Values are conjugated, negated and transposed as torch does."""
    z = torch.arange(12.0).reshape(3, 4) * (1 + 2j)
    w = {"conj": z.conj(), "neg": z.conj().imag, "transposed": z.t()}[view]
    torch.distributed.checkpoint.save({"w": w}, checkpoint_id=tmp_path, no_dist=True)
    dtype = str(w.dtype).removeprefix("torch.")
    assert smt.load(tmp_path, {"w": whole_of(tuple(w.shape), dtype)})["w"].equal(
        w.resolve_conj().resolve_neg()
    )


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """What merely looks like ours."""
    smt.save(tmp_path, {"w": torch.zeros(6)}, {"w": LINE})
    (tmp_path / "shardmath-my-own.safetensors").write_bytes(b"mine")
    (tmp_path / "shardmath-0123456789ab-00000-of-00001.safetensors").mkdir()
    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": LINE})
    assert (tmp_path / "shardmath-my-own.safetensors").read_bytes() == b"mine"
    assert smt.load(tmp_path, {"w": LINE})["w"].equal(torch.arange(6.0))


def test_weights_that_are_called_like_ours(tmp_path: Path) -> None:
    """One file of Hugging Face's in a folder is loaded, whatever its name begins with."""
    from safetensors.torch import save_file

    save_file({"w": torch.arange(6.0)}, tmp_path / "shardmath-model.safetensors")
    assert smt.load(tmp_path, {"w": LINE})["w"].equal(torch.arange(6.0))


def test_a_first_save_that_ended_is_no_checkpoint(tmp_path: Path) -> None:
    """Its one data file is not taken for weights."""
    process = mp.get_context("fork").Process(target=crash, args=(str(tmp_path), "replace", 1))
    process.start()
    process.join(60)
    assert process.exitcode == 7 and len(work.files(str(tmp_path))) == 2
    with pytest.raises(CheckpointError, match="files of a save that did not end"):
        smt.load(tmp_path, {"w": LINE})


@pytest.mark.parametrize("how", ["index cut short", "newer"])
def test_an_index_that_cannot_be_read_is_not_needed(tmp_path: Path, how: str) -> None:
    """`.metadata` says the same; without it that is an error."""
    smt.save(tmp_path, {"w": torch.arange(6.0), "x": b"abc"}, {"w": LINE, "x": None})
    damage(tmp_path, how)
    found = smt.load(tmp_path, {"w": LINE, "x": None})
    assert found["w"].equal(torch.arange(6.0)) and bytes(found["x"].tolist()) == b"abc"
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"shardmath\.json"):
        smt.load(tmp_path, {"w": LINE})


def test_a_pickle_that_would_change_torchs_classes(tmp_path: Path) -> None:
    """It changes copies of them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    before, module = MetadataIndex.__hash__, b"torch.distributed.checkpoint.metadata"
    evil = b"\x80\x04c" + module + b"\nMetadataIndex\nN}(\x8c\x08__hash__ctorch\nSize\nu\x86b."
    (tmp_path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError):
        smt.load(tmp_path, {"w": LINE})
    assert MetadataIndex.__hash__ is before


@pytest.mark.parametrize("how", ["beyond", "big", "negative", "other dimensions"])
def test_archives_and_metadata_that_lie(tmp_path: Path, how: str) -> None:
    """An offset behind the storage, another byte order, boxes of no sense: none is believed, and nothing crashes."""
    torch.distributed.checkpoint.save(
        {"w": torch.arange(40.0)[3:9].clone()}, checkpoint_id=tmp_path, no_dist=True
    )
    file, metadata = tmp_path / "__0_0.distcp", pickle.loads((tmp_path / ".metadata").read_bytes())
    data = file.read_bytes()
    if how == "beyond":
        file.write_bytes(data.replace(b"QK\x00K\x06\x85", b"QK\x20K\x06\x85"))
    elif how == "big":
        file.write_bytes(data.replace(b"little", b"big\x00\x00\x00"))
    else:
        chunk = metadata.state_dict_metadata["w"].chunks[0]
        chunk.sizes = torch.Size([-6]) if how == "negative" else torch.Size([2, 3])
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert how in ("negative", "other dimensions") or file.read_bytes() != data
    with pytest.raises(CheckpointError):
        smt.load(tmp_path, {"w": LINE})


def test_an_index_of_a_tensor_too_large_to_be(tmp_path: Path) -> None:
    """It is checked before room is made for it."""
    smt.save(tmp_path, {"x": b"abc"}, {"x": None})
    index = tmp_path / "shardmath.json"
    text = json.loads(index.read_text())
    for n in (2**50, 2**70):
        text["tensors"]["x"][1] = [n]
        index.write_text(json.dumps(text))
        with pytest.raises(CheckpointError):
            smt.load(tmp_path, {"x": None})


def test_ranks_that_name_different_folders(pool: Pool, tmp_path: Path) -> None:
    """Is an error on all, of a save and of a load, and both folders stay as they are."""
    layouts = {"w": sm.Layout((8, 2), DP, "(dp n) h")}
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    for path in paths:
        pool.run(work.saved, path, layouts)
    before = [work.files(path) for path in paths]
    for step in ("save", "load"):
        answers = pool.run(work.elsewhere, step, paths, layouts)
        assert all(
            kind == "CheckpointError" and f"could not {step}" in said for kind, said in answers
        ), answers
    assert [work.files(path) for path in paths] == before


@pytest.mark.parametrize("what", ["text", "ranks", "no tensors", "no path"])
def test_one_rank_that_is_wrong_before_it_begins(pool: Pool, tmp_path: Path, what: str) -> None:
    """Nobody waits for it."""
    layouts = {"w": sm.Layout((8, 2), DP, "(dp n) h")}
    answers = pool.run(work.wrong_on_one, str(tmp_path), layouts, what)
    assert all(
        kind == "CheckpointError" and said.startswith("rank 2 could not save")
        for kind, said in answers
    ), answers


BAD_LOADS: dict[str, tuple[dict[str, Any], str]] = {
    "no such name": ({"v": LINE}, "has no 'v' among its 1 tensor; it has 'w'"),
    "another shape": (
        {"w": sm.Layout((5,), sm.Mesh(), {})},
        "is stored as float32[6], but its layout is",
    ),
    "another type": (
        {"w": sm.Layout((6,), sm.Mesh(), {}, dtype="int32")},
        "is stored as float32[6], but its layout is",
    ),
    "addends": ({"w": sm.Layout((6,), sm.Mesh(x=2), "n {sum: x}")}, "Partial"),
    "no bytes": ({"w": None}, "'w' has the layout None, for bytes, but is stored as a"),
}


@pytest.mark.parametrize("case", BAD_LOADS)
def test_what_cannot_be_loaded(tmp_path: Path, case: str) -> None:
    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": LINE})
    layouts, said = BAD_LOADS[case]
    with pytest.raises(CheckpointError) as error:
        smt.load(tmp_path, layouts)
    assert said in str(error.value)


def test_a_partial_axis_of_one_rank_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    alone = sm.Layout((6,), sm.Mesh(x=1), "n {sum: x}")
    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": alone})
    for layout in (LINE, alone):
        assert smt.load(tmp_path, {"w": layout})["w"].equal(torch.arange(6.0))


def test_one_rank_that_cannot_load_is_everybodys_error(pool: Pool, tmp_path: Path) -> None:
    layouts = {"w": sm.Layout((8, 2), DP, "(dp n) h")}
    pool.run(work.saved, str(tmp_path), layouts)
    answers = pool.run(
        work.attempted, "load", str(tmp_path), layouts, (6, "w", sm.Layout((8, 3), DP, "n h"))
    )
    assert all(
        kind == "CheckpointError" and said.startswith("rank 6 could not load")
        for kind, said in answers
    )


def damage(path: Path, how: str) -> None:
    data, index = next(path.glob("*.safetensors")), path / "shardmath.json"
    text = json.loads(index.read_text())
    if how == "data cut short":
        os.truncate(data, data.stat().st_size - 1)
    elif how == "data missing":
        data.unlink()
    elif how == "index cut short":
        index.write_text(index.read_text()[:-9])
    elif how == "index elsewhere":
        text["files"][0][0] = "../" + text["files"][0][0]
    elif how == "element lost":
        text["tensors"]["w"][2][0][3] = [5]
    elif how == "element outside":
        text["tensors"]["w"][2][0][2] = [1]
    elif how == "negative":
        text["tensors"]["w"][2][0][1] = -8
    elif how == "newer":
        text["shardmath"] = 99
    if not how.startswith(("data", "index cut")):
        index.write_text(json.dumps(text))


@pytest.mark.parametrize(
    "how",
    [
        "data cut short",
        "data missing",
        "index elsewhere",
        "element lost",
        "element outside",
        "negative",
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, how: str) -> None:
    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": LINE})
    damage(tmp_path, how)
    with pytest.raises(CheckpointError) as error:
        smt.load(tmp_path, {"w": LINE})
    assert str(tmp_path) in str(error.value) or "data file" in str(error.value)


@pytest.mark.parametrize("kept", [0, 1, 16])
def test_metadata_that_are_cut_behind_what_torch_reads(tmp_path: Path, kept: int) -> None:
    """They are ours, so they are not taken for torch's, which have no checksums; the index beside them is whole."""
    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": LINE})
    file = tmp_path / ".metadata"
    text = file.read_bytes()
    file.write_bytes(text[: text.index(BEGIN) + kept])
    with pytest.raises(CheckpointError, match="ends before the index"):
        smt.open_checkpoint(tmp_path)
    file.unlink()
    assert smt.load(tmp_path, {"w": LINE})["w"].equal(torch.arange(6.0))


@pytest.mark.parametrize("write", [smt.save, smt.export])
def test_a_folder_that_was_opened_stays_the_same(
    tmp_path: Path, write: Any, monkeypatch: Any
) -> None:
    """Also where it was named from a folder that the process has left."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write("w", {"w": torch.full((6,), float(len(name)))}, {"w": LINE})
    monkeypatch.chdir(tmp_path / "one")
    opened = smt.open_checkpoint("w")
    monkeypatch.chdir(tmp_path / "other")
    assert smt.load(opened, {"w": LINE})["w"].equal(torch.full((6,), 3.0))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo ran > ran",)


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_nothing_is_unpickled_that_is_not_listed(
    tmp_path: Path, where: str, monkeypatch: Any
) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Evil() if where == "alone" else Metadata({}, planner_data=Evil()))
    )
    with pytest.raises(CheckpointError, match=r"posix\.system|nt\.system"):
        smt.load(tmp_path, {"w": LINE})
    assert not (tmp_path / "ran").exists()


def test_a_torch_checkpoint_with_other_data_than_its_metadata(tmp_path: Path) -> None:
    """Each archive is looked into, also one that holds nothing of what is asked for."""
    from torch.distributed.checkpoint import save as by_torch

    by_torch({"w": torch.arange(6.0), "v": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    infos = {index.fqn: (index, info) for index, info in metadata.storage_data.items()}
    metadata.storage_data[infos["w"][0]] = infos["v"][1]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"tensor 'w': .*but float32\[4\] is stored there"):
        smt.load(tmp_path, {"w": LINE})


def test_hugging_face_files_load_into_any_layout(pool: Pool, tmp_path: Path) -> None:
    """An index with several files; a name of another; a tensor that begins at an odd byte."""
    from safetensors.torch import save_file

    save_file(
        {"odd": work.elements((3,), "uint8"), "a": work.elements((9, 5), "bfloat16")},
        tmp_path / "1.safetensors",
    )
    save_file({"b": work.elements((13, 6), "float32")}, tmp_path / "2.safetensors")
    places = {"odd": "1.safetensors", "a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    layouts = {
        "a": sm.Layout((9, 5), DP, "(tp dp n) h", dtype="bfloat16"),
        "tied": sm.Layout((9, 5), DP, "(n dp 1) (tp h)", dtype="bfloat16"),
        "b": LAYOUTS["packed"],
        "odd": sm.Layout((3,), DP, "(dp n)", dtype="uint8"),
    }
    assert pool.run(work.loaded, str(tmp_path), layouts, {"tied": "a"}) == [[]] * 8


def test_windows_called_like_another_tensor(tmp_path: Path) -> None:
    """One buffer for two tensors would have the last one's values: refused, as by save."""
    line, two = sm.Layout((4,), sm.Mesh(), "n"), sm.Layout((2,), sm.Mesh(), "n")
    windows = (window(line, ((0, 2),)), window(line, ((2, 4),)))
    tensors = {"w": torch.arange(4.0), "w[0]": torch.tensor([7.0, 8.0])}
    smt.save(tmp_path, tensors, {"w": line, "w[0]": two})
    for layouts in ({"w": windows, "w[0]": two}, {"w[0]": two, "w": windows}):
        with pytest.raises(
            CheckpointError, match=r"have a local tensor 'w\[0\]', .* load one under"
        ):
            smt.load(tmp_path, layouts)
    found = smt.load(tmp_path, {"w": windows, "v": two}, names={"v": "w[0]"})
    assert {key: t.tolist() for key, t in found.items()} == {
        "w[0]": [0.0, 1.0, 0.0, 0.0],
        "w[1]": [0.0, 0.0, 2.0, 3.0],
        "v": [7.0, 8.0],
    }


@pytest.mark.parametrize("name", ["wieght", "module.w", "average.w"])
def test_names_that_no_layout_has(tmp_path: Path, name: str) -> None:
    """A misspelled name is not ignored: `w` would be loaded from itself, which has other values."""
    line = sm.Layout((2,), sm.Mesh(), "n")
    stored = {"w": torch.zeros(2), "average.w": torch.ones(2)}
    smt.save(tmp_path, stored, dict.fromkeys(stored, line))
    said = rf"names= has '{name}': 'average.w', but layouts has no '{name}'; map .* \['w'\]"
    with pytest.raises(CheckpointError, match=said):
        smt.load(tmp_path, {"w": line}, names={name: "average.w"})


@pytest.mark.parametrize("given", [b"own", torch.zeros(2, dtype=torch.uint8), torch.zeros(2)])
def test_windows_called_like_bytes(tmp_path: Path, given: Any) -> None:
    """Refused by save as by load, before anything is written, whichever of the two is given."""
    line = sm.Layout((4,), sm.Mesh(), "n")
    windows = (window(line, ((0, 2),)), window(line, ((2, 4),)))
    tensors = {"w[0]": given, "w[1]": torch.zeros(2)}
    said = r"both have a local tensor 'w\[0\]', as one of them has several layouts; save one under"
    for layouts in ({"w": windows, "w[0]": None}, {"w[0]": None, "w": windows}):
        with pytest.raises(CheckpointError, match=said):
            smt.save(tmp_path / "none", tensors, layouts)
    assert not (tmp_path / "none").exists()


NOTHING: dict[str, tuple[Any, str]] = {
    "path": (
        lambda path, layouts: smt.save(5, {}, layouts),
        "the path is 5, of type int; give a str",
    ),
    "load": (lambda path, layouts: smt.load(5, layouts), "the path is 5, of type int; give a str"),
    "paths": (
        lambda path, layouts: smt.save(path, {}, layouts, paths=5),
        "paths is 5; give a mapping from names to tuples of keys",
    ),
    "tensors": (lambda path, layouts: smt.save(path, 5, layouts), "the tensors are 5; give a map"),
    "names": (
        lambda path, layouts: smt.load(path, layouts, names=5),
        "names is 5; give a mapping from wanted names to stored",
    ),
    "a name": (
        lambda path, layouts: smt.load(path, layouts, names={"w": 5}),
        "names= has 'w': 5, where both must be str",
    ),
    "a window": (
        lambda path, layouts: smt.load(path, {"w": (None,)}),  # type: ignore[dict-item]
        r"tensor 'w' is \(None,\); give a Layout or a tuple of Layouts",
    ),
    "device": (
        lambda path, layouts: smt.load(path, layouts, device="nowhere"),
        "on device='nowhere'.*; give a device that this machine has",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_is_none_of_what_it_should_be(tmp_path: Path, case: str) -> None:
    """Said with what it is and what to give."""
    layouts = {"w": sm.Layout((2,), sm.Mesh(), "n")}
    smt.save(tmp_path, {"w": torch.ones(2)}, layouts)
    act, said = NOTHING[case]
    with pytest.raises(CheckpointError, match=said):
        act(tmp_path, layouts)


@pytest.mark.parametrize("count", range(1, 25))
def test_ctrl_c_while_torch_makes_an_archive(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt, not an error of torch's, which ends the archive even then."""
    write = archive._Records.write
    calls = itertools.count(1)

    def strike(records: Any, data: Any) -> int:
        if next(calls) == count:
            raise KeyboardInterrupt
        return write(records, data)

    monkeypatch.setattr(archive._Records, "write", strike)
    with pytest.raises(KeyboardInterrupt):
        smt.save(tmp_path, {"w": torch.ones(2)}, {"w": sm.Layout((2,), sm.Mesh(), "n")})
    assert not list(tmp_path.iterdir())
