"""What a layout is called by DTensor and JAX, read back by an interpreter that knows neither module."""

from __future__ import annotations

import ast
import itertools
import math

import numpy as np
import pytest
from hypothesis import given

import shardmath as sm
from shardmath import Layout, Mesh
from shardmath.display.explorer.spellings import MOST_AXES, spell
from shardmath.testing import layouts

Held = dict[int, list[list[int]]]


def list_held(layout: Layout) -> Held:
    """The positions of each rank, in order, by dimension."""
    return {
        rank: [np.sort(part).tolist() for part in layout.indices(rank)]
        for rank in layout.mesh.ranks
    }


def divide(shape: tuple[int, ...], mesh: Mesh, spec: tuple[tuple[str, ...], ...]) -> Held | None:
    """What ranks hold by a PartitionSpec: equal parts along the axes of each dimension, the last axis fastest."""
    held: Held = {}
    for rank in mesh.ranks:
        held[rank] = []
        coordinates = mesh.coords(rank)
        for size, axes in zip(shape, spec, strict=True):
            part, parts = 0, 1
            for axis in axes:
                count = mesh.axis_size(axis)
                part = part * count + coordinates[axis]
                parts *= count
            if size % parts:
                return None
            length = size // parts
            held[rank].append(list(range(part * length, (part + 1) * length)))
    return held


def list_specs(ndim: int, axes: list[str]) -> list[tuple[tuple[str, ...], ...]]:
    """Every way to give axes to dimensions, in every order."""
    specs = []
    for owners in itertools.product(range(ndim + 1), repeat=len(axes)):
        orders = []
        for d in range(ndim):
            mine = [axis for axis, owner in zip(axes, owners, strict=True) if owner == d]
            orders.append(list(itertools.permutations(mine)))
        specs += list(itertools.product(*orders))
    return specs


def read_spec(text: str) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension of `P(...)`."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "P"
    entries = []
    for arg in call.args:
        entry = ast.literal_eval(arg)
        entries.append(() if entry is None else (entry,) if isinstance(entry, str) else entry)
    return tuple(entries)


def read_unreduced(text: str) -> set[str]:
    """The axes along which ranks hold addends, by `unreduced=`."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return {axis for keyword in call.keywords for axis in ast.literal_eval(keyword.value)}


@given(layouts() | layouts(op="sum") | layouts(op="max"))
def test_spellings_mean_the_layout(layout: Layout) -> None:
    dtensor, jax = spell(layout)
    if dtensor.text:
        names = {
            "_StridedShard": lambda dim, split_factor: sm.StridedShard(dim, split_factor),
            "Shard": sm.Shard,
            "Replicate": sm.Replicate,
            "Partial": sm.Partial,
        }
        placements = eval(dtensor.text, {"__builtins__": {}}, names)
        reading = "order" if "order" in dtensor.note else "placement"
        again = Layout(layout.shape, layout.mesh, placements, dtype=layout.dtype, reading=reading)
        assert list_held(again) == list_held(layout) and again.partial == layout.partial
    else:
        assert dtensor.note
    if jax.text:
        assert divide(layout.shape, layout.mesh, read_spec(jax.text)) == list_held(layout)
        assert read_unreduced(jax.text) == {axis for axis, op in layout.partial if op == "sum"}
        assert all(op == "sum" for _, op in layout.partial)
    else:
        assert jax.note


@pytest.mark.parametrize(
    "text",
    ["(a b n) h", "(b a n) h", "(a n) (b h)", "(2 a n) h", "(a*b n) h", "n (b h)", "(n a) (b h)"],
)
@pytest.mark.parametrize("shape", [(8, 4), (6, 4), (9, 4), (4, 4)])
def test_a_partition_spec_is_found_if_there_is_one(text: str, shape: tuple[int, int]) -> None:
    layout = Layout(shape, Mesh(a=2, b=2), text)
    held = list_held(layout)
    makes = [spec for spec in list_specs(2, ["a", "b"]) if divide(shape, layout.mesh, spec) == held]
    _, jax = spell(layout)
    assert bool(jax.text) == bool(makes)


def test_what_has_no_spelling_says_why() -> None:
    mesh = Mesh(dp=2, tp=2)
    fields = Layout((8, 4), mesh, "(4: tp n + 4: dp n) h")
    assert "DTensor cannot express dimension 0 so: no Shard" in spell(fields)[0].note
    notes = {
        "(tp n)=10 h": "JAX cannot express dimension 0: it has no padding",
        "n h {max: tp}": "a PartitionSpec has unreduced sums, but no max",
        "(tp dp n) h": "9 positions do not divide evenly into 4 parts",
    }
    for text, note in notes.items():
        shape = (9, 4) if "dp" in text else (8, 4)
        _, jax = spell(Layout(shape, mesh, text))
        assert note in jax.note
    axes = {f"a{i}": 2 for i in range(MOST_AXES + 1)}
    many = Layout((math.prod(axes.values()),), Mesh(axes), f"({' '.join(axes)} n)")
    assert all("not looked for" in spelling.note for spelling in spell(many))


def test_what_would_take_minutes_is_not_looked_for() -> None:
    """Four axes of sizes without common factors have 16^4 placements."""
    layout = Layout((420, 4), Mesh(a=2, b=3, c=5, d=7), "(210: a b c d n + 210: d c b a n) h")
    dtensor, jax = spell(layout)
    assert "more than 1,000 placements" in dtensor.note and jax.note
    plain = Layout((420, 4), Mesh(a=2, b=3), "(a*b n) h")
    assert all(spelling.text for spelling in spell(plain))


def test_notes_on_readings() -> None:
    mesh = Mesh(dp=4, tp=2)
    assert spell(Layout((9, 4), mesh, "(tp dp n) h"))[0].note == "read in FSDP2's order of splits"
    strided = Layout((9, 4), mesh, (sm.StridedShard(0, 2), sm.Shard(0)))
    assert spell(strided)[0].note == "read from left to right"
