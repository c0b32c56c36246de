"""shardmath in verl: every actor's rank sends its own shards into running vLLM servers.

In reading order:

- `specs`: verl's ShardSpecs as layouts, and back;
- `engine`: the checkpoint engine "shardmath", registered on import.

Both were tested with verl 0.9.1 only.
"""

from shardmath_verl.engine import ShardCheckpointEngine
from shardmath_verl.specs import from_shard_spec, to_shard_spec

__all__ = ["ShardCheckpointEngine", "from_shard_spec", "to_shard_spec"]
