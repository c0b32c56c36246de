"""A policy learns from what vLLM generates with it: two trainers under FSDP2, and an engine that takes their weights
before every step. Run it where vLLM for CPUs is installed: python examples/rl_vllm.py [steps]

The policy is a tiny Llama of random weights, its reward the share of even tokens in an answer, and what it learns by
is REINFORCE with a baseline: answers better than the average are made likelier, others less so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import vllm
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, LlamaConfig

from shardmath_vllm import LLMClient, Trainer, TrainerInfo

TRAINERS, STEPS = 2, 20
ANSWERS, LENGTH = 64, 16
PROMPT, RATE = [1, 2, 3, 4], 3e-3
MEETING, ENGINE = "127.0.0.1:29610", "127.0.0.1:29611"
DTYPE = "float32"  # With "bfloat16", vLLM 0.32 sometimes fails on CPUs with AMX.

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def main(rank: int, folder: str, steps: int) -> None:
    """One of the trainers; the first has the engine."""
    torch.set_num_threads(1)
    llm = start_engine(folder) if rank == 0 else None
    dist.init_process_group("gloo", f"tcp://{MEETING}", rank=rank, world_size=TRAINERS)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    optimizer = torch.optim.Adam(policy.parameters(), RATE)
    info = TrainerInfo(ENGINE, TRAINERS, workers=1, dtype=DTYPE, rank=rank)
    trainer = Trainer.trainer_init(info, client=LLMClient(llm) if llm else [], source=policy)
    for step in range(steps):
        trainer.send_weights()
        tokens, sampled = share(generate(llm, step))
        rewards = (tokens % 2 == 0).float().mean(1)
        own = slice(rank, None, TRAINERS)
        logprobs = score(policy, tokens[own])
        better = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        loss = -(better[own, None] * logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            apart = (logprobs.detach() - sampled[own]).abs().mean()
            print(f"step {step}: reward {rewards.mean():.3f}, engine and trainer {apart:.4f} apart")
    trainer.shutdown()
    if llm:
        llm.llm_engine.engine_core.shutdown()
    dist.destroy_process_group()


def start_engine(folder: str) -> Any:
    """vLLM on the policy, which takes other weights from shardmath."""
    return vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=64,
        weight_transfer_config={"backend": "shardmath"},
    )


def generate(llm: Any, step: int) -> tuple[Tensor, Tensor] | None:
    """Answers, and the log probability of each of their tokens; None where there is no engine."""
    if llm is None:
        return None
    sampling = vllm.SamplingParams(
        n=ANSWERS, max_tokens=LENGTH, logprobs=0, seed=step, detokenize=False, ignore_eos=True
    )
    (made,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
    tokens, sampled = [], []
    for answer in made.outputs:
        tokens.append(list(answer.token_ids))
        found = zip(tokens[-1], answer.logprobs, strict=True)
        sampled.append([at[token].logprob for token, at in found])
    return torch.tensor(tokens), torch.tensor(sampled)


def share(made: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """What the first trainer has, on all of them."""
    tokens, sampled = made or (torch.empty(ANSWERS, LENGTH).long(), torch.empty(ANSWERS, LENGTH))
    dist.broadcast(tokens, 0)
    dist.broadcast(sampled, 0)
    return tokens, sampled


def score(policy: Any, tokens: Tensor) -> Tensor:
    """The policy's own log probability of each token."""
    asked = torch.tensor(PROMPT).expand(len(tokens), -1)
    logits = policy(torch.cat([asked, tokens], 1)).logits[:, len(PROMPT) - 1 : -1]
    return log_softmax(logits, -1).gather(2, tokens[..., None])[..., 0]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
        mp.spawn(main, (folder, int(sys.argv[1]) if sys.argv[1:] else STEPS), TRAINERS)
