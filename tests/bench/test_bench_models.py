"""Whole models on many ranks: plans, lists, proofs, certificates, and how they grow.

Only what is computed is asserted; what it costs is recorded (`conftest`) and never fails. Garbage is not collected
while the clock runs, as in `timeit`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardmath as sm
from shardmath.layouts.edits import relabeled
from shardmath.plans.membership.keeping import follow
from shardmath.plans.programs.part import RankProgram, outline_part
from tests.bench import megatron_peer, models
from tests.bench.test_bench_core import cold, rounds_of

Record = Callable[..., None]

ROWS: dict[str, tuple[Callable[[], models.Pair], float, float]] = {
    "DeepSeek-V3, 256 + 256 ranks": (models.deepseek_v3, 0.1, 0.1),
    "DeepSeek-V3, 4,096 + 4,096 ranks": (lambda: models.deepseek_v3(4096), 0.3, 0.1),
    "DeepSeek-V3, experts in stacked buffers, 4,096 + 4,096": (
        lambda: models.deepseek_v3_stacked(4096),
        0.5,
        0.3,
    ),
    "FSDP512 x TP8 -> DP1024 x TP4, 4,096 ranks, 407 tensors": (models.fsdp_over_tp, 0.5, 0.3),
}
"""The workload, the seconds that its plan and loads may take, and those of one rank's list."""


TABLE_TARGET = 0.02
"""The seconds that one rank's table may take."""


def planned(src: dict[str, sm.Layout], dst: dict[str, sm.Layout]) -> sm.Plan:
    """The plan, and what every rank sends and receives."""
    p = sm.plan(src, dst)
    assert sum(p.sent_bytes().values()) == sum(p.received_bytes().values())
    return p


def count(p: sm.Plan, **of: int) -> int:
    """How many transfers one rank has."""
    return len(list(p.transfers(**of)))


@pytest.mark.parametrize("name", ROWS)
def test_plan_of_a_model(record: Record, name: str) -> None:
    """The plan of all tensors with every rank's loads, and one receiver's and one sender's list."""
    workload, plan_target, list_target = ROWS[name]
    src, dst = workload()
    record(
        f"{name}: plan, and count every rank's bytes",
        rounds_of(lambda: planned(src, dst), 7),
        plan_target,
    )
    p = planned(src, dst)
    receiver, sender = p.dst_ranks[3], p.src_ranks[3]
    assert (
        sum(t.nbytes for t in p.transfers(dst=receiver) if t.src_rank != receiver)
        == p.received_bytes()[receiver]
    )
    record(
        f"{name}: list one receiver's transfers",
        rounds_of(lambda: count(p, dst=receiver), 5, lambda: forget(p)),
        list_target,
    )
    record(
        f"{name}: one receiver's transfers as a table",
        rounds_of(lambda: p.table(dst=receiver), 5, lambda: forget(p)),
        TABLE_TARGET,
    )
    record(
        f"{name}: one receiver's transfers as a table, with six columns read",
        rounds_of(lambda: columns(p, receiver), 5, lambda: forget(p)),
        2 * TABLE_TARGET,
    )
    record(
        f"{name}: list one sender's transfers",
        rounds_of(lambda: count(p, src=sender), 5, lambda: forget(p)),
        list_target,
    )


def columns(p: sm.Plan, rank: int) -> list[object]:
    """What a transport posts descriptors from: ranks, tensors, offsets and bytes of all that a receiver gets."""
    table = p.table(dst=rank)
    assert table.names
    ends = table.src_rank, table.src_tensor, table.src_offset, table.dst_tensor, table.dst_offset
    return [*ends, table.nbytes]


def forget(p: sm.Plan) -> None:
    """Empty every cache, but keep the plan."""
    del p
    cold()


def test_a_changed_model(record: Record) -> None:
    """DeepSeek-V3 planned again while the caller keeps the plan before: with nothing changed, and with one tensor or
    one rank changed, another one in each round."""
    src, dst = models.deepseek_v3()
    names = sorted(src)

    def resized(i: int) -> models.Pair:
        name = names[20000 + i]
        shape = src[name].shape[0] + 32, *src[name].shape[1:]
        layouts = [
            sm.Layout(shape, side[name].mesh, text, dtype="bfloat16")
            for side, text in ((src, "n h"), (dst, "n (tp h)"))
        ]
        return {**src, name: layouts[0]}, {**dst, name: layouts[1]}

    def fewer(i: int) -> models.Pair:
        pair = dict(src), dict(dst)
        for side in pair:
            del side[names[20000 + i]]
        return pair

    def more(i: int) -> models.Pair:
        name = names[20000 + i]
        return {**src, f"{name}.more": src[name]}, {**dst, f"{name}.more": dst[name]}

    def moved(i: int) -> models.Pair:
        now = {layout: relabeled(layout, {300 + i: 9999}) for layout in set(dst.values())}
        return src, {name: now[layout] for name, layout in dst.items()}

    changes: dict[str, tuple[Callable[[int], models.Pair], float]] = {
        "nothing changed": (lambda i: (src, dst), 2e-3),
        "one tensor resized": (resized, 0.03),
        "one tensor fewer": (fewer, 0.03),
        "one tensor more": (more, 0.03),
        "one rank replaced": (moved, 0.03),
    }
    for what, (change, target) in changes.items():
        rounds = itertools.count()
        now: list[models.Pair] = []
        kept: list[sm.Plan] = []

        def before(
            rounds: Iterator[int] = rounds,
            now: list[models.Pair] = now,
            kept: list[sm.Plan] = kept,
            change: Callable[[int], models.Pair] = change,
        ) -> None:
            now[:] = [change(next(rounds))]
            kept[:] = [sm.plan(src, dst)]

        seconds = rounds_of(lambda now=now: sm.plan(*now[0]), 7, before)  # type: ignore[misc]
        record(f"DeepSeek-V3, 256 + 256 ranks, planned before: {what}", seconds, target)


