"""shardmath in vLLM's weight transfer: a trainer's shards go directly into the layers of running engines.

In reading order:

- `infos`: what trainers say of themselves, and what workers are told;
- `converting`: a trainer's tensors as checkpoints have them;
- `source`: what a trainer's rank holds, and how all of its ranks do;
- `megatron`: the same of Megatron-Core's models;
- `cells`: what an update writes, as a set;
- `update`: what one rank goes through while all take new weights;
- `board`: what ranks tell each other of it;
- `link`: what ranks have of each other once they have met;
- `meeting`: trainers and workers join, say what they hold, and plan the same;
- `calls`: engines are told to do their part while this rank does its own;
- `clients`: how a trainer speaks to an engine;
- `trainer`: a rank of the trainer;
- `workers`: vLLM's end;
- `plugin`: how vLLM finds both.

Only `workers` and `plugin` import vLLM: a trainer needs none.
"""

from shardmath_vllm.clients import Client, HTTPClient, LLMClient
from shardmath_vllm.infos import TrainerInfo
from shardmath_vllm.megatron import read_megatron
from shardmath_vllm.source import Source
from shardmath_vllm.trainer import Trainer

__all__ = [
    "Client",
    "HTTPClient",
    "LLMClient",
    "Source",
    "Trainer",
    "TrainerInfo",
    "read_megatron",
]
