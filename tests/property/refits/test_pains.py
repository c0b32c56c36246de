"""What went wrong in other systems that move weights: the wrong result, computed plainly, and ours.

Docstrings cite where it was seen. The table in docs/refit.md has most of these, and what is no planner's. What goes
over the wire is in `test_pains_on_the_wire`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import shardmath as sm
from shardmath.base.dtypes import ITEMSIZE
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.vllm import vllm
from shardmath.storage import Stored, parse
from tests.refits.carrying import LAYER, SERVED, TRAINED, carry, divided, equal, number, whole

TRAINER = "decoder.layers.0."


# What lies where


@pytest.mark.parametrize("fused", [False, True])
def test_gate_and_up_joined_and_then_cut(fused: bool) -> None:
    """maxtext 4925, vLLM's w13: the first rank of [gate; up] cut in two has gate alone."""
    shapes = dict.fromkeys(("gate", "up"), ((8, 3), "int64"))
    gate, up = number(shapes).values()
    parts = [np.concatenate([gate[rows], up[rows]]) for rows in (slice(4), slice(4, 8))]
    wrong = np.split(np.concatenate([gate, up]), 2)
    assert np.array_equal(wrong[0], gate)
    engine = divided("gate_up = [gate up] : (tp (gate + up)) h", range(4, 6))
    if fused:
        trainer = divided("fused = [gate up] : (gate + up | tp n) h", range(2))
        stored = {rank: {"fused": wrong[rank]} for rank in range(2)}
    else:
        trainer, stored = whole("gate = gate\nup = up"), {0: {"gate": gate, "up": up}}
    found = carry(trainer, engine, stored, shapes)
    assert equal(found, {4 + i: {"gate_up": part} for i, part in enumerate(parts)})
    assert not equal(found, {4 + i: {"gate_up": part} for i, part in enumerate(wrong)})


