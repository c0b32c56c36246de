"""What it takes all ranks of Qwen3-30B-A3B to record, to say what they store, and to plan, once.

    .venv-vllm/bin/python tests/bench/engines/bench_planning.py

Four trainers under FSDP2 and an engine of tensor parallelism of 2, without data. Trainers have experts as the
checkpoint does, or stacked as transformers does. Seconds are of each rank's own processor, since all ranks share two
here; the goal is 10.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "backends"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.section import arguments, show
from tests.vllm.planning import TP, TRAINERS, plan
from tests.vllm.test_recording import describe_qwen3_30b

TITLE = "Time to connect to a vLLM of Qwen3-30B-A3B"
HEADS = [
    "the trainer stores experts",
    "tensors",
    "portions",
    "a trainer's seconds",
    "a worker's seconds",
]


def main(page: Path | None = None) -> None:
    """Plans both, and shows the table."""
    rows = [
        list_row("separately, as the checkpoint does", False),
        list_row("stacked, as transformers does", True),
    ]
    about = (
        f"{TRAINERS} trainer ranks under FSDP2 connect to vLLM 0.32.0, which has tensor parallelism of {TP}. The two "
        "sides record what the loaders do, exchange descriptions, and make a plan. They move no data. Seconds are the "
        "processor time of the rank that needs the most. The goal is 10 seconds. A portion is a group of tensors that "
        "one move sends, such as a layer."
    )
    show(page, TITLE, about, HEADS, rows)


def list_row(what: str, stacked: bool) -> list[str]:
    """What it takes."""
    config, shapes = describe_qwen3_30b()
    with tempfile.TemporaryDirectory() as folder:
        found = plan(config, shapes, stacked, Path(folder))
    trainers, workers = found[:TRAINERS], found[TRAINERS:]
    return [
        what,
        f"{len(shapes):,}",
        str(found[0].portions),
        f"{max(one.seconds for one in trainers):.1f}",
        f"{max(one.seconds for one in workers):.1f}",
    ]


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    main(given.page)
