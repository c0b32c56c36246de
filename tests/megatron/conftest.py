"""Workers that have Megatron-Core and transformers imported before they are forked: a second instead of ten."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed import pool

# Megatron says of each module what of Apex and TransformerEngine it would have used.
os.environ["PYTHONWARNINGS"] = "ignore"

pool.PRELOADED += [
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.ssm.gated_delta_net",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.nemotron_h.modeling_nemotron_h",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3_next.modeling_qwen3_next",
]
