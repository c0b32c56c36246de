"""A checkpoint that Megatron-Core saved: `python tools/megatron_checkpoint.py OUT`, with .venv-megatron.

Four processes, tensor parallelism 2 over data parallelism 2, take a step of a gated MLP with Megatron's distributed
optimizer, and `dist_checkpointing.save` writes `fully_reshardable`, the default of Megatron-LM, and `dp_reshardable`.
OUT is a tar.xz file with a folder of each. Before the step the weights count from 1 in Megatron's own global shapes.
Gradients are the weights, so exp_avg is a tenth of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

RANKS, TP, HIDDEN = 4, 2, 4
FORMATS = ("fully_reshardable", "dp_reshardable")


class OnCPU(TorchFunctionMode):
    """What asks for a GPU by name gets the CPU, and tensors say that they are on a GPU if their type is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {**(kwargs or {})}
        if "device" in named:
            named["device"] = "cpu"
        out = func(*args, **named)
        return out.replace("torch.", "torch.cuda.") if isinstance(out, str) else out


def build() -> tuple[Any, Any]:
    """The module in Megatron's data parallelism, and its optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN, "num_attention_heads": 2}
    config = TransformerConfig(
        num_layers=1,
        tensor_model_parallel_size=TP,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        **sizes,
    )
    linears = MLPSubmodules(
        linear_fc1=tensor_parallel.ColumnParallelLinear,
        linear_fc2=tensor_parallel.RowParallelLinear,
    )
    module = MLP(config, linears).bfloat16()
    number(module)
    buckets = DistributedDataParallelConfig(use_distributed_optimizer=True)
    parallel = DistributedDataParallel(config, buckets, module)
    options = OptimizerConfig(
        lr=0.01, bf16=True, use_distributed_optimizer=True, clip_grad=0.0, weight_decay=0.0
    )
    return parallel, get_megatron_optimizer(options, [parallel])


def describe(kind: str) -> dict[str, Any]:
    """What Megatron wants to know of a checkpoint."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"distrib_optim_sharding_type": kind, "dp_cp_group": group}


def number(module: Any) -> None:
    """Numbers the elements of each parameter from 1, in the order of its global shape."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    state = module.sharded_state_dict(metadata=describe(FORMATS[0]))
    apply_factories(state)
    for part in nested_values(state):
        if not isinstance(getattr(part, "data", None), torch.Tensor):
            continue
        whole = torch.arange(1.0, torch.Size(part.global_shape).numel() + 1)
        here = whole.view(part.global_shape)[part.global_slice()]
        part.data.data.copy_(here)


def save(rank: int, port: int, folder: str) -> None:
    """What each process does."""
    from megatron.core import dist_checkpointing

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **named: self  # type: ignore[assignment]
    OnCPU().__enter__()
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    module, optimizer = build()
    for parameter in module.parameters():
        parameter.main_grad.copy_(parameter.data)
    optimizer.step()
    for kind in FORMATS:
        metadata = describe(kind)
        weights = module.module.sharded_state_dict(metadata=metadata)
        state = optimizer.sharded_state_dict(weights, metadata=metadata)
        path = Path(folder, kind)
        path.mkdir(exist_ok=True)
        dist_checkpointing.save({"model": weights, "optimizer": state, "iteration": 1}, str(path))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save, args=(29571, folder), nprocs=RANKS)
        with tarfile.open(out, "w:xz") as archive:
            for kind in FORMATS:
                archive.add(Path(folder, kind), kind)
    print(f"{out}: {out.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
