"""Recording: what a loader was seen to store is what rows say, by either way, and refits move it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats, transforms
from shardmath.models.recordings.recorded import label
from shardmath.storage import Stored, bind, fill, parse
from tests.distributed.pool import Pool
from tests.distributed.tasks import recorded, refits

SIDES = [
    (recorded.engine, recorded.by_views, 4, {"views"}),
    (recorded.engine, recorded.by_making, 4, {"views", "numbers"}),
    (recorded.trainer, recorded.load_trainer, 0, {"views", "numbers"}),
    (recorded.virtual_trainer, recorded.load_virtual_trainer, 0, {"views", "numbers"}),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("declare", "load", "first", "ways"), SIDES)
def test_recorded_and_declared_storage_are_equal(
    declare: Callable[[], Stored], load: recorded.Loader, first: int, ways: set[str], device: str
) -> None:
    """The law: cell by cell, padding too, and in the same layouts."""
    shapes = refits.shapes()
    side = recorded.record(declare(), load, first, device)
    declared, seen = bind(declare(), shapes), side.bind(shapes)
    numbers = np.arange(1, 1 + sum(int(np.prod(s)) for s, _ in shapes.values()))
    parts = np.split(numbers, np.cumsum([int(np.prod(s)) for s, _ in shapes.values()])[:-1])
    arrays = {n: p.reshape(s) for (n, (s, _)), p in zip(shapes.items(), parts, strict=True)}
    for rank in declared.ranks:
        wanted = fill(declared, arrays, rank)
        found = fill(seen, arrays, rank)
        flat = side.ranks[rank].fill(arrays)
        assert wanted.keys() == found.keys()
        for (chunk, name), array in wanted.items():
            np.testing.assert_array_equal(found[chunk, name], array)
            np.testing.assert_array_equal(flat[label(chunk, name)], array)
        assert {native.way for native in side.ranks[rank].natives} <= ways
    for name, layout in declared.layouts.items():
        assert sm.equivalent(seen.layouts[name], layout)


def test_chunks_with_equal_names() -> None:
    """What is wrong, what is computed, and what is unwritten names the chunk; text and pickles keep it."""
    shapes = dict.fromkeys("pq", ((4,), "float32"))
    chunks = [{"A": torch.ones(4)}, {"A": torch.ones(5)}]

    def load(given: dict[str, Tensor]) -> None:
        chunks[0]["A"].copy_(given["p"])
        chunks[1]["A"][:4].copy_(-torch.exp(given["q"]))

    with pytest.raises(sm.StoreError, match=r"'A of chunk 1' is computed by aten\.exp"):
        smt.record(load, shapes, chunks)
    found = smt.record(load, shapes, chunks, functions={"A of chunk 1": "neg_exp"})
    assert found.unwritten == {"A of chunk 1": 1}
    assert (
        sm.storage.Recorded.from_json(found.to_json()) == found == pickle.loads(pickle.dumps(found))
    )
    bound = sm.storage.RecordedSide({0: found}).bind(shapes)
    assert bound.natives(0) == {(0, "A"): (4,), (1, "A"): (5,)}
    slots = bound.slots(0)
    assert [(slots[name].chunk, slots[name].function) for name in "pq"] == [(0, ""), (1, "neg_exp")]
    assert "= neg_exp(...)" in bound.row_of((1, "A"), 0)
    with pytest.raises(sm.StoreError, match="rank 0 stores no 'A' in chunk 2"):
        bound.row_of((2, "A"), 0)
    with pytest.raises(sm.StoreError, match="into= has int for virtual stage 1, where a module"):
        smt.record(load, shapes, [{}, 3])  # type: ignore[list-item]


def test_both_ways_record_the_same() -> None:
    shapes = {n: s for n, s in refits.shapes().items() if "o_proj" not in n}
    own = {
        n[1]: torch.zeros(s) for n, s in bind(recorded.engine(), refits.shapes()).natives(5).items()
    }

    def load(given: dict[str, Tensor]) -> None:
        full = {n: given.get(n, torch.zeros(8, 8)) for n in refits.shapes()}
        kept = {n: t if "o_proj" not in n else torch.zeros(8, 2) for n, t in own.items()}
        recorded.by_views(full, kept, 1)

    views = smt.record(load, shapes, own, ways=("views",))
    numbers = smt.record(load, shapes, own, ways=("numbers",))
    assert [n._replace(way="") for n in views.natives] == [
        n._replace(way="") for n in numbers.natives
    ]
    assert views.unwritten == numbers.unwritten
    assert set(views.unwritten) == {n for n in own if "o_proj" in n}


@pytest.mark.parametrize("declared", [True, False])
def test_a_refit_into_a_recorded_engine(pool: Pool, declared: bool) -> None:
    assert pool.run(recorded.move, declared) == [[]] * 8


class Fused(nn.Module):
    """A module with a fused weight, a tied one, and a buffer that nobody loads."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.qk = nn.Linear(3, 4, bias=False, dtype=torch.bfloat16, device=device)
        self.embed = nn.Parameter(torch.zeros(6, 3, device=device))
        self.head = self.embed
        self.register_buffer("scale", torch.ones(1, device=device))
        self.register_buffer("hidden", torch.ones(1, device=device), persistent=False)
        self.qk.weight.weight_loader = self.load_qk  # type: ignore[assignment]

    def load_qk(self, param: Tensor, tensor: Tensor, which: str) -> None:
        param.data.narrow(0, 2 * (which == "k"), 2).copy_(tensor)

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name in "qk":
                own["qk.weight"].weight_loader(own["qk.weight"], tensor, name)  # type: ignore[operator]
            else:
                own[name].data.copy_(tensor)


