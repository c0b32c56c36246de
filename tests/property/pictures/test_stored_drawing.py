"""Pictures of stored tensors: each number in them is that of arrays filled with the numbers of elements."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

import shardmath as sm
from shardmath import formats, storage, transforms
from shardmath.display.pictures.stored_drawing import MOST_CELLS, MOST_SOURCES
from shardmath.display.pictures.stored_pieces import PiecedTensor, find_stored
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.models.systems.vllm import vllm
from shardmath.pictures import svg
from shardmath.plans.protocol import TABLE

SVG = "{http://www.w3.org/2000/svg}"
Arrays: TypeAlias = Mapping[str, NDArray[Any]]

MEGATRON = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def vllm_refit() -> sm.Refit:
    """Megatron on two ranks into vLLM on four."""
    shapes = logical_shapes(MEGATRON, vocab=100, dtype="bfloat16")
    trainer = megatron(MEGATRON, ranks=range(2), tp=2, vocab=100)
    return sm.refit(trainer, vllm(LLAMA, ranks=range(2, 6), tp=4), shapes)


def rows_refit(text: str, shapes: Mapping[str, tuple[int, ...]], spec: str) -> sm.Refit:
    """A trainer of four ranks, with all tensors in one layout, into an engine of these rows on two ranks."""
    mesh = sm.Mesh(dp=2, tp=2)
    plain = {name: sm.Layout(shape, mesh, spec, dtype="int32") for name, shape in shapes.items()}
    engine = storage.Stored(
        storage.parse(text), (sm.Mesh(tp=2, ranks=(4, 5)),), numbers={"half": 4}
    )
    return sm.refit(plain, engine, {name: (shape, "int32") for name, shape in shapes.items()})


EXPERTS = {f"x.{i}.{name}": (4, 6) for i in range(3) for name in ("gate", "up")}
PAIR = {"gate": (8, 12), "up": (8, 12)}
REFITS: dict[str, Callable[[], sm.Refit]] = {
    "vllm": vllm_refit,
    "columns": lambda: rows_refit("gu = [gate up] : (gate + up) h", PAIR, "n (tp h)"),
    "alternating": lambda: rows_refit("gu = [gate up] : (tp half (gate + up)) h", PAIR, "(tp n) h"),
    "transposed": lambda: rows_refit(
        "gu = [gate up].T : h (tp (gate + up))", PAIR, "(tp n) (dp h)"
    ),
    "padded": lambda: rows_refit("a = gate : (tp n=10) h\nb = up", PAIR, "(dp tp n) h"),
    "experts": lambda: rows_refit(
        "w = x.{e}.[gate up] : e (tp (gate + up)) h", EXPERTS, "n (dp h)"
    ),
    "replicas": lambda: rows_refit("gu = [gate up] : (gate + up | tp n) h", PAIR, "(tp n) h"),
}


def number_elements(side: Any) -> dict[str, NDArray[Any]]:
    """The logical tensors, with a number for each element of all of them, from 1 on."""
    arrays, first = {}, 1
    for name, layout in side.layouts.items():
        size = int(np.prod(layout.shape))
        arrays[name] = np.arange(first, first + size).reshape(layout.shape)
        first += size
    return arrays


def named(side: Any, arrays: Arrays, rank: int) -> dict[str, NDArray[Any]]:
    """What the rank stores, by name, 0 where it stores nothing."""
    return {name: array for (_, name), array in storage.fill(side, arrays, rank).items()}


def read_box(text: str) -> tuple[slice, ...]:
    """The slices that are written in `text`."""
    parts = [[int(n) for n in part.split(":")] for part in text.strip("[]").split(", ")]
    return tuple(slice(*part) for part in parts)


def numbers_in(array: NDArray[Any], box: str) -> list[int]:
    """The numbers in a box, ascending, since a side may store it transposed."""
    return sorted(array[read_box(box)].ravel().tolist())


def read_table(root: ElementTree.Element) -> list[list[str]]:
    """The rows of the table, whose columns are groups of texts; its first column begins with an empty text."""
    for group in root.iter(f"{SVG}g"):
        columns = [[x.text or "" for x in column.iter(f"{SVG}text")] for column in group]
        if columns and columns[0][:1] == [""] and len(columns) > 2:
            return [list(row) for row in zip(*columns, strict=True)][1:]
    return []


def list_titles(root: ElementTree.Element) -> Iterator[str]:
    """The titles of boxes."""
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            yield title.text or ""


@pytest.mark.parametrize("name", REFITS)
def test_what_is_drawn_is_what_arrays_hold(name: str) -> None:
    refit = REFITS[name]()
    engine = refit.engines["engine"]
    arrays = number_elements(engine)
    sent = {rank: named(refit.trainer, arrays, rank) for rank in refit.trainer.ranks}
    for rank in engine.ranks:
        held = named(engine, arrays, rank)
        for native in held:
            root = ElementTree.fromstring(refit.svg(native, rank))
            table = read_table(root)
            prefix = find_prefix(root)
            drawn: list[int] = []
            for _, positions, holds, source in table:
                tensor, box = holds.split(" ", 1)
                found = numbers_in(held[native], positions)
                assert found == numbers_in(arrays[tensor], box)
                _, sender, stored, there = source.split(" ", 3)
                assert found == numbers_in(sent[int(sender)][prefix + stored], there)
                drawn += found
            # These pictures leave nothing out: each element is in one row of the table.
            assert sorted(drawn) == sorted(held[native][held[native] > 0].tolist())
            check_boxes(root, held[native], table)


def find_prefix(root: ElementTree.Element) -> str:
    """What the trainer's names are said to begin with."""
    head = "the trainer's names begin with "
    texts = [x.text or "" for x in root.iter(f"{SVG}text")]
    return next((text.removeprefix(head) for text in texts if text.startswith(head)), "")


