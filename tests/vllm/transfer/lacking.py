"""Lacking: what vLLM 0.32 leaves out on a CPU, without which some engines start and then die at their first step.

1. Stages of a pipeline but the first receive into buffers that vLLM makes as it warms up, which it does not on a CPU
   where models run eagerly.
2. The kernel for experts takes their numbers as those of a rank's own experts; where experts are dealt whole they are
   those of all, and the kernel reads past its weights.

Neither has to do with weights: an engine with this done generates what it generates on one process.
"""

from __future__ import annotations

from typing import Any

__all__ = ["complete"]


def complete(worker: Any) -> None:
    """Do it in this worker."""
    _make_buffers(worker.model_runner)
    if worker.parallel_config.enable_expert_parallel:
        _take_numbers_of_all()


def _make_buffers(runner: Any) -> None:
    """What a stage receives into."""
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _take_numbers_of_all() -> None:
    """Have the kernel told which experts are its own; others have no weight."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def apply_own(self: Any, **named: Any) -> None:
        own = named["expert_map"][named["topk_ids"].long()].to(named["topk_ids"].dtype)
        named["topk_weights"] = named["topk_weights"].where(own >= 0, 0.0)
        named["topk_ids"] = own.clamp(min=0)
        apply(self, **named)

    CPUUnquantizedExperts.apply = apply_own