SHAPES = {"q": ((2, 3), "bfloat16"), "k": ((2, 3), "bfloat16"), "embed": ((6, 3), "float32")}


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_with_loaders_of_its_own(device: str, ways: Any) -> None:
    module = Fused(device)
    before = dict(module.named_parameters())
    found = smt.record(module.load_weights, SHAPES, module, form="pairs", ways=ways)
    assert found.aliases == (("head", "embed"),)
    assert found.unwritten == {"scale": 1}
    assert [native.name for native in found.natives] == ["embed", "scale", "qk.weight"]
    assert (
        sm.storage.Recorded.from_json(found.to_json()) == found == pickle.loads(pickle.dumps(found))
    )
    assert {n: id(p) for n, p in module.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert device == "meta" or module.scale == 1  # type: ignore[comparison-overlap]


def record(
    load: Callable[[dict[str, Tensor]], object], into: dict[str, Tensor], **more: Any
) -> Any:
    return smt.record(load, {"q": ((4, 3), "float32"), "k": ((4, 3), "float32")}, into, **more)


def test_what_is_put_in_place_of_a_target() -> None:
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(3, 4)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"] = given["k"].clone()
        into["b"] = given["q"].T

    kept = dict(into)
    found = record(load, into)
    assert {native.way for native in found.natives} == {"views"}
    assert found.natives[1].pieces[0].blocks == ((3, 4, 1), (4, 1, 3))
    assert found.natives == tuple(
        native._replace(way="views") for native in record(load, into, ways=("numbers",)).natives
    )
    assert into["a"] is kept["a"]
    assert into["b"] is kept["b"]


@pytest.mark.parametrize("ways", [("views",), ("numbers",), ("views", "numbers")])
def test_what_is_computed_is_named(ways: Any) -> None:
    into = {"a": torch.zeros(4, 3)}
    with pytest.raises(sm.StoreError, match="'a' is computed") as caught:
        record(lambda given: into["a"].copy_(given["q"] * 0.5), into, ways=ways)
    assert ("aten.mul" in str(caught.value)) == ("views" in ways)
    declared = record(
        lambda given: into["a"].copy_(-given["q"].exp()), into, functions={"a": "neg_exp"}
    )
    assert declared.natives[0].function == "neg_exp"


def halve(first: float, *others: float) -> float:
    return 0.5 * first


BY_PYTHON: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "apply_": lambda own, given: own.apply_(halve),
    "map_": lambda own, given: own.map_(given, halve),
    "map2_": lambda own, given: own.map2_(given, given, halve),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("of", ["a copy", "a target", "another thread"])
@pytest.mark.parametrize("what", BY_PYTHON)
def test_elements_that_a_python_function_computes(what: str, of: str, device: str) -> None:
    """Torch skips these functions without data, and they are no operations."""
    into = {"a": torch.zeros(4, 3, device=device)}
    compute = BY_PYTHON[what]

    def load(given: dict[str, Tensor]) -> None:
        if of == "a target":
            into["a"].copy_(given["q"])
            compute(into["a"], given["k"])
        elif of == "a copy":
            into["a"].copy_(compute(given["q"].clone(), given["k"]))
        else:
            copied = given["q"].clone()
            there_before.submit(compute, copied, given["k"]).result()
            into["a"].copy_(copied)

    with ThreadPoolExecutor(1) as there_before:
        there_before.submit(int).result()
        said = (
            f"calls {what}, which does nothing .* without data|reads values of a tensor that has no"
        )
        with pytest.raises(sm.StoreError, match=said):
            record(load, into, ways=("views",))
        with pytest.raises(sm.StoreError, match="'a' is computed"):
            record(load, into)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_elements_that_a_python_function_copies(device: str) -> None:
    into = {"a": torch.zeros(4, 3, device=device)}
    found = record(lambda given: into["a"].map_(given["k"], lambda _, k: k), into)
    assert [(native.way, native.pieces[0].tensor) for native in found.natives] == [("numbers", "k")]


@pytest.mark.parametrize("ways", [("numbers",), ("views", "numbers")])
def test_elements_that_a_python_function_computes_in_a_tensor_without_data(ways: Any) -> None:
    into = {"a": torch.zeros(4, 3, device="meta")}
    kept = into["a"]

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["q"])
        kept.apply_(halve)

    with pytest.raises(sm.StoreError, match="'a' is written in a tensor that the loader has kept"):
        record(load, into, ways=ways)