def check_boxes(root: ElementTree.Element, held: NDArray[Any], table: list[list[str]]) -> None:
    """The boxes of the engine's tensor are all of its elements, each in the piece of its number; others are padding."""
    boxes: Counter[int] = Counter()
    # Boxes of the trainer's tensors come later.
    area = 0
    for title in list_titles(root):
        if area == held.size:
            break
        box, what = re.split(r"(?<=\]) ", title, maxsplit=1)
        found = held[read_box(box)].ravel().tolist()
        area += len(found)
        if what == "padding":
            assert set(found) == {0}
            continue
        number, _ = what.split(":", 1)
        _, positions, *_ = table[int(number) - 1]
        assert set(found) <= set(numbers_in(held, positions))
        boxes.update(found)
    assert area == held.size
    assert boxes == Counter(held[held > 0].tolist())
    said = [x.text or "" for x in root.iter(f"{SVG}text")]
    padding = held.size - np.count_nonzero(held)
    assert any(text.startswith(f"hatched: padding, {padding:,} of") for text in said) == (
        padding > 0
    )


def test_the_default_is_the_first_fused_tensor_of_the_first_rank() -> None:
    refit = vllm_refit()
    assert svg(refit) == refit.svg(QKV, 2) == svg(refit, tensor=QKV)
    assert f"<title>{QKV} on engine rank 2</title>" in refit.svg()
    # A rank of the trainer stores tensors too, to which nothing is sent.
    text = refit.svg(rank=1)
    assert "linear_qkv.weight on trainer rank 1</title>" in text and "come from" not in text


def test_a_bound_side_is_drawn_without_sources() -> None:
    refit = vllm_refit()
    native = "decoder.layers.0.self_attention.linear_qkv.weight"
    root = ElementTree.fromstring(svg(refit.trainer, tensor=native, rank=1))
    arrays = number_elements(refit.trainer)
    held = named(refit.trainer, arrays, 1)[native]
    table = read_table(root)
    for _, positions, holds in table:
        tensor, box = holds.split(" ", 1)
        assert numbers_in(held, positions) == numbers_in(arrays[tensor], box)
    check_boxes(root, held, table)
    layouts = {"<w>": sm.Layout((4,), sm.Mesh(tp=2), "(tp n)")}
    plain = sm.refit(layouts, layouts, {"<w>": ((4,), "float32")})
    assert "&lt;w&gt; on engine rank 1" in plain.svg(rank=1)


def test_a_function_and_a_transform_are_named() -> None:
    shapes = {"A_log": ((4,), "float32"), "w": ((4, 4), "bfloat16")}
    apart = storage.Stored(storage.parse("A_log = A_log\nw = w"), (sm.Mesh(),))
    engine = storage.Stored(storage.parse("A = neg_exp(A_log)\nw = w"), (sm.Mesh(ranks=(1,)),))
    assert ">neg_exp(A_log [0:4])<" in sm.refit(apart, engine, shapes).svg("A")
    tiles = formats.FP8Blocks((2, 4))
    served = {
        "A_log": shapes["A_log"],
        "w": ((4, 4), "float8_e4m3fn"),
        "w_scale_inv": (tiles.scale_shape((4, 4)), "float32"),
    }
    rows = storage.parse("A = neg_exp(A_log)\nw = w\ns = w_scale_inv")
    quantized = sm.refit(
        apart,
        storage.Stored(rows, (sm.Mesh(ranks=(1,)),)),
        shapes,
        served=served,
        rules={"w": transforms.Quantize(tiles)},
    )
    assert ">made by Quantize<" in quantized.svg("w")
    assert ">made by Quantize<" in quantized.svg("s")
    assert ">rank 0 A_log [0:4]<" in quantized.svg("A")


