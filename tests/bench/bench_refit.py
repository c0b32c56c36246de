"""What a refit of DeepSeek-V3's 45,395 tensors costs: from storage to a plan, and one rank's prepared call.

    python tests/bench/bench_refit.py

Processor seconds of one process, or of one rank's thread: planning at full size for 256 + 256 ranks, moving at tiny
sizes over four local processes, so that what is left is Python's share.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath.families.megatron_core import logical_shapes, megatron
from shardmath.storage import Stored, parse

ENGINE = """
model.embed_tokens.weight          = model.embed_tokens.weight : (tp n=vocab) h
lm_head.weight                     = lm_head.weight            : (tp n=vocab) h
model.norm.*                       = model.norm.*
[model.layers.{l}. = model.layers.{l}.]
input_layernorm.*                  = input_layernorm.*
post_attention_layernorm.*         = post_attention_layernorm.*
self_attn.o_proj.*                 = self_attn.o_proj.* : h (tp n)
self_attn.fused_qkv_a_proj.*       = self_attn.[q_a_proj kv_a_proj_with_mqa].* : (q_a_proj + kv_a_proj_with_mqa) h
self_attn.q_a_layernorm.*          = self_attn.q_a_layernorm.*
self_attn.kv_a_layernorm.*         = self_attn.kv_a_layernorm.*
self_attn.q_b_proj.*               = self_attn.q_b_proj.*  : (tp n) h
self_attn.kv_b_proj.*              = self_attn.kv_b_proj.* : (tp n) h
mlp.gate_up_proj.*                 = mlp.[gate up]_proj.*  : (tp (gate + up)) h
mlp.down_proj.*                    = mlp.down_proj.*       : h (tp n)
mlp.gate.*                         = mlp.gate.*
mlp.gate.e_score_correction_bias   = mlp.gate.e_score_correction_bias
mlp.shared_experts.gate_up_proj.*  = mlp.shared_experts.[gate up]_proj.* : (tp (gate + up)) h
mlp.shared_experts.down_proj.*     = mlp.shared_experts.down_proj.* : h (tp n)
mlp.experts.w13_weight             = mlp.experts.{e}.[gate up]_proj.weight : e (tp (gate + up)) h
mlp.experts.w2_weight              = mlp.experts.{e}.down_proj.weight : e h (tp n)
"""
DEEPSEEK_V3 = {
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "ffn_hidden_size": 18432,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "num_moe_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_enable_expert_bias": True,
    "moe_grouped_gemm": True,
    "num_layers_in_first_pipeline_stage": 3,
    "num_layers_in_last_pipeline_stage": 2,
}
TINY = DEEPSEEK_V3 | {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}
CALLS = 5


def engine(ranks: range, tp: int, vocab: int) -> Stored:
    mesh = sm.Mesh(dp=len(ranks) // tp, tp=tp, ranks=ranks)
    return Stored(parse(ENGINE), (mesh,), numbers={"vocab": vocab})


def plan() -> None:
    """PP16 EP16 to TP32 DP8, at full size."""
    shapes = logical_shapes(DEEPSEEK_V3, vocab=129280, dtype="bfloat16")
    best: dict[str, float] = {}
    for _ in range(3):
        sm.clear_caches()
        start = time.process_time()
        trainer = megatron(DEEPSEEK_V3, ranks=range(256), pp=16, ep=16, etp=1, vocab=129280)
        moved = sm.refit(trainer, engine(range(256, 512), 32, 129280), shapes)
        planned = time.process_time()
        sm.verify(moved.plan)
        proved = time.process_time()
        list(moved.plan.transfers(dst=300))
        listed = time.process_time()
        moved.slots(300, "engine")
        took = {
            "storage to plan": planned - start,
            "verify": proved - planned,
            "one rank's list": listed - proved,
            "one rank's slots": time.process_time() - listed,
        }
        best = {name: min(best.get(name, s), s) for name, s in took.items()}
    for name, seconds in best.items():
        print(f"{name:20} {1000 * seconds:6.0f} ms")


def move(rank: int, port: int, results: Any) -> None:
    """Two trainer ranks, two engine ranks; the thread's own seconds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    trainer = megatron(TINY, ranks=range(2), tp=2, ep=2, etp=1, vocab=64, vocab_multiple=1)
    shapes = logical_shapes(TINY, vocab=64)
    moved = sm.refit(trainer, engine(range(2, 4), 2, 64), shapes)
    refit = smt.Refit(moved, timeout=300.0)
    side = moved.trainer if rank < 2 else moved.engines["engine"]
    own = {name: torch.zeros(shape) for (_, name), shape in side.natives(rank).items()}
    refit.prepare(*((own, None) if rank < 2 else (None, own)))
    seconds = []
    for _ in range(CALLS):
        start = time.thread_time()
        refit()
        seconds.append(time.thread_time() - start)
    results.put((rank, len(own), seconds[0], min(seconds[1:])))
    dist.destroy_process_group()


def main() -> None:
    plan()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=move, args=(rank, port, results)) for rank in range(4)]
    for process in ranks:
        process.start()
    for rank, stored, first, next_ in sorted(results.get(timeout=300) for _ in ranks):
        print(
            f"rank {rank}: 45,395 local views of {stored} tensors: "
            f"first call {1000 * first:.0f} ms, next {1000 * next_:.0f} ms"
        )
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
