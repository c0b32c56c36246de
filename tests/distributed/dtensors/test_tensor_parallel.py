"""Tensor-parallel modules: what each rank holds, gradients beside the undivided model's, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.tensors.dtensors.scales import _view_as_words
from shardmath_torch.tensors.dtensors.styles import (
    STYLES,
    StyleName,
    check_styles,
    match_parameters,
)
from tests.distributed.pool import Pool
from tests.distributed.tasks import tensor_parallel as work
from tests.distributed.tasks.cases import thinned

pytestmark = pytest.mark.long

SHAPES = [(4, 2), (2, 4), (2, 2, 2)]
"""Sizes of (dp, tp), or (dp_replicate, dp_shard, tp)."""

SIZES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "even": (16, 8, (16, 8, 8)),
    "uneven over dp": (12, 6, (12, 4, 4)),
    "equal components": (20, 3, (8, 8, 8)),
    "empty shards": (4, 2, (4, 8)),
}

HOW = ("whole", "local", "meta")
"""What a rank has of each parameter when styles are set: all, its part, or no memory."""

DEGREES = [((4, 2), (2, 4)), ((2, 4), (2, 2, 2)), ((2, 2, 2), (2, 4))]

# What lies where


@pytest.mark.parametrize(
    ("shape", "sizes", "how"), thinned([*itertools.product(SHAPES, SIZES, HOW)])
)
def test_layouts_are_what_ranks_hold(
    pool: Pool, shape: tuple[int, ...], sizes: str, how: str
) -> None:
    """Element by element, before and after fully_shard, as computed by hand; and the forward sees those values."""
    for before, after, difference, _, _ in pool.run(work.laid, shape, SIZES[sizes], how):
        assert not before and not after and difference == 0


def test_the_texts_of_layouts(pool: Pool) -> None:
    """One of each style, under hybrid sharding."""
    for _, _, _, before, after in pool.run(work.laid, (2, 2, 2), SIZES["even"], "whole"):
        assert (
            before["column.weight"] == before["words.weight"] == "(tp n) h"
            and before["row.weight"] == "n (tp h)"
        )
        assert before["row.bias"] == before["norm.weight"] == "n"
        on = "dp_replicate=2 dp_shard=2 tp=2"
        assert after == {
            "column.weight": f"float32[16, 8] (tp dp_shard n) h on {on}",
            "column.bias": f"float32[16] (tp dp_shard n) on {on}",
            "row.weight": f"float32[8, 16] (dp_shard n) (tp h) on {on}",
            "row.bias": f"float32[8] (dp_shard n) on {on}",
            "pair.weight": f"float32[32, 8] (2 tp n | dp_shard n) h on {on}",
            "pair.bias": f"float32[32] (2 tp n | dp_shard n) on {on}",
            "qkv.weight": f"float32[32, 8] ([16 8 8] tp n | dp_shard n) h on {on}",
            "qkv.bias": f"float32[32] ([16 8 8] tp n | dp_shard n) on {on}",
            "words.weight": f"float32[16, 8] (tp dp_shard n) h on {on}",
            "norm.weight": f"float32[8] (dp_shard n) on {on}",
            "norm.bias": f"float32[8] (dp_shard n) on {on}",
            "scale.weight": f"float32[16] (tp dp_shard n) on {on}",
            "softmax_offset": f"float32[16] (tp dp_shard n) on {on}",
        }


@pytest.mark.parametrize(
    ("degrees", "sizes"), thinned([*itertools.product(DEGREES, SIZES)], turn=1)
)
def test_another_degree_scrambles_no_components(
    pool: Pool, degrees: tuple[tuple[int, ...], tuple[int, ...]], sizes: str
) -> None:
    """Planned by the layouts of both modules and moved; as by hand on the other side."""
    source, target = degrees
    for wrong, redistributed in pool.run(work.changed_degree, source, target, SIZES[sizes]):
        assert not wrong and redistributed


@pytest.mark.parametrize("fsdp", [False, True], ids=["tp alone", "fsdp"])
def test_fused_weights_of_one_shape_have_their_own_rows(pool: Pool, fsdp: bool) -> None:
    """Their placements are equal, and torch makes them anew by value: each is told by the module that has it."""
    for found in pool.run(work.rows_of_fused, fsdp):
        assert len(found) == (12 if fsdp else 22)
        assert {how: rows for how, rows in found.items() if rows != [*range(32)]} == {}


@pytest.mark.parametrize("fsdp", [False, True], ids=["tp alone", "fsdp"])
def test_copies_of_fused_weights_are_not_read_by_their_placements(pool: Pool, fsdp: bool) -> None:
    """No module has them, and what their placements say is another order of rows."""
    for found in pool.run(work.copies_of_fused, fsdp):
        loaded = found.pop("loaded into others")
        assert (
            loaded[0] == "PlacementError"
            and "has components (8, 8, 8, 8), but the module's has" in loaded[1]
        )
        whole = found.pop("a whole loaded")
        assert whole[0] == "PlacementError" and "torch would mix up the rows" in whole[1]
        for how, said in found.items():
            assert said[0] == "PlacementError" and "layout=layout_of(module)[name]" in said[1], (
                how,
                said,
            )


def test_placements_of_a_fused_weight_are_read_as_said(pool: Pool) -> None:
    """Somebody may have other tensors with them; their gradients lie as was said of them."""
    assert pool.run(work.moved_to_a_label) == [("(4 tp n) h", True)] * 8


PLAIN: dict[str, Any] = {k: v for k, v in work.PART_STYLES.items() if k != "pair"}


def test_torch_saves_what_it_can_say(pool: Pool, tmp_path: Path) -> None:
    """DCP under one degree, and back under another: all that is not fused."""
    assert pool.run(work.saved_by_torch, str(tmp_path), 16, PLAIN) == [[]] * 8


@pytest.mark.parametrize(("name", "fused"), [("pair", smt.Fused(2)), ("qkv", smt.Fused((8, 4, 4)))])
def test_torch_refuses_to_save_components(
    pool: Pool, tmp_path: Path, name: str, fused: Any
) -> None:
    """DCP has no words for them; it says so rather than scramble them."""
    for said in pool.run(work.saved_by_torch, str(tmp_path), 16, {**PLAIN, name: fused}):
        assert isinstance(said, str) and f"key:{name}.weight has overlapping chunks" in said


# Training


TRAINED = [
    ((2, 4), True, True),
    ((2, 4), False, False),
    pytest.param((4, 2), False, True, marks=pytest.mark.slow),
    *(pytest.param(shape, True, False, marks=pytest.mark.slow) for shape in ((4, 2), (2, 2, 2))),
]
"""Shape, whether fully_shard follows, and whether a part is computed again in the backward."""


@pytest.mark.parametrize(("shape", "fsdp", "again"), TRAINED)
def test_gradients_are_the_undivided_models(
    pool: Pool, shape: tuple[int, ...], fsdp: bool, again: bool
) -> None:
    """Two steps of AdamW with accumulated gradients, a shared embedding, and weights used in a parent's forward."""
    for found in pool.run(work.trained, shape, fsdp, again, timeout=110):
        assert (
            len(found) > 60
            and {"loss", "norm", "gradient of embed.weight", "head.weight"} <= found.keys()
        )
        assert {name: worst for name, worst in found.items() if not worst < 2e-4} == {}