def test_more_ranks_than_key_heads() -> None:
    """ms-swift 8219, torchtitan 2574, modelexpress 650: equal rows of two key heads are halves of heads."""
    shapes = {
        f"{LAYER}self_attn.{x}_proj.weight": ((n, 4), "int64")
        for x, n in (("q", 16), ("k", 4), ("v", 4))
    }
    q, k, v = number(shapes).values()
    groups = [
        np.concatenate([q[8 * g : 8 * g + 8], k[2 * g : 2 * g + 2], v[2 * g : 2 * g + 2]])
        for g in (0, 1)
    ]
    raw = np.split(np.concatenate(groups), 8)
    native = f"{TRAINER}self_attention.linear_qkv.weight"
    stored = {rank: {native: rows} for rank, rows in enumerate(raw)}
    trainer = megatron(TRAINED, ranks=range(8), tp=8, vocab=100)
    found = carry(trainer, vllm(SERVED, ranks=range(8, 12), tp=4), stored, shapes)
    assert [len(rows) for rows in np.split(k, 4)] == [1, 1, 1, 1]  # of heads of two rows
    wanted = {}
    for r in range(4):
        head = slice(2 * (r // 2), 2 * (r // 2) + 2)
        fused = np.concatenate([q[4 * r : 4 * r + 4], k[head], v[head]])
        wanted[8 + r] = {f"{LAYER}self_attn.qkv_proj.weight": fused}
    assert equal(found, wanted)
    # Nor is a trainer's rank whole heads of its own: the first three of eight have queries alone.
    assert all(np.isin(raw[rank], q).all() for rank in range(2)) and np.isin(raw[3], v).any()


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_experts_that_are_numbered_from_0_on_each_rank(placement: str) -> None:
    """vime 388: experts 0 and 32 identical."""
    shapes = {f"{LAYER}mlp.experts.{e}.down_proj.weight": ((4, 4), "int64") for e in range(64)}
    arrays = list(number(shapes).values())
    local = f"{TRAINER}mlp.experts.linear_fc2.weight"
    stored = {r: {f"{local}{n}": arrays[32 * r + n] for n in range(32)} for r in range(2)}
    by_name = {name: array for own in stored.values() for name, array in own.items()}
    wrong = [by_name[f"{local}{e % 32}"] for e in range(64)]
    assert wrong[0] is wrong[32]
    trainer = megatron(TRAINED, ranks=range(2), ep=2, vocab=100)
    served = {**SERVED, "model_type": "deepseek_v3", "n_group": 2}
    engine = vllm(served, ranks=range(2, 6), tp=4, ep=True, placement=placement)
    found = carry(trainer, engine, stored, shapes)
    own = [
        list(range(r, 64, 4)) if placement == "round_robin" else list(range(16 * r, 16 * r + 16))
        for r in range(4)
    ]
    native = f"{LAYER}mlp.experts.routed_experts.w2_weight"
    assert equal(found, {2 + r: {native: np.stack([arrays[e] for e in own[r]])} for r in range(4)})


def test_experts_that_are_cut_along_two_axes() -> None:
    """nccl.m2n: at most one axis shards, so that experts dealt over ep and cut over etp have no description."""
    shapes = {f"experts.{e}.w": ((4, 6), "int64") for e in range(4)}
    arrays = list(number(shapes).values())
    mesh = sm.Mesh(ep=2, etp=2)
    trainer = Stored(parse("w{ep e} = experts.{e}.w : (etp n) h"), (mesh,))
    stored = {}
    for rank in range(4):
        ep, etp = divmod(rank, 2)
        rows = slice(2 * etp, 2 * etp + 2)
        stored[rank] = {f"w{n}": arrays[2 * ep + n][rows] for n in range(2)}
    one_axis = np.stack([stored[rank]["w0"] for rank in (0, 2)])
    assert one_axis.shape != (2, 4, 6)
    found = carry(trainer, divided("w = experts.{e}.w : e h (tp n)", range(4, 6)), stored, shapes)
    assert equal(found, {4 + i: {"w": np.stack(arrays)[:, :, 3 * i : 3 * i + 3]} for i in range(2)})


def test_experts_that_are_one_tensor_of_three_dimensions() -> None:
    """NeMo-RL 3403: a loader of single experts fails in the middle of a broadcast, and the trainer waits for ever."""
    shapes = {f"experts.{e}.w": ((2, 3), "int64") for e in range(4)}
    arrays = number(shapes)
    stacked = {"w": np.stack(list(arrays.values()))}
    assert not stacked.keys() & arrays.keys()  # what a loader by names finds of them
    trainer, engine = (
        whole("w = experts.{e}.w : e n h"),
        whole("experts.{e}.w = experts.{e}.w", (1, 2)),
    )
    assert equal(carry(trainer, engine, {0: stacked}, shapes), {1: arrays, 2: arrays})
    # An engine without rows for them is an error before there is a plan, and so before anything moves.
    with pytest.raises(sm.StoreError, match=r"engine: no row stores experts\.0\.w"):
        sm.refit(trainer, whole("experts.w = experts.w", (1,)), shapes)


@pytest.mark.parametrize("uneven", ["chunks", "balanced"])
def test_ten_rows_on_four_ranks(uneven: str) -> None:
    """NeMo-RL's two paths: 3, 3, 2, 2 rows on one, and 3, 3, 3, 1 on the other, of the same tensor."""
    array = np.arange(10)
    balanced = np.array_split(array, 4)
    chunks = [array[3 * r : 3 * r + 3] for r in range(4)]
    assert [len(part) for part in (*balanced, *chunks)] == [3, 3, 2, 2, 3, 3, 3, 1]
    texts = {"chunks": "(tp n)", "balanced": "(tp[3 3 2 2] n)"}
    parts = {"chunks": chunks, "balanced": balanced}
    (other,) = texts.keys() - {uneven}
    layouts = {}
    for name, first in ((uneven, 0), (other, 4)):
        mesh = sm.Mesh(tp=4, ranks=range(first, first + 4))
        layouts[name] = {"w": sm.Layout((10,), mesh, texts[name], dtype="int64")}
    moved = sm.refit(layouts[uneven], layouts[other], {"w": ((10,), "int64")})
    given = {rank: {"w": part} for rank, part in enumerate(parts[uneven])}
    found = sm.simulate(moved.plan, given)
    for rank, part in enumerate(parts[other]):
        assert np.array_equal(found[4 + rank]["w"], part)


def test_gate_and_up_that_a_backend_swaps_after_loading() -> None:
    """SkyRL 1680, NeMo-RL 3545: a refit into storage that was repacked after it was loaded."""
    names = ("gate", "up")
    shapes = {f"{LAYER}mlp.experts.0.{x}_proj.weight": ((4, 4), "int64") for x in names}
    gate, up = number(shapes).values()
    trainer = whole("... = ...")
    stored = {0: dict(zip(shapes, (gate, up), strict=True))}
    native = f"{LAYER}mlp.experts.routed_experts.w13_weight"
    held = {}
    for processed in (False, True):
        engine = vllm(SERVED, ranks=[1], backend="flashinfer_cutlass", processed=processed)
        held[processed] = carry(trainer, engine, stored, shapes)[1][native][0]
    assert np.array_equal(held[True], np.concatenate([up, gate]))
    assert not np.array_equal(held[False], held[True]) and held[False].shape == held[True].shape
    scaled = {**SERVED, "quantization_config": {"weight_block_size": [128, 128]}}
    with pytest.raises(sm.StoreError, match="pass processed=False, and refit before"):
        vllm(scaled, ranks=[1], backend="flashinfer_trtllm", processed=True)


def test_a_layer_that_no_stage_has() -> None:
    """NeMo-RL: an unknown layer was silently of stage 0."""
    shapes = {f"model.layers.{n}.mlp.down_proj.weight": ((4, 8), "int64") for n in range(3)}
    stage_of = {0: 0, 1: 1}
    assert [stage_of.get(n, 0) for n in range(3)] == [0, 1, 0]
    trainer = megatron({**TRAINED, "num_layers": 2}, ranks=range(2), pp=2, vocab=100)
    engine = whole("w{l} = model.layers.{l}.mlp.down_proj.weight", (2,))
    with pytest.raises(sm.StoreError, match="declared for 2 numbers, and a tensor has number 2"):
        sm.refit(trainer, engine, shapes)


# What each side has


def test_a_head_that_only_one_side_has() -> None:
    """NeMo-RL: a tied head in the list of the producer and not in that of the consumer shifted all behind it."""
    shapes = dict.fromkeys(("embed", "head", "norm"), ((4,), "int64"))
    trainer, engine = (
        whole("embed = embed\nhead = head\nnorm = norm"),
        whole("embed = embed\nnorm = norm", (1,)),
    )
    by_place = dict(zip(("embed", "norm"), shapes, strict=False))
    assert by_place["norm"] == "head"
    with pytest.raises(sm.StoreError, match="engine: no row stores head"):
        sm.refit(trainer, engine, shapes)
    moved = sm.refit(trainer, engine, shapes, unused=["head"])
    assert set(moved.plan.src) == {"embed", "norm"}


def test_scales_that_nothing_writes() -> None:
    """verl 7224: scales all zero, and the load succeeded. What counts is the engine's own list, not what arrives."""
    shapes = {"w": ((8, 4), "uint8")}
    moved = sm.refit(whole("w = w"), whole("w = w", (1,)), shapes)
    loaded = {"w": np.zeros((8, 4)), "w_scale_inv": np.zeros((1, 1))}
    for name in moved.plan.dst:  # a loader that goes through what arrives, and is content
        loaded[name] += 3
    assert not (loaded["w"] * loaded["w_scale_inv"]).any()
    has = {(0, name): array.shape for name, array in loaded.items()}
    with pytest.raises(
        sm.StoreError, match="has 'w_scale_inv', which no row of the side stores; add a row for it"
    ):
        moved.check(1, has, "engine")


def test_scales_of_another_packing() -> None:
    """vime 133: as many bytes in another shape, packed for one engine and sent to another."""
    scales = np.arange(8).reshape(4, 2)
    packed = scales.T.copy()
    wrong = packed.ravel().reshape(scales.shape)
    assert wrong.nbytes == scales.nbytes and not np.array_equal(wrong, scales)
    shapes = {"w_scale_inv": ((4, 2), "float32")}
    moved = sm.refit(
        whole("w_scale_inv = w_scale_inv"), whole("w_scale_inv = w_scale_inv", (1,)), shapes
    )
    with pytest.raises(sm.StoreError, match=r"stores .* as \(4, 2\), the rank has \(2, 4\)"):
        moved.check(1, {(0, "w_scale_inv"): packed.shape}, "engine")


def test_types_that_a_table_did_not_have() -> None:
    """NeMo-RL: a table of types without integers, where packed parameters are uint8."""
    table = {"float32", "float16", "bfloat16"}
    shapes = {dtype: ((4, 4), dtype) for dtype in ITEMSIZE}
    assert {"uint8", "int32", "float8_e4m3fn"} <= shapes.keys() - table
    rows = "\n".join(f"{dtype} = {dtype} : (tp n) h" for dtype in shapes)
    moved = sm.refit(divided(rows, range(2)), divided(rows, range(2, 6)), shapes)
    sm.verify(moved.plan)
    assert sum(moved.plan.received_bytes().values()) == 16 * sum(ITEMSIZE.values())


def test_tables_of_the_docs_name_tests_that_there_are() -> None:
    root = Path(__file__).parents[3]
    written = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", written, re.M))
    for page in ("refit.md", "vllm-storage.md"):
        named = set(re.findall(r"`(test_\w+)`", (root / "docs" / page).read_text()))
        assert len(named) > 20 and not named - defined
