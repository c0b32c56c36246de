"""Stored: what sides declare goes through text, and text that was changed is refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.torchtitan import torchtitan
from shardmath.models.systems.vllm import vllm
from shardmath.storage import Spot, Stored, bind, parse

KINDS = ("llama", "qwen3_moe", "deepseek_v3", "nemotron_h", "gpt_oss", "llama4_text", "qwen3_next")
TITAN = ("llama", "qwen3_moe", "deepseek_v3")
SIZES = st.sampled_from([1, 2, 4])


def configure(kind: str, layers: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "vocab_size": 100,
        "intermediate_size": 32,
        "num_experts": 8,
        "n_group": 2,
        "num_nextn_predict_layers": 1,
    }


def configure_megatron(layers: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 32,
        "num_moe_experts": 8,
        "moe_grouped_gemm": True,
        "mtp_num_layers": 1,
    }


@st.composite
def declared(draw: st.DrawFn, family: str) -> Stored:
    """A side as its family declares it."""
    tp, pp, dp, start = draw(SIZES), draw(st.sampled_from([1, 2])), draw(SIZES), draw(SIZES)
    unknown = draw(st.sampled_from(["refuse", "replicate"]))
    ranks = range(start, start + tp * pp * dp)
    config = configure(draw(st.sampled_from(TITAN if family == "torchtitan" else KINDS)), 4)
    if family == "megatron":
        sizes: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": pp, "ep": dp, "etp": 1, "vocab": 100}
        spec = draw(st.sampled_from(["local", "te"]))
        return megatron(configure_megatron(4), ranks=ranks, spec=spec, unknown=unknown, **sizes)
    if family == "vllm":
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": draw(st.booleans())}
        sizes |= {"placement": draw(st.sampled_from(["linear", "round_robin"]))}
        return vllm(config, ranks=ranks, unknown=unknown, draft=draw(st.booleans()), **sizes)
    if family == "sglang":
        ranks = range(start, start + tp * pp)
        return sglang(config, ranks=ranks, tp=tp, pp=pp, ep=tp, unknown=unknown)
    if family == "torchtitan":
        return torchtitan(config, ranks=range(tp * dp), dp_shard=dp, tp=tp, unknown=unknown)
    return hugging_face(config)


FAMILIES = ("megatron", "vllm", "sglang", "hugging_face", "torchtitan")


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_what_families_declare_goes_through_text(family: str, data: st.DataObject) -> None:
    side = data.draw(declared(family))
    read = Stored.from_json(side.to_json())
    assert read == side == pickle.loads(pickle.dumps(side))
    assert read.digest == side.digest
    assert hash(read) == hash(side) and str(read) == str(side)
    assert read.to_json() == side.to_json()


SIDE = Stored(
    parse("a.{l}.w @pp=0 = b.{l}.w : (tp n=wide) h\n... = ..."),
    (sm.Mesh(pp=2, tp=2), sm.Mesh({"in": 4}, ranks=[2, 0, 3, 1])),
    {"l": (Spot({"pp": 1}, 0, 0), Spot({"pp": 0}, 1, 0))},
    {"wide": 6, "hd": 2},
    exact=False,
)


def test_a_model_of_many_layers_is_little_text() -> None:
    side = vllm(configure("deepseek_v3", 61), ranks=range(64), tp=8, pp=2, dp=4)
    assert len(side.to_json()) < 30_000


def test_every_field_is_in_the_text_and_in_the_digest() -> None:
    others = [
        Stored(SIDE.rows[::-1], SIDE.meshes, SIDE.indices, SIDE.numbers, SIDE.exact),
        Stored(SIDE.rows, SIDE.meshes[::-1], SIDE.indices, SIDE.numbers, SIDE.exact),
        Stored(SIDE.rows, SIDE.meshes, {"l": SIDE.indices["l"][::-1]}, SIDE.numbers, SIDE.exact),
        Stored(SIDE.rows, SIDE.meshes, SIDE.indices, {"wide": 6}, SIDE.exact),
        Stored(SIDE.rows, SIDE.meshes, SIDE.indices, SIDE.numbers, exact=True),
    ]
    for other in others:
        assert Stored.from_json(other.to_json()) == other != SIDE
    assert len({side.digest for side in (SIDE, *others)}) == 6


def test_equal_values_have_one_digest() -> None:
    """In another order, and of numpy's integers."""
    zero, one, two, six = np.array([0, 1, 2, 6])
    spots = Spot({"pp": one}, zero, zero), Spot({"pp": zero}, one, zero)
    numbers = {"hd": two, "wide": six}
    same = Stored(SIDE.rows, SIDE.meshes, {"l": spots}, numbers, exact=False)
    assert same == SIDE == Stored.from_json(same.to_json())
    assert same.digest == SIDE.digest


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        (
            "version",
            2,
            "has format 'shardmath declared storage' in version 2, this shardmath reads",
        ),
        ("format", "other", "has format 'other' in version 1, this shardmath reads 'shardmath d"),
        ("exact", True, r"declared storage has digest [0-9a-f]{12}, its text says [0-9a-f]{12}"),
        ("rows", ["a = a", "b = b"], "has digest"),
        ("meshes", [], r"must have the same ranks, and are \[\]"),
        ("meshes", [[[["tp", 2]], [0]]], "ranks= has 1 rank, but the mesh tp=2 has 2"),
        ("meshes", 5, "the text is not declared storage"),
        ("numbers", {"wide": "six"}, "not declared storage .*'six'.*; pass a text that to_json"),
        ("numbers", {"wide": float("inf")}, "the text is not declared storage"),
        ("numbers", {"wide": -1}, "number 'wide' is -1; give a number from 0 to"),
        ("indices", {"l": [[{"pp": 0}, 0]]}, "the text is not declared storage"),
        (
            "indices",
            {"l": [[{"pp": 0}, 0, -1]]},
            "the local number of l=0 is -1; give a number from 0 to",
        ),
    ],
)
def test_text_that_was_changed_is_refused(field: str, value: object, what: str) -> None:
    changed = json.loads(SIDE.to_json())
    changed[field] = value
    with pytest.raises(sm.ShardError, match=what):
        Stored.from_json(json.dumps(changed))