@pytest.mark.parametrize("fsdp", [False, True], ids=["tp alone", "fsdp"])
def test_the_forward_sees_local_views(pool: Pool, fsdp: bool) -> None:
    for outside, inside, other, gradient, shape in pool.run(work.local_inside, fsdp):
        assert outside and inside and other and gradient and shape == (1, 4)


def test_initialization_sees_whole_shapes(pool: Pool) -> None:
    """Bounds are those of the whole matrix's fan-in, 1 / sqrt(4096), and are nearly reached."""
    assert 0.99 < pool.run(work.initialized)[0] <= 1


# What a module is afterwards


def test_modules_are_as_before(pool: Pool) -> None:
    for found in pool.run(work.as_before):
        assert {name for name, right in found.items() if not right} == set()


@pytest.mark.parametrize("fsdp", [False, True], ids=["tp alone", "fsdp"])
def test_state_dicts_go_from_model_to_model(pool: Pool, fsdp: bool) -> None:
    for found in pool.run(work.state_dicts, fsdp):
        assert found == ["<All keys matched successfully>", True] * 2


def test_a_module_under_fsdp_is_not_copied(pool: Pool) -> None:
    assert pool.run(work.not_after_fsdp) == [["AssertionError", "PicklingError"]] * 8


def test_parameters_keep_their_attributes(pool: Pool) -> None:
    """And one name's style is that of a shared parameter; what no pattern is about is replicated."""
    wanted = (False, False, "kept", True, "(tp n) h", {"n", "n h"}, True)
    assert pool.run(work.attributes) == [wanted] * 8


def test_a_module_with_two_names(pool: Pool) -> None:
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    wanted = dict(zip(names, ["(2 tp n) h", "(2 tp n)"] * 2, strict=True))
    assert pool.run(work.shared_module) == [(wanted, names, True)] * 8


def test_another_parameter_in_place_of_one(pool: Pool) -> None:
    assert pool.run(work.replaced) == ["n (tp h)"] * 8


# Scales


