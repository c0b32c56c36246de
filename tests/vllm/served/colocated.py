"""A trainer's rank with a worker of vLLM in its process: torchrun colocated.py CHECKPOINT ADDRESS KIND FOLDER

vLLM's executor `external_launcher` makes an LLM in each process of torchrun, and each has one worker of the engine. So
a client has to call the LLM of every process. KIND is "every" for such a client, or "first" for LLMClient.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
import torch.distributed as dist
import vllm
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from shardmath_vllm import LLMClient, Trainer, TrainerInfo

PROMPT, LENGTH = [1, 5, 6, 7], 8
TIMEOUT_S = 60.0


class EveryClient:
    """A client of the LLMs of all processes, which rank 0 calls. Make it on all ranks: the others answer."""

    def __init__(self, llm: Any, rank: int, size: int, folder: str) -> None:
        self.own = LLMClient(llm)
        self.others = [f"{folder}/{other}" for other in range(1, size)]
        if rank:
            self.listener = Listener(f"{folder}/{rank}")
            threading.Thread(target=self.answer, daemon=True).start()

    def answer(self) -> None:
        """Call this process's LLM as rank 0 calls its own."""
        while True:
            with self.listener.accept() as channel:
                method, args = channel.recv()
                try:
                    getattr(self.own, method)(*args)
                    channel.send("")
                except Exception as error:
                    channel.send(f"{type(error).__name__}: {error}")

    def ask(self, method: str, *args: Any) -> None:
        channels = [Client(place) for place in self.others]
        for channel in channels:
            channel.send((method, args))
        getattr(self.own, method)(*args)
        for channel in channels:
            if fault := channel.recv():
                raise RuntimeError(fault)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.ask("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask("finish_weight_update", weight_version)


def main(checkpoint: str, address: str, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    llm = vllm.LLM(
        checkpoint,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        weight_transfer_config={"backend": "shardmath"},
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    client = EveryClient(llm, rank, size, folder) if kind == "every" else LLMClient(llm)
    dist.barrier()
    info = TrainerInfo(address, size, workers=size, rank=rank, timeout=TIMEOUT_S / 4)
    trainer = Trainer.trainer_init(info, client=client, source=model)
    for _ in range(3):
        tokens = torch.arange(3, 35).reshape(2, 16)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = generate(llm)
        trainer.send_weights()
        after = generate(llm)
        assert after != before
        assert after == compute(model)
    print(f"rank {rank}: three updates")


def generate(llm: Any) -> list[int]:
    """The engine's greedy tokens. All ranks call."""
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=LENGTH, detokenize=False, ignore_eos=True
    )
    (answer,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


def compute(model: Any) -> list[int]:
    """The policy's greedy tokens. All ranks call."""
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    model.reshard()
    found: list[int] = tokens[0, len(PROMPT) :].tolist()
    return found


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
