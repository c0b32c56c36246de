"""One rank of an AsyncGRPOTrainer that updates a server, and trains by hand: async_sync.py OUT CHECKPOINT URL

TRL's own loop needs GPUs: to construct the trainer, which asks torch.cuda for the device's name, and for attention.
"""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer

from shardmath_trl.asynchronous import ShardAsyncGRPOTrainer
from tests.trl import cpu_fsdp  # noqa: F401
from tests.trl.watched import LENGTH, PROMPTS
from tests.vllm.served.servers import ask

SYNCS = 3
MOST_STEPS, LEARNED = 300, 0.01


def construct(checkpoint: str, url: str, out: str, **more: Any) -> Any:
    """A trainer whose rollouts never come."""
    config = AsyncGRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        dtype="float32",
        vllm_server_base_url=url,
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        report_to=[],
    )
    rollouts = SimpleNamespace(rollout_buffer=queue.Queue(), update_model_version=versions.append)
    with mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=None):
        return ShardAsyncGRPOTrainer(
            model=checkpoint,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w4"] * 8}),
            rollout_worker=rollouts,
            **more,
        )


versions: list[int] = []


def answer(sync: int) -> torch.Tensor:
    """What the policy learns to answer before a sync, so well that bfloat16 has the same likeliest tokens."""
    last = torch.tensor(PROMPTS)[:, -1:]
    return 4 + (last + (sync + 1) * torch.arange(1, LENGTH + 1)) % 60


def generate(model: Any) -> list[list[int]]:
    """The policy's greedy tokens. All ranks take part."""
    tokens = torch.tensor(PROMPTS)
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = model(input_ids=tokens).logits[:, -1:]
            tokens = torch.cat([tokens, logits.argmax(-1)], 1)
    found: list[list[int]] = tokens[:, len(PROMPTS[0]) :].tolist()
    return found


def request(url: str) -> list[list[int]]:
    """The server's greedy tokens."""
    model = ask(f"{url}/v1/models")["data"][0]["id"]
    said = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choices = ask(f"{url}/v1/completions", {"model": model, "prompt": PROMPTS, **said})["choices"]
    return [choice["token_ids"] for choice in choices]


def main(out: str, checkpoint: str, url: str) -> None:
    torch.set_num_threads(1)
    trainer = construct(checkpoint, url, out)
    accelerator = trainer.accelerator
    is_first = accelerator.is_main_process
    # As TRL's loop does.
    optimizer = torch.optim.Adam(trainer.model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(trainer.model, optimizer)
    trainer.model = trainer.model_wrapped = model
    model.set_attn_implementation("eager")
    parameters = sorted({type(p).__name__ for p in model.parameters()})
    if is_first:
        trainer.weight_transfer.init_weight_transfer()
    seen = []
    for sync in range(SYNCS):
        ids = torch.cat([torch.tensor(PROMPTS), answer(sync)], 1)
        for _ in range(MOST_STEPS):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if loss < LEARNED:
                break
        trainer._sync_weight()
        policy = generate(model)
        seen.append({"policy": policy, "server": request(url) if is_first else None})
    result = {
        "parameters": parameters,
        "versions": versions,
        "syncs": seen,
    }
    Path(out, f"rank{accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
