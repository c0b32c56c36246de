"""One rank of a program of docs/trl.md, as it stands there, and what is seen of it: watched.py OUT PROGRAM ARGUMENTS...

OUT gets a file per rank: what each sync and a gather of the same weights took, and what came of the training.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shardmath_trl.generation import ShardGeneration
from tests.trl import cpu_fsdp  # noqa: F401

PROMPTS = [[4 + i, 5 + i, 6 + i] for i in range(0, 40, 10)]
LENGTH = 8
syncs: list[dict[str, float]] = []


def watch_syncs() -> None:
    """Have each sync measured, beside a gather of the same weights, as TRL does it on all ranks."""
    sync = ShardGeneration.sync_weights

    def measured(generation: Any) -> None:
        start = time.perf_counter()
        sync(generation)
        sent = time.perf_counter()
        own = whole = 0
        for parameter in generation.model.parameters():
            is_sharded = hasattr(parameter, "full_tensor")
            own += (parameter.to_local() if is_sharded else parameter).nbytes
            whole += (parameter.full_tensor() if is_sharded else parameter).nbytes
        gathered = time.perf_counter()
        moves = [refit.last for refit in generation._trainer.link.refits]
        syncs.append(
            {
                "sent": sum(move.sent.nbytes for move in moves),
                "seconds": sent - start,
                "gathered": whole - own,
                "gather_seconds": gathered - sent,
                "whole": whole,
            }
        )

    ShardGeneration.sync_weights = measured


def generate(trainer: Any) -> list[list[int]]:
    """The policy's greedy tokens. All ranks take part."""
    model = trainer.model_wrapped.eval()
    tokens = torch.tensor(PROMPTS)
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = model(input_ids=tokens).logits[:, -1:]
            tokens = torch.cat([tokens, logits.argmax(-1)], 1)
    return tokens[:, len(PROMPTS[0]) :].tolist()


def ask(trainer: Any) -> list[list[int]]:
    """The server's greedy tokens."""
    client = trainer.vllm_generation.vllm_client
    answer = client.generate(
        PROMPTS, temperature=0.0, max_tokens=LENGTH, generation_kwargs={"ignore_eos": True}
    )
    tokens: list[list[int]] = answer["completion_ids"]
    return tokens


def main(out: str, program: str, *words: str) -> None:
    watch_syncs()
    sys.argv = [program, *words]
    trainer = runpy.run_path(program, run_name="__main__")["trainer"]
    accelerator = trainer.accelerator
    log = trainer.state.log_history
    seen = {
        "kind": accelerator.distributed_type.value,
        "parameters": sorted(
            {type(p).__name__ for p in trainer.vllm_generation.model.parameters()}
        ),
        "syncs": syncs,
        "rewards": [line["reward"] for line in log if "reward" in line],
        "gaps": [line[GAP] for line in log if GAP in line],
        "policy": generate(trainer),
        "server": ask(trainer) if accelerator.is_main_process else None,
    }
    Path(out, f"rank{accelerator.process_index}.json").write_text(json.dumps(seen))


GAP = "sampling/sampling_logp_difference/max"
"""TRL's name of the largest difference between the server's log probability of a token and the policy's."""

if __name__ == "__main__":
    main(*sys.argv[1:])