@pytest.mark.parametrize("weights", ["axes", "flat"])
@pytest.mark.parametrize("shape", SHAPES)
def test_amax_is_of_whole_parameters(pool: Pool, shape: tuple[int, ...], weights: str) -> None:
    """Of each replica's own: they differ here. One all-reduce an axis; some shards are empty."""
    for rank, (found, wanted, calls, kinds) in enumerate(pool.run(work.scales, shape, weights)):
        assert found == wanted and kinds == {(torch.float32, (), False)}
        everyone = (
            set(range(8)) if len(shape) == 2 else set(range(rank // 4 * 4, rank // 4 * 4 + 4))
        )
        assert len(calls) == (1 if weights == "flat" else 2)
        assert set().union(*calls) <= everyone and (weights == "axes" or set(calls[0]) == everyone)


def test_amax_over_tensor_parallelism_alone(pool: Pool) -> None:
    """By default over tp_mesh, before fully_shard."""
    for rank, (found, wanted, calls, _) in enumerate(pool.run(work.scales, (4, 2), "tp")):
        assert found == wanted and calls == [[rank // 2 * 2, rank // 2 * 2 + 1]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
@pytest.mark.parametrize("value", [3.0, float("inf"), float("nan")])
def test_amax_of_special_values(pool: Pool, dtype: str, value: float) -> None:
    """NaN stays NaN, of whichever sign and on whichever rank."""
    for (first, kind), second in pool.run(work.special, dtype, value):
        assert kind == torch.float32 and second == (2.0, torch.float32)
        assert first == value or (first != first and value != value)


def test_words_are_in_the_order_of_values() -> None:
    """NaN above all, also one with a sign."""
    negative = torch.tensor(-1 << 22, dtype=torch.int32).view(torch.float32)
    assert negative.isnan()
    values = torch.stack([*torch.tensor([0.0, 1e-45, 1.0, 3e38, float("inf")]), negative])
    words = _view_as_words(values).tolist()
    assert words == sorted(words) and len(set(words)) == 6


# Errors

REFUSED: dict[str, tuple[str, str]] = {
    "2-D": (
        "MeshError",
        "tp_mesh has 2 axes, Mesh(dp=4, tp=2); pass one axis of a DeviceMesh with mesh_dim_names",
    ),
    "no mesh": ("MeshError", "tp_mesh is Mesh(tp=2), which is not a DeviceMesh"),
    "no name": ("MeshError", "tp_mesh's axis has no name; pass one axis"),
    "weights without tp": ("MeshError", "of tp_mesh, Mesh(tp=2"),
    "no module": ("LayoutError", "Parameter is not a torch.nn.Module"),
    "no styles": ("PlacementError", "styles= is 'column', which is not a mapping; pass"),
    "unknown": (
        "PlacementError",
        "style 'colum' of '0' is unknown; pass column, row, replicate, vocabulary",
    ),
    "no match": (
        "PlacementError",
        "'*.q' matches no module and no parameter; write a name of one of the",
    ),
    "no weight": (
        "PlacementError",
        "'blocks.0' matches module 'blocks.0', which has no parameter weight or bias",
    ),
    "uneven": (
        "PlacementError",
        "parameter '0.weight' whole (9, 4) as 'column' on tp=2: dimension 0: length 9 does not divide by tp=2; pad it",
    ),
    "no dimension": (
        "PlacementError",
        "parameter '1.weight' whole (4,) as 'row' on tp=2: it has no dimension 1",
    ),
    "uneven part": (
        "PlacementError",
        "dimension 0: a component of 3 of 4 does not divide by tp=2; pad it to 4",
    ),
    "not the sum": (
        "PlacementError",
        "dimension 0: components (4, 2) add up to 6, not to the whole length 4; pass Fused",
    ),
    "local sum": (
        "PlacementError",
        "local (4, 4) as Fused(components=(2, 2)) on tp=2: dimension 0: components (2, 2) add up to 4",
    ),
    "not so many": (
        "PlacementError",
        "length 4 does not divide into 3 equal components; pass Fused a tuple",
    ),
    "shared": (
        "PlacementError",
        "one shared parameter has the styles 'column' as '0.weight' (by '0') and 'row'",
    ),
    "shared parts": (
        "PlacementError",
        "one shared parameter has the styles 'column' as '0.weight' (by '0') and Fused(",
    ),
    "gradient": (
        "LayoutError",
        "parameter '0.weight' has a gradient, which would be lost; call zero_grad() first",
    ),
    "dtensors": ("LayoutError", "parameter '0.weight' is a DTensor; call set_device_mesh before"),
    "lazy": ("LayoutError", "parameter 'weight' has no shape yet"),
    "amax first": (
        "LayoutError",
        "has no parameter that set_device_mesh has divided; call smt.set_device_mesh first",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input(pool: Pool, what: str) -> None:
    """An error of ours on every rank, and nothing has changed."""
    kind, said = REFUSED[what]
    for found, same in pool.run(work.refused, what):
        assert same and found[0] == kind and said in found[1], found


@pytest.mark.parametrize(
    ("what", "name"), [("outside", "tp_mesh"), ("weights outside", "weight_mesh")]
)
def test_meshes_without_this_rank(pool: Pool, what: str, name: str) -> None:
    """Refused on the ranks outside, each of which says so."""
    for rank, (found, same) in enumerate(pool.run(work.refused, what)):
        if rank < 6:
            assert (
                same
                and found[0] == "MeshError"
                and f"rank {rank} is not in {name}, Mesh(" in found[1]
            )


LATER: dict[str, tuple[str, str]] = {
    "twice": ("LayoutError", "set_device_mesh was already called on this module; call it once"),
    "inside": ("LayoutError", "set_device_mesh was already called on submodule '1'; call it once"),
    "meta": (
        "LayoutError",
        "parameter '0.weight' is on the meta device and has no values; call the module's to_empty",
    ),
    "tp alone": ("LayoutError", "which hold parts of it, are not in weight_mesh, Mesh(tp=2"),
    "replaced": (
        "LayoutError",
        "parameter '0.weight' is Parameter, not the one that set_device_mesh made",
    ),
    "other shape": (
        "LayoutError",
        "of shape (3, 4), but float32[4, 4] (2 tp n) h on tp=2 has (2, 4) there",
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_bad_input_later(pool: Pool, what: str) -> None:
    kind, said = LATER[what]
    for found in pool.run(work.refused_later, what):
        assert found[0] == kind and said in found[1], found


@pytest.mark.parametrize("components", [(), 0, (4, 0), [4, 4], "44", (4.0, 4), True])
def test_components_that_are_none(components: Any) -> None:
    kind, said = work.fused(components)
    assert kind == "PlacementError" and said.startswith(
        f"Fused({components!r}) does not name components; pass a tuple of"
    )


# Styles


def divisions(module: nn.Module, styles: dict[str, Any]) -> dict[str, int | None]:
    """The dimension of each parameter that is divided."""
    found = match_parameters(
        module, dict(module.named_parameters(remove_duplicate=False)), check_styles(styles)
    )
    return {name: None if said is None else said.dim for name, _, said in found}


class Odd(nn.Module):
    """Parameters of unusual names beside usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
        self.fc2_weight, self.fc2_bias = (
            nn.Parameter(torch.zeros(4, 4)),
            nn.Parameter(torch.zeros(4)),
        )
        self.softmax_offset, self.inner = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)


NOTHING = {
    "weight",
    "bias",
    "fc2_weight",
    "fc2_bias",
    "softmax_offset",
    "inner.weight",
    "inner.bias",
}
PATTERNS: list[tuple[dict[str, Any], dict[str, int | None]]] = [
    ({}, {}),
    ({"": "column"}, {"weight": 0, "bias": 0}),
    ({"": "row"}, {"weight": 1}),
    ({"": "softmax_offset"}, {"softmax_offset": 0}),
    ({"inner": "row_norm"}, {"inner.weight": 0, "inner.bias": 0}),
    ({"in*": smt.Fused(2)}, {"inner.weight": 0, "inner.bias": 0}),
    ({"fc2_*": "row"}, {"fc2_weight": 1}),
    ({"fc2_*": "column"}, {"fc2_weight": 0, "fc2_bias": 0}),
    ({"*": "replicate"}, {}),
    (
        {"inner": "row", "*": "column"},
        dict.fromkeys(NOTHING, 0) | {"inner.weight": 1, "inner.bias": None},
    ),
    ({"*": "column", "inner": "row"}, dict.fromkeys(NOTHING, 0)),
    ({"inner.bias": "column", "inner": "row"}, {"inner.weight": 1, "inner.bias": 0}),
    ({"INNER*": "row", "inner": "column"}, {}),
]


@pytest.mark.parametrize(("styles", "wanted"), PATTERNS)
def test_the_first_pattern_counts(styles: dict[str, Any], wanted: dict[str, int | None]) -> None:
    """Of modules for weight and bias, of parameters by their full names; upper case is not lower case."""
    if "INNER*" in styles:
        with pytest.raises(sm.PlacementError, match="matches no module and no parameter"):
            divisions(Odd(), styles)
    else:
        assert divisions(Odd(), styles) == dict.fromkeys(NOTHING) | wanted


def test_styles_are_what_the_type_says() -> None:
    assert {*STYLES} == {*get_args(StyleName)}
