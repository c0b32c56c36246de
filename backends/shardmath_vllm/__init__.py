"""shardmath in vLLM's weight transfer: a trainer's shards go directly into the layers of running engines.

In reading order:

- `infos`: the arguments of a trainer's ranks, and the messages to workers;
- `converting`: a trainer's tensors as checkpoints have them;
- `source`: the tensors of a trainer's rank, and how all of its ranks store them;
- `megatron`: such a source, read from Megatron-Core's models;
- `cells`: the elements that an update writes, as a set;
- `update`: the states of one rank while all take new weights;
- `board`: messages between ranks about an update, in a store;
- `link`: the group, plan and refits of ranks that are connected;
- `meeting`: trainers and workers connect, exchange descriptions, and plan the same;
- `calls`: calls to engines, while this rank does its own part;
- `clients`: a trainer's connections to engines;
- `trainer`: a rank of the trainer;
- `workers`: vLLM's end;
- `plugin`: registration of both with vLLM.

Only `workers` and `plugin` import vLLM: a trainer needs none.
"""

from shardmath_vllm.clients import Client, HTTPClient, LLMClient
from shardmath_vllm.infos import TrainerInfo
from shardmath_vllm.link import NotJoinedError
from shardmath_vllm.megatron import read_megatron
from shardmath_vllm.source import Source
from shardmath_vllm.trainer import Trainer

__all__ = [
    "Client",
    "HTTPClient",
    "LLMClient",
    "NotJoinedError",
    "Source",
    "Trainer",
    "TrainerInfo",
    "read_megatron",
]