def test_an_engine_leaves(record: Record) -> None:
    """One of 8 engines leaves DeepSeek-V3, and comes back: the plan with the part of a trainer, or of an engine."""
    src, dst = models.deepseek_v3()
    p = planned(src, dst)
    mesh = next(iter(p.dst.values()))[0].mesh
    leaving = mesh.select(dp=3).ranks
    trainer, engine = p.src_ranks[100], mesh.select(dp=5).ranks[0]
    outlines = {rank: outline_part(p, rank) for rank in (trainer, engine)}
    parts = {rank: outline.part(peers=256) for rank, outline in outlines.items()}

    def warm() -> None:
        """What planning keeps is that of the plan before, as where it was made in this process."""
        cold()
        planned(src, dst)

    def leave(rank: int) -> RankProgram:
        rest = sm.without(p, leaving)
        part = follow(parts[rank], rest, pace)
        assert part is not None
        return part

    pace = parts[trainer].pace
    assert pace is not None
    name = "DeepSeek-V3, 256 + 256 ranks, one of 8 engines"
    for what, rank in (("a trainer's", trainer), ("an engine's", engine)):
        seconds = rounds_of(lambda rank=rank: leave(rank), 15, warm)  # type: ignore[misc]
        record(f"{name} leaves: plan and {what} part", seconds, 0.02)
    rest = leave(trainer)
    assert len(rest.rounds) and rest.rounds != parts[trainer].rounds
    back = rounds_of(lambda: follow(rest, p, pace), 7, warm)
    record(f"{name} comes back: a trainer's part", back)
    anew = rounds_of(lambda: outlines[trainer].part(peers=256), 3, warm)
    record(f"{name} comes back: a trainer's part, made from nothing", anew)


