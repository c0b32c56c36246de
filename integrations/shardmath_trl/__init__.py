"""shardmath in TRL's GRPOTrainer and AsyncGRPOTrainer: every rank sends its own shards into a running vLLM server.

In reading order:

- `connecting`: the ranks of accelerate and the workers of a server;
- `generation`: TRL's generation on a server, whose weights come from all ranks;
- `trainer`: a GRPOTrainer that uses it;
- `asynchronous`: an AsyncGRPOTrainer, which TRL calls experimental. Not imported here.

TRL has no hook for how weights move. So `generation` overrides two methods of TRL's VLLMGeneration, and `trainer`
gives TRL that class while a GRPOTrainer is constructed. All were tested with TRL 1.16.0 only.
"""

from shardmath_trl.trainer import ShardGRPOTrainer

__all__ = ["ShardGRPOTrainer"]
