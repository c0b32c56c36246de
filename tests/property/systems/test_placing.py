"""Placing: layers on stages and sizes of axes, compared with loops, and the errors of every system."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import MeshError, StoreError
from shardmath.models.storage.stored import Stored
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.placing import divide_layers, fill_sizes, place_layers
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.torchtitan import torchtitan
from shardmath.models.systems.vllm import vllm

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 1))
def test_layers_left_over_go_to_the_last_stages_that_are_not_spared(
    layers: int, pp: int, spared: int
) -> None:
    counts = [0] * pp
    for _ in range(layers // pp):
        counts = [count + 1 for count in counts]
    for back in range(layers % pp):
        counts[pp - 1 - spared - back] += 1
    assert divide_layers(layers, pp, spared=spared) == counts


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
def test_every_layer_is_where_a_walk_along_the_pipeline_finds_it(
    pp: int, chunks: int, renumber: bool, data: st.DataObject
) -> None:
    size = pp * chunks
    counts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    found = []
    for chunk in range(chunks):
        for stage in range(pp):
            for n in range(counts[chunk * pp + stage]):
                found.append(({"pp": stage}, chunk, n if renumber else len(found)))
    placed = place_layers(counts, layers=sum(counts), pp=pp, chunks=chunks, renumber=renumber)
    assert list(placed) == found


@pytest.mark.parametrize("counts", [[], [3], [1, 1], [4, -1], [1, 1, 1]])
def test_counts_that_are_not_the_layers_of_two_stages(counts: list[int]) -> None:
    message = (
        f"3 layers do not fall to 2 stages as {counts}; give the number of layers of each stage"
    )
    with pytest.raises(StoreError, match=f"^{re.escape(message)}$"):
        place_layers(counts, layers=3, pp=2)


@pytest.mark.parametrize(
    "declare",
    [
        lambda stages: vllm(CONFIG, ranks=range(2), pp=2, stages=stages),
        lambda stages: sglang(CONFIG, ranks=range(2), pp=2, stages=stages),
        lambda stages: torchtitan(CONFIG, ranks=range(2), stages=stages),
    ],
    ids=["vllm", "sglang", "torchtitan"],
)
def test_a_stage_of_fewer_than_no_layers(declare: Callable[[Sequence[int]], Stored]) -> None:
    """Three layers had four places when only the sum of the stages was compared."""
    with pytest.raises(StoreError, match=r"3 layers do not fall to 2 stages as \[4, -1\]"):
        declare([4, -1])


def test_a_layout_of_megatron_with_another_number_of_stages() -> None:
    config = {"num_layers": 3, "pipeline_model_parallel_layout": "Et|t|tL"}
    message = "3 layers do not fall to 2 stages of 2 chunks as [1, 1, 1]; set num_layers_in_first"
    with pytest.raises(StoreError, match=f"^{re.escape(message)}"):
        megatron(config, ranks=range(2), pp=2, vpp=2)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3))
def test_the_size_that_is_left_out_is_found_again(sizes: list[int], left_out: int) -> None:
    whole = {f"a{i}": n for i, n in enumerate(sizes)}
    axis = f"a{left_out % len(sizes)}"
    assert fill_sizes(math.prod(sizes), {**whole, axis: None}) == whole


@pytest.mark.parametrize(("total", "tp", "ep"), [(6, 4, 1), (0, 1, 1), (4, 0, 1), (4, -2, -2)])
def test_sizes_that_do_not_divide(total: int, tp: int, ep: int) -> None:
    what = f"tp={tp} ep={ep}: the product {tp * ep} does not divide {total} ranks"
    message = f"{what}; choose sizes of 1 or more whose product divides it"
    with pytest.raises(MeshError, match=f"^{message}$"):
        fill_sizes(total, {"tp": tp, "dp": None, "ep": ep})
