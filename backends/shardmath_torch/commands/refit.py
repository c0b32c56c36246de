"""`python -m shardmath refit`: a trainer's weights to an inference engine's ranks, on this machine, on real files.

    python -m shardmath refit MODEL_DIR --src "dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h)" --dst "tp=4"
    python -m shardmath refit --demo

1. `--src` and `--dst` are sides in the notation of `shardmath.families.rules`. Ranks are numbered source first, then
   destination, where the text does not say otherwise; the two may share ranks.
2. Everything that can be wrong with the request is found here, before a process starts: the files, the rules, the plan.
3. Then a process a rank (`processes`), and what each does is `refit_rank`.
4. Exit status 0: every byte at every destination equals the file. 1: an error, said once on stderr. 2: usage.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import shardmath as sm
from shardmath.base.given import plural
from shardmath.families.rules import Side, parse
from shardmath_torch.commands.processes import run
from shardmath_torch.commands.refit_bounds import Bounds, bounds
from shardmath_torch.commands.refit_out import check_out, finish, reserved, undo
from shardmath_torch.commands.refit_rank import Job, Outcome, refit_rank
from shardmath_torch.commands.refit_report import (
    Screen,
    layouts_table,
    screen,
    size,
    times_table,
    traffic_table,
)
from shardmath_torch.safetensors.slices import fits
from shardmath_torch.safetensors.weights import open_weights

__all__ = ["DEMO_DST", "DEMO_SRC", "command"]

DEMO_SRC = "dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h); vocab (tp dp n) h; * (dp n) ..."
"""FSDP over tensor parallel: each tensor-parallel shard divided again along dimension 0, in strides."""
DEMO_DST = "tp=4: column (tp n) ...; row n (tp h); vocab (tp n) h"
"""Tensor parallel alone."""

MOST_RANKS = 64
"""More processes than that on one machine are a typing mistake."""
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True, slots=True)
class Result:
    """What was moved and measured."""

    job: Job
    plan: sm.Plan
    bound: Bounds
    outcomes: list[Outcome]


def command(argv: Sequence[str]) -> int:
    """Run `refit` with these arguments; the exit status."""
    options = _parser().parse_args(argv)
    if not options.demo and not (options.model and options.src and options.dst):
        _parser().error("give MODEL_DIR, --src and --dst, or --demo")
    try:
        _demo(options, screen()) if options.demo else _refit(
            options, Path(options.model), screen(), options.out
        )
    except sm.ShardError as error:
        print(f"refit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("refit: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardmath refit",
        description="Move a model's weights between two parallel layouts.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_DIR", help="folder or file with safetensors weights")
    usual = "a mesh alone: tp divides by kind, dp dimension 0 as FSDP does, replica replicates"
    add("--src", help=f'source mesh and rules, such as "{DEMO_SRC}"; {usual}')
    add("--dst", help='destination mesh and rules, such as "tp=4"; ranks follow the source\'s')
    add("--demo", action="store_true", help="move all-MiniLM-L6-v2 and compare sentence embeddings")
    add("--steps", type=_count, default=3, help="moves to time (3)")
    add("--timeout", type=_seconds, default=60.0, help="seconds to wait for a rank (60)")
    add(
        "--max-inflight",
        type=_bytes,
        default=1 << 30,
        help="staging bytes a rank, such as 64MB (1GiB)",
    )
    add(
        "--out",
        type=Path,
        help="folder for what arrives: rank<r>.safetensors of each destination rank, no others",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return float(text)


def _bytes(text: str) -> int:
    """A size such as 64MB, in bytes."""
    found = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text)
    number = int(found[1]) if found else 0
    unit = UNITS.get(found[2].upper()) if found else None
    if unit is None or not number:
        fix = "write bytes, or a unit: 64MB, 1GiB"
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; {fix}")
    return number * unit


def _refit(options: argparse.Namespace, model: Path, show: Screen, out: Path | None) -> Result:
    job = _job(options, model, out)
    with reserved(out) if out else contextlib.nullcontext():
        if out:
            check_out(out, job.weights)
        return _moved(job, show)


def _moved(job: Job, show: Screen) -> Result:
    src, dst = (side.layouts(job.weights.shapes) for side in (job.src, job.dst))
    for side in (src, dst):
        fits(job.weights, side)
    world = _world(job.src, job.dst)
    show.table(layouts_table(job.weights, job.src, job.dst))
    plan = _plan(src, dst, show)
    job = replace(job, digest=plan.digest)
    outcomes = _run(job, world, plan.dst_ranks, show)
    result = Result(job, plan, bounds(src, dst), outcomes)
    _report(result, show)
    return result


def _run(job: Job, world: int, receivers: Sequence[int], show: Screen) -> list[Outcome]:
    """The refit itself; what was there before stays until all has arrived."""
    try:
        with show.progress() as watch:
            outcomes = run(refit_rank, job, world, timeout=job.timeout, watch=watch)
    except BaseException:
        if job.out:
            undo(job.out, receivers)
        raise
    if job.out:
        finish(job.out, receivers)
    return outcomes


def _job(options: argparse.Namespace, model: Path, out: Path | None) -> Job:
    src = parse(options.src)
    dst = parse(options.dst, first_rank=max(src.mesh.ranks) + 1)
    weights = open_weights(model)
    return Job(weights, src, dst, options.steps, options.timeout, options.max_inflight, out)


def _world(src: Side, dst: Side) -> int:
    ranks = set(src.mesh.ranks) | set(dst.mesh.ranks)
    idle = set(range(max(ranks) + 1)) - ranks
    if idle:
        what = f"rank {min(idle)} is on neither side ({src.mesh}, {dst.mesh})"
        raise sm.MeshError(f"{what}; number ranks from 0 without gaps")
    if len(ranks) > MOST_RANKS:
        what = f"{len(ranks)} ranks ({src.mesh}, {dst.mesh}), at most {MOST_RANKS} here"
        raise sm.MeshError(f"{what}; give smaller meshes")
    return len(ranks)


def _plan(src: dict[str, sm.Layout], dst: dict[str, sm.Layout], show: Screen) -> sm.Plan:
    """The plan, proved. Says how long both took."""
    start = time.perf_counter()
    plan = sm.plan(src, dst)
    planned = time.perf_counter()
    sm.verify(plan)
    proved = time.perf_counter()
    count = sum(1 for _ in plan.transfers())
    plan_ms = (planned - start) * 1e3
    proof_ms = (proved - planned) * 1e3
    what = f"plan {plan.digest[:12]}: {plural(count, 'transfer')} of {plural(src, 'tensor')}"
    show.line(f"{what}, planned in {plan_ms:.1f} ms, proved in {proof_ms:.1f} ms")
    return plan


def _report(result: Result, show: Screen) -> None:
    """Tables of bytes and times, the busiest sender beside its bound, and what was checked."""
    plan, bound, outcomes = result.plan, result.bound, result.outcomes
    sent = plan.sent_bytes()
    show.table(traffic_table(plan, bound, outcomes))
    show.line(_compare_busiest(sent, bound))
    show.table(times_table(sum(sent.values()), outcomes))
    checked = sum(outcome.checked for outcome in outcomes)
    receivers = _write_ranks(plan.dst_ranks)
    show.line(f"all {checked} bytes on ranks {receivers} equal {result.job.weights.path}")


def _compare_busiest(sent: dict[int, int], bound: Bounds) -> str:
    """The busiest sender beside its bound, and who forces that."""
    ours = max(sent.values())
    ratio = ours / bound.busiest if bound.busiest else 1.0
    forced_by = _write_ranks(sorted(bound.forced_by))
    why = f"ranks {forced_by} alone hold what forces it"
    if len(bound.forced_by) == 1:
        why = f"rank {forced_by} alone holds what forces it"
    loads = f"busiest sender {size(ours)}, lower bound {size(bound.busiest)}"
    return f"{loads} (ratio {ratio:.4f}): {why}"


def _write_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _demo(options: argparse.Namespace, show: Screen) -> None:
    from shardmath_torch.commands.demo import arrived, compare, find_model

    options.src, options.dst = options.src or DEMO_SRC, options.dst or DEMO_DST
    model = Path(options.model) if options.model else find_model()
    show.line(f"model {model}")
    with tempfile.TemporaryDirectory(prefix="shardmath-") as folder:
        out = options.out or Path(folder)
        result = _refit(options, model, show, out)
        tensors = arrived(out, result.job.dst.layouts(result.job.weights.shapes))
    show.table(compare(model, tensors))
    show.line("the embeddings of the arrived weights equal the original model's, bit for bit")