def test_verify_of_a_model(record: Record, note: Record) -> None:
    """The whole plan of DeepSeek-V3, 256 + 256 ranks, proved; and the memory that it takes."""
    p = planned(*models.deepseek_v3())
    record("DeepSeek-V3, 256 + 256 ranks: verify", rounds_of(lambda: sm.verify(p), 5), 0.5)
    grown = int(
        subprocess.run(
            [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True
        ).stdout
    )
    assert grown >= 0
    note(
        "memory",
        f"`verify` of DeepSeek-V3, 256 + 256 ranks, raises the process's peak memory by "
        f"{grown / 1024:.0f} MiB.",
    )


GROWTH = """
import resource
import shardmath as sm
from tests.bench import models
p = sm.plan(*models.deepseek_v3())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sm.verify(p)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
"""KiB that the peak grows by, in a process of its own."""


def test_plan_of_400_tensors(record: Record) -> None:
    """What one rank of 64 + 64 does before it moves 400 tensors from TP4 to TP8: the plan, and its own transfers."""
    src, dst = models.tp4_to_tp8()
    seconds = rounds_of(lambda: count(sm.plan(src, dst), dst=77), 30)
    p = sm.plan(src, dst)
    assert len(p.src) == 400
    row = (
        "64 + 64 ranks, 400 tensors, TP4 -> TP8: plan, and list one rank's transfers",
        seconds,
        3e-3,
    )
    try:
        record(*row, "Megatron-Core 0.16.1, planner alone", [megatron_peer.seconds(64, 400)])
    except ImportError as missing:
        record(*row, f"Megatron-Core: {missing}"[:60])


CERTIFIED = {
    "DeepSeek-V3 PP16 EP16 -> TP32 DP8, 256 + 256 ranks": models.deepseek_v3,
    "Qwen3-235B TP4 PP8 EP16 -> TP8 DP16, 128 + 128 ranks": models.qwen3_235b,
}


@pytest.mark.parametrize("name", CERTIFIED)
@pytest.mark.parametrize("fanout", ["none", "node", "auto"])
def test_certificates(note: Record, name: str, fanout: Any) -> None:
    """How near the program is to the bound on nodes of 8 H100 with one 400 Gb/s NIC each."""
    prog = sm.schedule(sm.plan(*CERTIFIED[name]()), topology=sm.Topology(), fanout=fanout)
    found = sm.certify(prog)
    assert found.ratio >= 1
    witness = found.witness
    assert witness is not None
    note(
        "certificates",
        f"| {name} | `{fanout}` | {found.plan_s:.4f} s | {found.bound_s:.4f} s | {found.ratio:.4f} | "
        f"{len(witness.ranks)} ranks must {'take in' if witness.direction == 'in' else 'give out'} "
        f"{witness.nbytes / 1e9:.1f} GB | {prog.slots} |",
    )


@pytest.mark.parametrize("name", CERTIFIED)
def test_schedule_and_verify_a_program(record: Record, name: str) -> None:
    """A program's making, its certificate, its proof and one rank's rounds."""
    p = sm.plan(*CERTIFIED[name]())
    short = name.split()[0]
    record(f"{short}: schedule", rounds_of(lambda: sm.schedule(p, topology=sm.Topology()), 1))
    prog = sm.schedule(p, topology=sm.Topology())
    record(f"{short}: certify", rounds_of(lambda: sm.certify(prog), 1))
    record(f"{short}: verify the program", rounds_of(lambda: sm.verify(prog), 1))
    rank = prog.ranks[-1]
    record(f"{short}: list one receiver's rounds", rounds_of(lambda: prog.for_rank(rank), 1))


@pytest.mark.parametrize("positions", [2000, 10000])
def test_programs_of_overlapping_tables(record: Record, positions: int) -> None:
    """A program of as many lines as positions, of one element each: its making, its proof and one rank's rounds."""
    p = sm.plan(*models.overlapping_tables(positions))
    short = f"Tables of {positions:,} positions, 4 of 64 ranks each"
    record(f"{short}: schedule", rounds_of(lambda: sm.schedule(p), 3))
    prog = sm.schedule(p)
    record(f"{short}: verify the program", rounds_of(lambda: sm.verify(prog), 3))
    rank = prog.ranks[-1]
    record(f"{short}: list one rank's rounds", rounds_of(lambda: prog.for_rank(rank), 3))


SCALES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GROWING: dict[str, Callable[[int], models.Pair]] = {
    "TP4 -> TP8, 400 tensors": models.tp4_to_tp8,
    "DeepSeek-V3, 45,395 tensors": models.deepseek_v3,
    "FSDP x TP8 -> DP x TP4, 407 tensors": models.fsdp_over_tp,
}


def test_scaling(note: Record, pytestconfig: pytest.Config) -> None:
    """Plan and loads, and one receiver's list, from 64 to 16,384 ranks a side."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, workload in GROWING.items():
        for ranks in SCALES:
            src, dst = workload(ranks)
            made = min(rounds_of(lambda src=src, dst=dst: planned(src, dst), 3))  # type: ignore[misc]
            p = planned(src, dst)
            listed = min(rounds_of(lambda p=p: count(p, dst=p.dst_ranks[3]), 3))  # type: ignore[misc]
            curves.setdefault(f"{name}: plan, and count every rank's bytes", []).append(
                (ranks, made)
            )
            curves.setdefault(f"{name}: list one receiver's transfers", []).append((ranks, listed))
    for ranks in (16, 32, 64, 128):
        try:
            took = megatron_peer.seconds(ranks, 400)
        except ImportError:
            break
        curves.setdefault(
            "Megatron-Core 0.16.1 (planner alone), TP4 -> TP8, 400 tensors", []
        ).append((ranks, took))
    for name, points in curves.items():
        by = dict(points)
        note(
            "scaling",
            f"| {name} | "
            + " | ".join(f"{by[n] * 1e3:.0f}" if n in by else "" for n in SCALES)
            + " |",
        )
    page = pytestconfig.getoption("--page")
    if page:
        Path(page).parent.mkdir(exist_ok=True)
        draw(curves, Path(page).with_name("scaling.svg"))


INVERTED = "invert(0.92) hue-rotate(180deg)"


def draw(curves: dict[str, list[tuple[int, float]]], to: Path) -> None:
    """The curves as a picture: seconds by ranks of a side, both logarithmic."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    colors = dict(
        zip(
            dict.fromkeys(name.rpartition(":")[0] for name in curves),
            ("C0", "C1", "C2", "black"),
            strict=False,
        )
    )
    for name, points in curves.items():
        dashed = name.endswith("transfers")
        style = "--" if dashed else "-"
        axes.plot(
            *zip(*points, strict=True),
            style,
            marker="o",
            ms=3,
            color=colors[name.rpartition(":")[0]],
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="ranks on each side", ylabel="seconds on one core")
    ranks = sorted({n for points in curves.values() for n, _ in points})
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside upper center", ncols=2)
    figure.savefig(to, metadata={"Date": None})
    # matplotlib draws on white only: readers of dark pages see its colors inverted, hues as they were.
    plain, dark = "</style>", f"@media (prefers-color-scheme: dark) {{svg {{filter: {INVERTED}}}}}"
    to.write_text(to.read_text().replace(plain, dark + plain, 1))