FILLS: list[Callable[[Tensor], object]] = [
    nn.init.orthogonal_,
    nn.init.trunc_normal_,
    lambda own: nn.init.sparse_(own, 0.5),
    lambda own: nn.init.dirac_(own.view(4, 3, 1)),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("of", ["a target", "a copy"])
@pytest.mark.parametrize("fill", FILLS)
def test_elements_over_which_a_tensor_is_filled(
    fill: Callable[[Tensor], object], of: str, device: str
) -> None:
    """Torch skips these functions for tensors that are on the meta device."""
    into = {name: torch.zeros(4, 3, device=device) for name in "ab"}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["q"])
        made = into["a"] if of == "a target" else into["a"].clone()
        fill(made)
        into["b"].copy_(made)

    with pytest.raises(sm.StoreError, match=r"is (computed|loaded differently|written in one run)"):
        record(load, into)


def test_a_loader_that_asks_twice_whether_a_tensor_has_data() -> None:
    """Only torch.nn.init gets another answer once elements are there."""
    into = {"a": torch.zeros(4, 3, device="meta")}

    def load(given: dict[str, Tensor]) -> None:
        for rows in (slice(0, 2), slice(2, 4)):
            if into["a"].is_meta:
                into["a"][rows].copy_(given["q"][rows])

    recorded = record(load, into)
    assert recorded.natives[0].way == "views" and not recorded.unwritten


def test_a_target_that_is_filled_before_it_is_stored() -> None:
    into = {"a": torch.zeros(4, 3, device="meta")}

    def load(given: dict[str, Tensor]) -> None:
        assert into["a"].is_meta
        nn.init.trunc_normal_(into["a"])
        into["a"].copy_(given["q"])

    assert record(load, into, ways=("views",)).natives[0].way == "views"


@pytest.mark.parametrize("ways", [("views",), ("numbers",), ("views", "numbers")])
@pytest.mark.parametrize("temporary", [False, True])
def test_operations_that_write_lists_of_tensors(temporary: bool, ways: Any) -> None:
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["b"].copy_(given["k"])
        made = given["q"].clone() if temporary else into["a"].copy_(given["q"])
        torch._foreach_mul_([made, torch.zeros(2)], 2.0)
        into["a"].copy_(made)

    with pytest.raises(sm.StoreError, match=r"'a' (is computed|could not be followed)"):
        record(load, into, ways=ways)


def test_copies_of_lists_of_tensors() -> None:
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}
    found = record(lambda given: torch._foreach_copy_(list(into.values()), [*given.values()]), into)
    assert not found.unwritten
    assert [native.pieces[0].tensor for native in found.natives] == ["q", "k"]


def test_an_operation_that_writes_into_two_targets() -> None:
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        torch.frexp(given["q"], out=(into["a"], torch.zeros(4, 3, dtype=torch.int32)))
        into["b"].copy_(given["k"])

    with pytest.raises(sm.StoreError, match=r"'a' is computed by aten.frexp"):
        record(load, into)


BITS = {
    "a cast of bits": lambda q, a: a.copy_(q.view(torch.int16).to(torch.bfloat16)),
    "bits copied as numbers": lambda q, a: a.copy_(q.view(torch.int16)),
    "numbers copied as bits": lambda q, a: a.view(torch.int16).copy_(q),
    "a cast of copied bits": lambda q, a: a.copy_(
        q.view(torch.int16).clone().to(torch.int32).to(torch.bfloat16)
    ),
    "a function of bits": lambda q, a: a.copy_((-q.view(torch.int16)).view(torch.bfloat16)),
}