@pytest.mark.parametrize(
    "text",
    ["", "[", "[" * 10_000, "{}", "5", '{"format":1}', '{"format":1,"version":1}'],
)
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(
        sm.StoreError, match=r"not declared storage .*; pass a text that to_json wrote"
    ):
        Stored.from_json(text)


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({"a": ((-4,), "int8")}, r"shape \(-4,\) has -4; give sizes from 0 to"),
        ({"a": ((1 << 70,), "int8")}, "give sizes from 0 to"),
        ({"a": (4, "int8")}, r"tensor 'a' is \(4, 'int8'\); give \(shape, dtype\)"),
        ({1: ((4,), "int8")}, "the name of a tensor is 1; give a str"),
        (5, "shapes are 5; give a mapping"),
        ({"a." + "9" * 5000: ((4,), "int8")}, "no row stores a.9999"),
    ],
)
def test_tensors_that_are_none(shapes: Any, what: str) -> None:
    side = Stored(parse("a.{l} = a.{l}"), (sm.Mesh(),))
    with pytest.raises(sm.StoreError, match=what):
        bind(side, shapes)


def test_numbers_as_nobody_writes_them_are_words() -> None:
    """a.07 and a.7 were one tensor, and the other one was lost."""
    side = Stored(parse("... = ..."), (sm.Mesh(),))
    shapes = dict.fromkeys(("a.07", "a.7", "a.1000000000000000000"), ((1,), "int8"))
    assert [native for _, native in bind(side, shapes).natives(0)] == list(shapes)


def test_a_row_that_is_none_has_a_caret() -> None:
    changed = json.loads(SIDE.to_json())
    changed["rows"][0] = "a.w = b.w : (tp ? n)"
    with pytest.raises(sm.NotationError) as caught:
        Stored.from_json(json.dumps(changed))
    assert (caught.value.what, caught.value.position) == ("unexpected character '?'", 16)


def test_a_name_with_the_sign_for_a_number() -> None:
    side = Stored(parse("... = ..."), (sm.Mesh(),))
    with pytest.raises(sm.StoreError, match=r"name of a tensor is 'a\.{}', and {} stands for"):
        bind(side, {"a.{}": ((2,), "float32"), "a.0": ((2,), "float32")})
