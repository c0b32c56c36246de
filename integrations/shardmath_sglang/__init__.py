"""shardmath with SGLang: a trainer's shards straight into the layers of running engines.

In reading order:

- `client`: a trainer's connection to a server;
- `worker`: an engine's rank, which joins a trainer and takes its weights;
- `plugin`: the hook that calls `worker` on SGLang's ranks.
"""

from shardmath_sglang.client import SGLangClient

__all__ = ["SGLangClient"]
