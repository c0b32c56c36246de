"""shardmath in TRL's GRPOTrainer: every rank sends its own shards into a running vLLM server.

In reading order:

- `generation`: TRL's generation on a server, whose weights come from all ranks;
- `trainer`: a GRPOTrainer that uses it.

TRL has no hook for how weights move. So `generation` overrides two methods of TRL's VLLMGeneration, and `trainer`
gives TRL that class while a GRPOTrainer is constructed. Both were tested with TRL 1.16.0 only.
"""

from shardmath_trl.trainer import ShardGRPOTrainer

__all__ = ["ShardGRPOTrainer"]
