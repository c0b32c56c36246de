"""`python -m shardmath refit`: a trainer's weights to an inference engine's ranks, on this machine, on real files.

    python -m shardmath refit MODEL_DIR --src "dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h)" --dst "tp=4"
    python -m shardmath refit --demo

1. `--src` and `--dst` are sides in the notation of `shardmath.rules`. Ranks are numbered source first, then
   destination, unless the text numbers them; the two may share ranks.
2. Errors in the request (files, rules, plan) are found here, before a process starts.
3. Then a process per rank (`processes`) runs `refit_rank`.
4. Exit status 0: every byte at every destination equals the file. Others: see `command_line`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import shardmath as sm
from shardmath.base.text import plural, read_bytes, show_bytes
from shardmath.display.arguments import add_json, print_json
from shardmath.models.systems.rules import Side, parse
from shardmath_torch.checkpoints.safetensors.slices import fits
from shardmath_torch.checkpoints.safetensors.weights import open_weights
from shardmath_torch.commands.command_line import make_parser, read_count, run_command
from shardmath_torch.commands.processes import run
from shardmath_torch.commands.refit_bounds import Bounds, find_bounds
from shardmath_torch.commands.refit_out import check_out, finish, reserved, undo
from shardmath_torch.commands.refit_rank import Job, Outcome, refit_rank
from shardmath_torch.commands.refit_report import (
    ErrorScreen,
    Screen,
    choose_screen,
    layouts_table,
    times_table,
    traffic_table,
)

__all__ = ["DEMO_DST", "DEMO_SRC", "command"]

DEMO_SRC = "dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h); vocab (tp dp n) h; * (dp n) ..."
"""FSDP over tensor parallel: each tensor-parallel shard divided again along dimension 0, in strides."""
DEMO_DST = "tp=4: column (tp n) ...; row n (tp h); vocab (tp n) h"
"""Tensor parallel alone."""

MOST_RANKS = 64
"""The most ranks; more processes on one machine are a typing mistake."""
MOST_SECONDS = 10.0**6
"""The longest timeout, eleven days: torch's timeouts are timedeltas, which end before 10^14 seconds."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished refit (move of a model's weights from source to destination ranks): its settings, its plan, lower
    bounds on the bytes that ranks must send and receive, and the measurements of all ranks."""

    job: Job
    plan: sm.Plan
    bound: Bounds
    outcomes: list[Outcome]


def command(argv: Sequence[str]) -> int:
    """Move a model's weights from source to destination ranks, as `python -m shardmath refit` with arguments `argv`;
    return the exit status."""
    parser = _make_parser()
    options = parser.parse_args(argv)
    if options.json and options.demo:
        parser.error("--json does not apply to --demo; give MODEL_DIR, --src and --dst")
    if options.demo:
        return run_command("refit", lambda: _show_demo(options, choose_screen()))
    if not (options.model and options.src and options.dst):
        parser.error("give MODEL_DIR, --src and --dst, or --demo")
    model = Path(options.model)
    if options.json:
        return run_command("refit", lambda: _print_facts(options, model), as_json=True)
    return run_command("refit", lambda: _refit(options, model, choose_screen(), options.out))


def _make_parser() -> argparse.ArgumentParser:
    """The parser of `refit`'s arguments."""
    parser = make_parser("refit", "Move a model's weights between two parallel layouts.")
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_DIR", help="folder or file with safetensors weights")
    usual = (
        "without rules, tp divides by kind of layer, dp divides dimension 0 as FSDP does, "
        "and replica replicates"
    )
    add("--src", help=f'source mesh and rules, such as "{DEMO_SRC}"; {usual}')
    add("--dst", help='destination mesh and rules, such as "tp=4"; ranks follow the source\'s')
    add("--demo", action="store_true", help="move all-MiniLM-L6-v2 and compare sentence embeddings")
    add("--steps", type=read_count, default=3, help="moves to time (3)")
    add("--timeout", type=_read_seconds, default=60.0, help="seconds to wait for a rank (60)")
    add(
        "--max-inflight",
        type=_read_bytes,
        default=1 << 30,
        help="staging bytes per rank, such as 64MB (1GiB)",
    )
    add(
        "--out",
        type=Path,
        help="folder to write rank<r>.safetensors to, for each destination rank; "
        "removes those of an earlier refit",
    )
    add_json(parser)
    return parser


def _print_facts(options: argparse.Namespace, model: Path) -> None:
    """Move the model by the options, with progress on stderr, and print what was measured as JSON: bytes, seconds."""
    result = _refit(options, model, ErrorScreen(), options.out)
    plan, bound = result.plan, result.bound
    sent, received = plan.sent_bytes(), plan.received_bytes()
    ranks = []
    for rank, outcome in enumerate(result.outcomes):
        ranks.append(
            {
                "rank": rank,
                "sent": sent.get(rank, 0),
                "sent_bound": bound.sent.get(rank, 0),
                "received": received.get(rank, 0),
                "received_bound": bound.received.get(rank, 0),
                **asdict(outcome),
            }
        )
    facts = {"model": str(model), "digest": plan.digest, "tensors": len(plan.src), "ranks": ranks}
    facts["busiest"] = {"bytes": max(sent.values()), "bound": bound.busiest}
    print_json("refit", facts)


def _read_seconds(text: str) -> float:
    """A time in seconds, above 0 and at most MOST_SECONDS."""
    is_number = re.fullmatch(r"\d+(\.\d+)?", text)
    if not is_number or not 0 < float(text) <= MOST_SECONDS:
        fix = f"give a number above 0, and at most {MOST_SECONDS}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds; {fix}")
    return float(text)


