"""verl on CPUs: workers that read its ShardSpecs, and what its processes need to find the packages of this tree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))

from tests.distributed import pool

ROOT = Path(__file__).parents[2]

pool.PRELOADED += ["verl.workers.engine.spec"]

# Read by Ray as it is imported, and by all processes that it starts.
os.environ.update(
    {
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / part) for part in ("", "backends", "integrations")
        ),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
)
