"""The real vLLM on the CPU: one process that stands in for every rank, and workers that are ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed import pool

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }
)

pool.PRELOADED += [
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "transformers.models.llama.modeling_llama",
]