@pytest.mark.parametrize("case", BITS)
@pytest.mark.parametrize("ways", [("views",), ("views", "numbers")])
def test_bits_that_are_cast_are_computed(case: str, ways: Any) -> None:
    into = {"a": torch.zeros(4, 3, dtype=torch.bfloat16)}
    shapes = {"q": ((4, 3), "bfloat16")}
    with pytest.raises(sm.StoreError, match=r"'a' (is computed|could not be followed)"):
        smt.record(lambda given: BITS[case](given["q"], into["a"]), shapes, into, ways=ways)


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
@pytest.mark.parametrize("between", ["nothing", "a copy", "a cast of it"])
def test_bits_that_are_copied_alone(between: str, ways: Any) -> None:
    into = {"a": torch.zeros(4, 3, dtype=torch.bfloat16), "b": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        bits = given["q"].view(torch.int16)
        if between == "nothing":
            into["a"].view(torch.int16).copy_(bits)
        elif between == "a copy":
            into["a"].copy_(bits.T.contiguous().view(torch.bfloat16).T)
        else:
            into["a"].copy_(bits.clone().view(torch.bfloat16).to(torch.float32))
        into["b"].copy_(into["a"])

    found = smt.record(load, {"q": ((4, 3), "bfloat16")}, into, ways=ways)
    assert [native.pieces[0].blocks for native in found.natives] == [((12, 1, 1),)] * 2


@pytest.mark.parametrize("copied", [False, True])
def test_views_of_what_is_negated_are_computed(copied: bool) -> None:
    into = {"a": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        pairs = torch.complex(given["q"], given["q"]) if copied else None
        negated = pairs.conj().imag if pairs is not None else torch._neg_view(given["q"])
        into["a"].copy_(negated.clone() if copied else negated)

    with pytest.raises(sm.StoreError, match="'a' is computed"):
        record(load, into)


def test_part_of_a_target_that_is_seen_as_bytes() -> None:
    """Four bytes are two cells, and not four."""
    into = {"a": torch.zeros(4, dtype=torch.bfloat16)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].view(torch.int8)[:4].copy_(given["q"])

    with pytest.raises(sm.StoreError, match=r"'a' (is computed|could not be followed)"):
        smt.record(load, {"q": ((4,), "int8")}, into)


def test_a_sum_of_two_tensors_is_computed() -> None:
    into = {"a": torch.zeros(4, 3)}
    with pytest.raises(sm.StoreError, match=r"'a' is computed by aten.add.*: position 0 "):
        record(lambda given: into["a"].copy_(given["q"] + given["k"]), into)


def test_one_cell_of_two_tensors() -> None:
    into = {"a": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["q"])
        into["a"][3:].copy_(given["k"][:1])

    with pytest.raises(sm.StoreError, match="cells of 'a' are written by 'q' and again by 'k'"):
        record(load, into)


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
def test_an_element_that_comes_twice(ways: Any) -> None:
    into = {"a": torch.zeros(4, 3)}
    with pytest.raises(sm.StoreError, match="elements of 'q' lie in two cells each of 'a'"):
        record(lambda given: into["a"].copy_(given["q"][:1]), into, ways=ways)


def test_a_loader_that_reads_values_is_run_on_numbers() -> None:
    into = {"a": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        if given["q"].isfinite().all().item():
            into["a"].copy_(given["q"].flip(0))

    found = record(load, into)
    assert found.natives[0].way == "numbers"
    assert found.fill({n: np.arange(12).reshape(4, 3) for n in "qk"})["a"][0].tolist() == [
        9,
        10,
        11,
    ]


def test_targets_in_one_memory() -> None:
    flat = torch.zeros(24)
    into = {"a": flat[:12].view(4, 3), "b": flat[12:].view(4, 3).T}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["q"])
        into["b"].copy_(given["k"].T)

    assert [native.unwritten for native in record(load, into).natives] == [0, 0]


@pytest.mark.parametrize(
    "dtype", ["float16", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "float64"]
)
def test_types_of_few_bits_hold_numbers_digit_by_digit(dtype: str) -> None:
    shapes = {"q": ((64, 40), dtype)}
    into = {"a": torch.zeros(64, 40).to(getattr(torch, dtype))}
    found = smt.record(lambda given: into["a"].copy_(given["q"]), shapes, into, ways=("numbers",))
    assert found.natives[0].pieces[0].blocks == ((2560, 1, 1),)


def test_one_copy_into_several_targets() -> None:
    flat = torch.zeros(24)
    into = {"a": flat[:12].view(4, 3), "b": flat[12:].view(4, 3)}
    whole = {"q": ((24,), "float32")}
    found = smt.record(lambda given: flat.copy_(given["q"]), whole, into)
    assert [native.pieces[0].element for native in found.natives] == [0, 12]
    assert {native.way for native in found.natives} == {"numbers"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loader_that_stores_first_and_then_a_function_of_what_it_stored(device: str) -> None:
    """As vLLM's composed_weight_loader does with the A of Mamba."""
    into = {"a": torch.zeros(2, 3, device=device)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].data.copy_(given["q"].narrow(0, 2, 2))
        into["a"].data.copy_(-torch.exp(into["a"].float()))

    found = record(load, into, functions={"a": "neg_exp"})
    assert (found.natives[0].way, found.natives[0].pieces[0].element) == ("views", 6)
    with pytest.raises(sm.StoreError, match=r"'a' is computed by aten.exp.default, aten.neg"):
        record(load, into)


def test_a_part_that_is_stored_and_read_again_is_not_followed() -> None:
    into = {"a": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"][:2].copy_(given["q"][:2])
        into["a"][2:].copy_(into["a"][:2])

    with pytest.raises(sm.StoreError, match="elements of 'q' lie in two cells each of 'a'"):
        record(load, into)


def test_a_tensor_that_the_loader_empties_before_it_is_stored() -> None:
    """As vLLM's gpt_oss does with a bias that one rank alone adds."""
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        given["q"].zero_()
        into["a"].copy_(given["q"])
        into["b"].copy_(given["k"])

    found = record(load, into, ways=("views",))
    assert found.unwritten == {"a": 12}
    found = record(load, into, ways=("numbers",))
    assert found.unwritten == {"a": 12}


def test_a_target_to_which_the_loader_gives_more_memory() -> None:
    """Memory that numpy has seen cannot be made smaller again, and is put back all the same."""
    into = {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].resize_(8, 3)[4:].copy_(given["k"])
        into["a"][:4].copy_(given["q"])
        into["a"].resize_(4, 3)
        into["b"].copy_(given["k"])

    for found in (record(load, into), record(load, into, ways=("numbers",))):
        assert not found.unwritten
        assert all(held.eq(1).all() for held in into.values())


def test_a_cell_that_is_filled_with_a_tensor() -> None:
    into = {"a": torch.zeros(1), "b": torch.zeros(())}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].fill_(given["q"])
        # What is filled with a tensor is no blank, either.
        into["b"].copy_(torch.zeros(()).fill_(given["k"]))

    found = smt.record(load, dict.fromkeys("qk", ((), "float32")), into)
    assert not found.unwritten


@pytest.mark.parametrize("rows", [1, 4])
def test_cells_that_are_emptied_after_they_were_stored(rows: int) -> None:
    into = {"a": torch.zeros(6, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"][:4].copy_(given["q"])
        into["a"][4:].fill_(0)
        into["a"][:rows].zero_()

    found = record(load, into)
    assert (found.unwritten, found.natives[0].way) == (
        {"a": 6 + 3 * rows},
        "numbers" if rows < 4 else "",
    )


def test_a_copy_of_what_the_loader_filled_with_a_constant() -> None:
    """It writes no element, with data and without, even if another target is recorded by numbers."""
    into = {"bias": torch.ones(3), "b": torch.ones(3), "a": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["bias"].copy_(torch.empty(3).zero_())
        into["b"] = torch.empty(3).zero_()
        into["a"].copy_(given["q"].flip(0))

    assert record(load, into).unwritten == {"bias": 3, "b": 3}


def test_a_loader_that_makes_sparse_tensors() -> None:
    """They drop the sign of zero, so nothing is copied; the loader itself runs as it does alone."""
    into = {"a": torch.zeros(4, 3)}
    with pytest.raises(sm.StoreError, match=r"'a' is computed, not copied: .* is -0; name the"):
        record(lambda given: into["a"].copy_(given["q"].to_sparse().to_dense()), into)


def test_a_function_that_is_none() -> None:
    into = {"a": torch.zeros(4, 3)}
    with pytest.raises(
        sm.StoreError, match=r"'a' is copied unchanged, but functions= .* computed by 'neg_exp'"
    ):
        record(lambda given: into["a"].copy_(given["q"]), into, functions={"a": "neg_exp"})
    with pytest.raises(
        sm.StoreError, match="functions= names 'b', but the tensors of into= are a; use"
    ):
        record(lambda given: into["a"].copy_(given["q"]), into, functions={"b": "neg_exp"})


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "in bfloat16": lambda w: -torch.exp(w),
    "of another sign": lambda w: torch.exp(-w),
    "another function": lambda w: w + 1,
    "through float16": lambda w: -torch.exp(w.float()).half().float(),
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_built_in_function_that_the_loader_does_not_compute(device: str, others: str) -> None:
    into = {"A": torch.zeros(2, 3, device=device)}
    shapes = {"A_log": ((2, 6), "bfloat16")}

    def record_with(function: Callable[[Tensor], Tensor], name: str) -> sm.storage.Recorded:
        def load(given: dict[str, Tensor]) -> None:
            into["A"].copy_(function(given["A_log"].narrow(1, 2, 3)))

        return smt.record(load, shapes, into, functions={"A": name})

    with pytest.raises(
        sm.StoreError, match=r"'A' is not computed by 'neg_exp': neg_exp\(.*\) is .*; give the"
    ):
        record_with(OTHERS[others], "neg_exp")
    assert record_with(OTHERS[others], "own").natives[0].function == "own"
    assert record_with(lambda w: -torch.exp(w.float()), "neg_exp").natives[0].function == "neg_exp"


def test_a_single_bit_is_recorded_over_several_runs() -> None:
    into = {"a": torch.zeros(4, dtype=torch.bool)}
    shapes = {"q": ((4,), "bool")}
    found = smt.record(lambda given: into["a"].copy_(given["q"].flip(0)), shapes, into)
    assert found.natives[0].pieces[0].blocks == ((4, 1, -1),)


@pytest.mark.parametrize("ways", [("views",), ("numbers",), ("views", "numbers")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loader_s_own_error_is_named_and_everything_is_put_back(device: str, ways: Any) -> None:
    into = {"a": torch.ones(4, 3, device=device)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["k"])
        raise KeyError("no such layer")

    with pytest.raises(sm.StoreError, match=r"the loader raised KeyError: .*no such") as caught:
        record(load, into, ways=ways)
    assert isinstance(caught.value.__cause__, KeyError)
    assert device == "meta" or (into["a"] == 1).all()


def test_transformers_own_conversion_of_experts() -> None:
    """Its loader merges and concatenates the checkpoint's experts, and is recorded as it is."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False)
    with torch.device("meta"):
        into = transformers.Qwen3MoeForCausalLM(config).state_dict()
    shapes = {n: (tuple(t.shape), "float32") for n, t in into.items() if ".experts." not in n}
    inner = "model.layers.0.mlp.experts."
    for e in range(3):
        shapes |= {f"{inner}{e}.{x}_proj.weight": ((4, 8), "float32") for x in ("gate", "up")}
        shapes[f"{inner}{e}.down_proj.weight"] = (8, 4), "float32"

    def load(given: dict[str, Tensor]) -> None:
        model = transformers.Qwen3MoeForCausalLM
        made = model.from_pretrained(None, config=config, state_dict=dict(given))
        into.update(made.state_dict())

    found = smt.record(load, shapes, into)
    assert not found.unwritten
    seen = sm.storage.RecordedSide({0: found}).bind(shapes)
    layer = "model.layers.{l}.mlp.experts."
    row = f"{layer}gate_up_proj = {layer}{{e}}.[gate up]_proj.weight : e (gate + up) h"
    fused = {n: s for n, s in shapes.items() if n.endswith(("gate_proj.weight", "up_proj.weight"))}
    declared = bind(Stored(parse(row), (sm.Mesh(),)), fused)
    assert declared.slots(0).items() <= seen.slots(0).items()


def test_a_target_of_which_a_part_is_stored_as_it_is() -> None:
    into = {"a": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"][:2].copy_(given["q"][:2])
        into["a"][2:].copy_(-torch.exp(given["q"][2:]))

    with pytest.raises(sm.StoreError, match="part of 'a' is copied unchanged"):
        record(load, into, functions={"a": "neg_exp"})


def test_a_target_of_which_parts_are_computed_differently() -> None:
    """A function is of the whole target, and would be wrong for one of them."""
    into = {"a": torch.empty(8, 3, device="meta")}

    def load(given: dict[str, Tensor], second: Callable[[Tensor], Tensor]) -> None:
        into["a"][:4].copy_(-torch.exp(given["q"]))
        into["a"][4:].copy_(second(given["k"]))

    functions = {"a": "neg_exp"}
    with pytest.raises(
        sm.StoreError,
        match=r"one part of 'a' is computed by aten.exp.default, aten.neg.default, another",
    ):
        record(lambda given: load(given, torch.sigmoid), into, functions=functions)
    recorded = record(lambda given: load(given, lambda k: -k.exp()), into, functions=functions)
    assert not recorded.unwritten


ARGUMENTS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "number": [lambda w: w * 2, lambda w: w * 3],
    "tensor": [lambda w: w * torch.tensor(2.0), lambda w: w * torch.tensor(3.0)],
    "order": [lambda w: w - torch.tensor(1.0), lambda w: torch.tensor(1.0) - w],
    "bounds": [lambda w: w.clamp(-1, 1), lambda w: w.clamp(-2, 2)],
    "option": [torch.nn.functional.gelu, lambda w: torch.nn.functional.gelu(w, approximate="tanh")],
    "row": [lambda w: w * torch.arange(3.0).to(w.device), lambda w: w * torch.ones(3).to(w.device)],
}


@pytest.mark.parametrize("of", ARGUMENTS)
@pytest.mark.parametrize("equal", [True, False])
def test_parts_are_computed_with_arguments(of: str, equal: bool) -> None:
    """An operation with another scale is another function."""
    into = {"a": torch.empty(8, 3, device="meta")}
    one, other = ARGUMENTS[of]

    def load(given: dict[str, Tensor]) -> None:
        into["a"][:4].copy_(one(given["q"]))
        into["a"][4:].copy_((one if equal else other)(given["k"]))

    if equal and of != "row":
        assert not record(load, into, functions={"a": "f"}).unwritten
    else:
        # The tensors of two calls have no values here that could be compared.
        with pytest.raises(sm.StoreError, match=r"is computed by aten.\w+.\w+.*, another by aten"):
            record(load, into, functions={"a": "f"})


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
def test_what_is_put_in_place_has_the_type_of_the_target_and_its_aliases(ways: Any) -> None:
    into = {"a": torch.zeros(4, 3, dtype=torch.bfloat16)}
    with pytest.raises(
        sm.StoreError, match=r"dtype of 'a' from torch.bfloat16 to torch.float32; put"
    ):
        record(lambda given: into.update(a=given["q"].clone()), into, ways=ways)
    tied = torch.zeros(4, 3)
    both = {"a": tied, "b": tied}
    with pytest.raises(
        sm.StoreError, match="'b' shares memory with 'a' before the loader runs, but not"
    ):
        record(
            lambda given: both.update(a=given["q"].clone(), b=given["k"].clone()), both, ways=ways
        )
    with pytest.raises(sm.StoreError, match="the loader removed 'a' from into="):
        record(lambda given: both.pop("a"), both, ways=ways)


@pytest.mark.parametrize("ways", [("views", "numbers"), ("numbers",)])
def test_a_target_that_is_seen_transposed_once_it_is_stored(ways: Any) -> None:
    """The memory is the same, and its strides are not."""
    shapes = {"w": ((4, 4), "float32")}
    into = nn.Linear(4, 4, bias=False)

    def load(given: dict[str, Tensor]) -> None:
        into.weight.data.copy_(given["w"])
        into.weight = nn.Parameter(into.weight.data.t())

    found = smt.record(load, shapes, into, ways=ways)
    logical = np.arange(16).reshape(4, 4)
    assert (found.fill({"w": logical})["weight"] == logical.T).all()


def test_targets_of_one_memory_that_change_places() -> None:
    flat = torch.zeros(24)
    into = {"a": flat[:12].view(4, 3), "b": flat[12:].view(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["q"])
        into["b"].copy_(given["k"])
        into["a"], into["b"] = into["b"], into["a"]

    names = [native.pieces[0].tensor for native in record(load, into).natives]
    assert names == ["k", "q"]


PLACES: list[Callable[[Tensor], int]] = [
    Tensor.data_ptr,
    lambda t: t.untyped_storage().data_ptr(),
    lambda t: t.storage().data_ptr(),
]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("whose", ["logical", "stored"])
def test_a_loader_that_tells_tensors_by_their_addresses(
    place: Callable[[Tensor], int], whose: str
) -> None:
    device = "cpu" if whose == "logical" else "meta"
    into = {name: torch.zeros(4, 3, device=device) for name in "qk"}

    def load(given: dict[str, Tensor]) -> None:
        known = set()
        for name in into:
            told = place(given[name] if whose == "logical" else into[name])
            if told not in known:
                into[name].copy_(given[name])
            known.add(told)

    assert not record(load, into).unwritten


def repoint(made: list[Tensor]) -> None:
    other = torch.empty(4, 6, device=made[0].device)
    for tensor in made:
        tensor.data = other


def swap(made: list[Tensor]) -> None:
    for tensor in made:
        torch.utils.swap_tensors(tensor, torch.empty(4, 6, device=tensor.device))


@pytest.mark.parametrize("give_up", [repoint, swap])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_a_loader_s_own_tensors_give_up(
    device: str, give_up: Callable[[list[Tensor]], None]
) -> None:
    """New tensors lie at the same addresses, as there are many, and have other elements."""
    count = 40
    names = [f"w{i}" for i in range(count)]
    into = {name: torch.zeros(4, 6, device=device) for name in names}

    def load(given: dict[str, Tensor]) -> None:
        made = []
        for name in names[::2]:
            into[name].copy_(given[name])
            made.append(into[name].clone())
        give_up(made)
        for name in names[1::2]:
            first, second = given[name].chunk(2)
            into[name].copy_(torch.cat([second, first]))

    found = smt.record(load, dict.fromkeys(names, ((4, 6), "float32")), into)
    logical = {name: 24 * i + np.arange(24).reshape(4, 6) for i, name in enumerate(names)}
    stored = found.fill(logical, empty=-1)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(stored[name], np.roll(logical[name], 2 * (i % 2), axis=0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_of_a_scratch_module_that_is_cast(device: str) -> None:
    count = 40
    names = [f"w{i}" for i in range(count)]
    into = {name: torch.zeros(4, 6, device=device) for name in names}

    def load(given: dict[str, Tensor]) -> None:
        nn.Sequential(*[nn.Linear(6, 4) for _ in names]).bfloat16()
        for name in names:
            first, second = given[name].chunk(2)
            into[name].copy_(torch.cat([second, first]))

    assert not smt.record(load, dict.fromkeys(names, ((4, 6), "float32")), into).unwritten


def test_a_loader_that_leaves_out_tensors_without_data() -> None:
    into = {"q": torch.zeros(4, 3), "k": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        for name, target in into.items():
            if given[name].device.type != "meta":
                target.copy_(given[name])

    assert not record(load, into).unwritten


def test_a_loader_that_reads_a_target_keeps_its_values() -> None:
    """As engines read a map of experts to find the place of each."""
    into = {"a": torch.zeros(4, 3), "places": torch.tensor([2, 0, 3, 1])}

    def load(given: dict[str, Tensor]) -> None:
        into["a"][into["places"]] = given["q"]

    found = record(load, into)
    logical = np.arange(12).reshape(4, 3)
    assert (found.fill({"q": logical})["a"][[2, 0, 3, 1]] == logical).all()
    assert found.unwritten == {"places": 4}

    def load_again(given: dict[str, Tensor]) -> None:
        load(given)
        if given["q"].device.type != "meta":
            into["places"].fill_(0)

    with pytest.raises(sm.StoreError, match="'places' is loaded differently in two runs"):
        record(load_again, into)


def test_a_parameter_that_the_loader_swaps_is_put_back() -> None:
    into = nn.Linear(4, 4, bias=False)
    before, values, memory = into.weight, into.weight.tolist(), into.weight.data_ptr()
    before.mark = "weight"  # type: ignore[attr-defined]

    def load(given: dict[str, Tensor]) -> None:
        torch.utils.swap_tensors(into.weight, nn.Parameter(given["w"].t().contiguous()))

    found = smt.record(load, {"w": ((4, 4), "float32")}, into)
    logical = np.arange(16).reshape(4, 4)
    assert (found.fill({"w": logical})["weight"] == logical.T).all()
    assert into.weight is before and isinstance(before, nn.Parameter) and before.requires_grad
    assert (before.tolist(), before.data_ptr()) == (values, memory)
    assert vars(before) == {"mark": "weight"}


class Rounds(Tensor):
    """Keeps whole numbers, as weights that an engine quantizes keep theirs."""

    @staticmethod
    def __new__(cls) -> Rounds:
        return Tensor._make_wrapper_subclass(cls, (4, 3))

    def __init__(self) -> None:
        self.kept = torch.zeros(4, 3, dtype=torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].kept.copy_(args[1].round())
        return args[0]


def test_a_target_that_computes_what_it_keeps() -> None:
    """Its class takes a copy for a computation, which a run without data would not see."""
    into: dict[str, Tensor] = {"a": Rounds()}
    with pytest.raises(sm.StoreError, match="into= has Rounds as 'a', where a plain tensor"):
        record(lambda given: into["a"].copy_(given["q"]), into)


STRANGE = {
    "has no shape yet; run its lazy module": nn.UninitializedParameter(),
    "a nested tensor, of 2 parts": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "layout torch.sparse_coo, where torch.strided": torch.zeros(4, 3).to_sparse(),
}


@pytest.mark.parametrize("said", STRANGE)
def test_a_target_that_is_not_a_strided_tensor(said: str) -> None:
    into = {"a": torch.zeros(4, 3), "b": STRANGE[said]}
    with pytest.raises(sm.StoreError, match=f"into= has 'b'.* {said}"):
        record(lambda given: into["a"].copy_(given["q"]), into)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", ["target", "clone"])
def test_a_thread_that_computes_without_logical_tensors(what: str, device: str) -> None:
    """As engines repack weights in threads, once these are loaded."""
    into = {"a": torch.zeros(4, 3, device=device)}

    def load(given: dict[str, Tensor]) -> None:
        copied = given["q"].clone().as_subclass(Tensor)
        changed = {"target": into["a"], "clone": copied}[what]
        into["a"].copy_(copied)
        thread = threading.Thread(target=changed.mul_, args=(2,))
        thread.start()
        thread.join()
        if what == "clone":
            into["a"].copy_(copied)

    start = threading.Thread.start
    with pytest.raises(sm.StoreError, match=r"'a' is computed by aten.mul_.Tensor"):
        record(load, into)
    assert threading.Thread.start is start


def test_names_that_recording_gives_to_two_tensors() -> None:
    chunks = [{"A": torch.zeros(2), "A of chunk 1": torch.zeros(2)}, {"A": torch.zeros(2)}]
    with pytest.raises(sm.StoreError, match="'A' in virtual stage 1, which recording calls 'A of"):
        smt.record(lambda _: None, {"a": ((2,), "float32")}, chunks)


@pytest.mark.parametrize(("dim", "first", "fits"), [(0, 3, True), (1, 2, False), (2, 2, True)])
def test_parts_of_a_tensor_with_dimensions_in_a_cycle_begin_with_tiles(
    dim: int, first: int, fits: bool
) -> None:
    """The part behind the `first` positions of dimension `dim`, in a tensor of dimensions 1, 2 and 0."""
    tiles = formats.FP8Blocks((4, 2))
    second = (2, 8, 8)
    shapes = {"a": (*second[:dim], first, *second[dim + 1 :]), "b": second}
    data = {name: (shape, "uint8") for name, shape in shapes.items()}
    scales = {f"{n}_scale_inv": (tiles.scale_shape(s), "float32") for n, s in shapes.items()}
    into = {}
    for part, of, dtype in (("", data, torch.uint8), ("_scale_inv", scales, torch.float32)):
        fused = torch.cat([torch.empty(shape, dtype=dtype) for shape, _ in of.values()], dim)
        into[f"ab{part}"] = fused.permute(1, 2, 0).contiguous()

    def load(given: dict[str, Tensor]) -> None:
        for part in ("", "_scale_inv"):
            sizes = [given[name + part].shape[dim] for name in "ab"]
            views = into[f"ab{part}"].permute(2, 0, 1).split(sizes, dim)
            for name, view in zip("ab", views, strict=True):
                view.copy_(given[name + part])

    engine = sm.storage.RecordedSide({1: smt.record(load, data | scales, into)})
    held = {name: (shape, "bfloat16") for name, shape in shapes.items()}
    trainer = {n: sm.Layout(s, sm.Mesh(), "...", dtype="bfloat16") for n, s in shapes.items()}
    rules = {"[ab]": transforms.Quantize(tiles)}
    fault = rf"'b' begins at {first} in dimension {dim} of 'ab' on rank 1, its scales at 1 of"
    with nullcontext() if fits else pytest.raises(sm.StoreError, match=fault):
        sm.verify(sm.refit(trainer, engine, held, served=data | scales, rules=rules).plan)