def _read_bytes(text: str) -> int:
    """A size such as 64MB, in bytes."""
    found = read_bytes(text)
    if not found:
        fix = "give a number of bytes above 0, or one with a unit: 64MB, 1GiB"
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; {fix}")
    return found


def _refit(options: argparse.Namespace, model: Path, show: Screen, out: Path | None) -> Result:
    """Move the model by the options, and write what arrives to `out`, if there is one."""
    job = _make_job(options, model, out)
    with reserved(out) if out else contextlib.nullcontext():
        if out:
            check_out(out, job.weights)
        return _move(job, show)


def _move(job: Job, show: Screen) -> Result:
    """Plan and prove the move, carry it out, and show what was measured."""
    shapes = job.weights.shapes
    src = job.src.layouts(shapes)
    dst = job.dst.layouts(shapes)
    for layouts in (src, dst):
        fits(job.weights, layouts)
    world = _count_ranks(job.src, job.dst)
    show.table(layouts_table(job.weights, job.src, job.dst))
    plan = _plan(src, dst, show)
    job = replace(job, digest=plan.digest)
    outcomes = _run_or_undo(job, world, plan.dst_ranks, show)
    result = Result(job, plan, find_bounds(src, dst), outcomes)
    _show_result(result, show)
    return result


def _run_or_undo(job: Job, world: int, receivers: Sequence[int], show: Screen) -> list[Outcome]:
    """Run all ranks; files of an earlier refit stay until everything has arrived."""
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


def _make_job(options: argparse.Namespace, model: Path, out: Path | None) -> Job:
    """The job for every rank. Raises ShardError for invalid sides and files."""
    src = parse(options.src)
    dst = parse(options.dst, first_rank=max(src.mesh.ranks) + 1)
    weights = open_weights(model)
    return Job(weights, src, dst, options.steps, options.timeout, options.max_inflight, out)


def _count_ranks(src: Side, dst: Side) -> int:
    """The number of ranks on both sides. Raises MeshError for gaps in the numbers, or too many ranks."""
    ranks = set(src.mesh.ranks) | set(dst.mesh.ranks)
    idle = set(range(max(ranks) + 1)) - ranks
    if idle:
        what = f"rank {min(idle)} is in neither mesh, {src.mesh} or {dst.mesh}"
        raise sm.MeshError(f"{what}; number ranks from 0 without gaps")
    if len(ranks) > MOST_RANKS:
        what = f"the meshes {src.mesh} and {dst.mesh} have {len(ranks)} ranks"
        raise sm.MeshError(f"{what}, above the limit of {MOST_RANKS}; give smaller meshes")
    return len(ranks)


def _plan(src: dict[str, sm.Layout], dst: dict[str, sm.Layout], show: Screen) -> sm.Plan:
    """Plan the move, prove the plan, and show how long both took."""
    start = time.perf_counter()
    plan = sm.plan(src, dst)
    planned = time.perf_counter()
    sm.verify(plan)
    proved = time.perf_counter()
    plan_ms = (planned - start) * 1e3
    proof_ms = (proved - planned) * 1e3
    transfers = plural(sum(1 for _ in plan.transfers()), "transfer")
    tensors = plural(src, "tensor")
    what = f"plan {plan.digest[:12]}: {transfers} of {tensors}"
    show.line(f"{what}, planned in {plan_ms:.1f} ms, proved in {proof_ms:.1f} ms")
    return plan


def _show_result(result: Result, show: Screen) -> None:
    """Show tables of bytes and times, the busiest sender with its bound, and what was checked."""
    plan, bound, outcomes = result.plan, result.bound, result.outcomes
    sent = plan.sent_bytes()
    show.table(traffic_table(plan, bound, outcomes))
    show.line(_compare_busiest(sent, bound))
    show.table(times_table(sum(sent.values()), outcomes))
    checked = sum(outcome.checked for outcome in outcomes)
    receivers = _write_ranks(plan.dst_ranks)
    show.line(f"all {checked} bytes on ranks {receivers} equal {result.job.weights.path}")


def _compare_busiest(sent: dict[int, int], bound: Bounds) -> str:
    """The busiest sender's bytes, with the lower bound, and the ranks that force the bound."""
    busiest = max(sent.values())
    ratio = busiest / bound.busiest if bound.busiest else 1.0
    forced_by = _write_ranks(sorted(bound.forced_by))
    least = show_bytes(bound.busiest)
    why = f"only ranks {forced_by} hold some of the bytes, so one of them must send {least} or more"
    if len(bound.forced_by) == 1:
        why = f"only rank {forced_by} holds some of the bytes, so it must send {least} or more"
    return f"busiest sender {show_bytes(busiest)}, {ratio:.4f} times the lower bound: {why}"


def _write_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _show_demo(options: argparse.Namespace, show: Screen) -> None:
    """Refit the demo's model, and compare its embeddings with those by the arrived weights."""
    # Imported here, since only the demo needs transformers.
    from shardmath_torch.commands.demo import compare, find_model, read_arrived

    options.src = options.src or DEMO_SRC
    options.dst = options.dst or DEMO_DST
    model = Path(options.model) if options.model else find_model()
    show.line(f"model {model}")
    with tempfile.TemporaryDirectory(prefix="shardmath-") as folder:
        out = options.out or Path(folder)
        result = _refit(options, model, show, out)
        layouts = result.job.dst.layouts(result.job.weights.shapes)
        tensors = read_arrived(out, layouts)
    show.table(compare(model, tensors))
    show.line("the embeddings of the arrived weights equal the original model's, bit for bit")