def test_one_of_several_engines_is_drawn() -> None:
    shapes = {"a": ((4, 2), "float32"), "b": ((4, 2), "float32")}
    apart = storage.Stored(storage.parse("a = a\nb = b"), (sm.Mesh(),))
    fused = storage.Stored(storage.parse("ab = [a b] : (a + b) h"), (sm.Mesh(ranks=(1,)),))
    cut = storage.Stored(
        storage.parse("ab = [a b] : (tp (a + b)) h"), (sm.Mesh(tp=2, ranks=(1, 2)),)
    )
    other = storage.Stored(storage.parse("ab = [b a] : (b + a) h"), (sm.Mesh(ranks=(3,)),))
    refit = sm.refit(apart, {"one": fused, "two": cut, "three": other}, shapes)
    assert "on engine one rank 1<" in refit.svg()
    text = refit.svg(engine="two", rank=1)
    assert "on engine two rank 1<" in text and ">[2:4, 0:2]<" in text and ">b [0:2, 0:2]<" in text
    assert ">rank 0 b [0:2, 0:2]<" in text
    rest = refit.without("three")
    assert rest.svg(engine="two", rank=1) == text
    with pytest.raises(sm.PlanError, match="no engine 'three'; pass one of one, two"):
        rest.svg(engine="three")


def test_scalars_and_empty_tensors_are_drawn() -> None:
    shapes = {"s": ((), "float32"), "none": ((0, 4), "float32"), "w": ((2, 1, 3, 2), "float32")}
    apart = storage.Stored(storage.parse("s = s\nnone = none\nw = w"), (sm.Mesh(),))
    refit = sm.refit(apart, apart, shapes)
    assert read_table(ElementTree.fromstring(refit.svg("s"))) == [
        ["1", "[]", "s []", "rank 0 s []"]
    ]
    root = ElementTree.fromstring(refit.svg("none"))
    assert read_table(root) == [] and list(list_titles(root)) == []
    assert "[0:2, 0:1, ↓, →]" in refit.svg("w")


def test_what_is_not_there_is_an_error() -> None:
    refit = vllm_refit()
    with pytest.raises(sm.StoreError, match="rank 3 does not store a tensor 'w'; pass one of"):
        refit.svg("w", 3)
    with pytest.raises(sm.StoreError, match="no rank stores a tensor 'w'"):
        refit.svg("w")
    with pytest.raises(sm.StoreError, match="neither an engine nor the trainer has rank 9"):
        refit.svg(rank=9)
    with pytest.raises(sm.StoreError, match=r"rank 9 is not on this side; .* ranks \[2, 3, 4, 5\]"):
        refit.svg(rank=9, engine="engine")
    with pytest.raises(sm.StoreError, match="a rank"):
        refit.svg(rank="1")  # type: ignore[arg-type]


def large() -> sm.Refit:
    """From 128 ranks, each of which sends a few rows of each of 64 heads."""
    wide = {"num_attention_heads": 64, "hidden_size": 4096}
    trainer = MEGATRON | wide | {"num_query_groups": 64, "ffn_hidden_size": 8192}
    engine = LLAMA | wide | {"num_key_value_heads": 64, "intermediate_size": 8192}
    shapes = logical_shapes(trainer, vocab=100, dtype="bfloat16")
    source = megatron(trainer, ranks=range(128), tp=2, vocab=100)
    return sm.refit(source, vllm(engine, ranks=range(128, 132), tp=4), shapes)


def test_a_large_tensor_leaves_out_its_middle_and_says_so() -> None:
    refit = large()
    found = find_stored(refit, QKV, 129)
    assert_exact(found)
    text = refit.svg(QKV, 129)
    assert len(text) < 200_000
    root = ElementTree.fromstring(text)
    table = read_table(root)
    assert len(table) == MOST_CELLS < len(found.pieces)
    ranks = {piece.source.rank for piece in found.pieces if piece.source}
    said = [x.text or "" for x in root.iter(f"{SVG}text")]
    assert f"{MOST_CELLS} of {len(found.pieces)} pieces are drawn, from {len(ranks)} ranks" in said
    half = MOST_CELLS // 2
    last, first = (read_box(table[i][1])[0] for i in (half - 1, half))
    assert f"gap: rows {last.stop:,} to {first.start - 1:,}" in " ".join(said)
    assert sum(text.startswith("from trainer rank ") for text in said) <= MOST_SOURCES


def assert_exact(found: PiecedTensor) -> None:
    """The pieces are those of the transfers, and each position is in one of them."""
    seen = np.zeros(found.shape, np.int8)
    for piece in found.pieces:
        assert piece.source is not None
        seen[tuple(slice(span.start, span.stop, span.step) for span in piece.cells)] += 1
    assert (seen == 1).sum() == seen.size - found.padding and seen.max() == 1


def test_every_entry_of_the_protocol_is_in_the_figure_once() -> None:
    place = Path(__file__).parents[3] / "tools" / "states_figure.py"
    spec = importlib.util.spec_from_file_location("states_figure", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = ElementTree.fromstring(module.figure())
    titles = Counter(x.findtext(f"{SVG}title") for x in root.iter(f"{SVG}path"))
    entries = [
        f"{state.value}, {event.value}: {target.value}"
        for state, events in TABLE.items()
        for event, target in events.items()
    ]
    assert titles - Counter([None] * len(titles)) == Counter(entries)
    texts = Counter(x.text for x in root.iter(f"{SVG}text"))
    events = Counter(event.value for row in TABLE.values() for event in row)
    states = Counter(state.value for state in TABLE)
    assert events + states <= texts
    for style, count in itertools.chain(events.items(), states.items()):
        assert texts[style] == count
