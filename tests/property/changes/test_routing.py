"""Cells to elements of messages, and those to cells of memory: beside pieces that are gone through one by one."""

from __future__ import annotations

import numpy as np
import pytest

import shardmath as sm
from shardmath.plans.programs.messages import Message
from shardmath.plans.programs.part import make_parts
from shardmath.values.changes import routing
from shardmath.values.changes.placing import Lying, Receivers
from shardmath.values.changes.routing import AskedCells, Senders, find_hulls

MESH = sm.Mesh(tp=4)
EXPERTS = [f"expert {k}" for k in range(5)]


def make_plan() -> sm.Plan:
    """Tensors cut alike by rows and by columns, another, and one of which there are replicas."""
    src, dst = {}, {}
    for name in EXPERTS:
        src[name] = sm.Layout((12, 8), MESH, "(tp n) h")
        dst[name] = sm.Layout((12, 8), MESH, "n (tp h)")
    src["rows"] = sm.Layout((24, 4), MESH, "n (tp h)")
    dst["rows"] = sm.Layout((24, 4), MESH, "(tp n) h")
    src["all"] = sm.Layout((6, 2), sm.Mesh(tp=2), "(tp n) h")
    dst["all"] = sm.Layout((6, 2), sm.Mesh(tp=4, ranks=range(4)), "n h")
    return sm.plan(src, dst)


def split(plan: sm.Plan, rank: int) -> tuple[list[Message], list[Message]]:
    """What the rank sends or keeps, and what comes to it."""
    rounds = make_parts(plan)[rank].rounds
    leaving = [m for one in rounds for m in (*one.sends, *one.keeps)]
    coming = [m for one in rounds for m in (*one.receives, *one.keeps)]
    return leaving, coming


def shapes_of(side: sm.Plan, rank: int) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, windows in side.src.items():
        if rank in windows[0].mesh.ranks:
            found[name] = windows[0].local_shape(rank)
    return found


@pytest.mark.parametrize("batch", [1, 7, 1 << 16])
@pytest.mark.parametrize("rank", range(4))
def test_each_cell_goes_where_a_piece_has_it(
    rank: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of cells is routed together."""
    monkeypatch.setattr(routing, "BATCH", batch)
    plan = make_plan()
    shapes = shapes_of(plan, rank)
    leaving, _ = split(plan, rank)
    senders = Senders(shapes, leaving)
    rng = np.random.default_rng(rank)
    asked = []
    for key, shape in shapes.items():
        cells = np.flatnonzero(rng.random(int(np.prod(shape))) < 0.6)
        asked.append(AskedCells(key, cells))
    numbered = [(one.key, cell) for one in asked for cell in one.cells.tolist()]
    found = []
    for routed in senders.route(asked):
        columns = (column.tolist() for column in routed)
        found += [(*numbered[cell], *rest) for cell, *rest in zip(*columns, strict=True)]
    assert sorted(found) == sorted(search(shapes, leaving, numbered))


def search(
    shapes: dict[str, tuple[int, ...]], messages: list[Message], asked: list[tuple[str, int]]
) -> list[tuple[str, int, int, int]]:
    """(key, cell, piece, element) of each piece that has an asked cell."""
    wanted = set(asked)
    found = []
    number = 0
    for message in messages:
        element = 0
        for piece in message.pieces:
            key = piece.src_tensor
            cells = np.arange(int(np.prod(shapes[key]))).reshape(shapes[key])
            for cell in cells[piece.src_slices].ravel().tolist():
                if (key, cell) in wanted:
                    found.append((key, cell, number, element))
                element += 1
            number += 1
    return found


@pytest.mark.parametrize("rank", range(4))
def test_elements_come_to_the_cells_of_their_pieces(rank: int) -> None:
    """In tensors that share two rows of memory by turns, one of them transposed."""
    plan = make_plan()
    _, coming = split(plan, rank)
    lying, memories = {}, [np.zeros(400), np.zeros(400)]
    views = {}
    for number, (name, windows) in enumerate(plan.dst.items()):
        height, width = windows[0].local_shape(rank)
        row, start = number % 2, 3 + 50 * number
        steps = (1, height) if number == 3 else (width, 1)
        lying[name] = Lying(row, start, steps)
        strides = [8 * step for step in steps]
        views[name] = np.lib.stride_tricks.as_strided(
            memories[row][start:], (height, width), strides
        )
    receivers = Receivers(lying, coming)
    for number, message in enumerate(coming):
        count = sum(int(np.prod(piece.shape)) for piece in message.pieces)
        elements = np.arange(number % 3, count, 3)
        for row, which, cell in receivers.place(number, elements):
            memories[row][cell] = elements[which] + 1
        given = np.concatenate([views[p.dst_tensor][p.dst_slices].ravel() for p in message.pieces])
        expected = np.zeros(count)
        expected[elements] = elements + 1
        assert given.tolist() == expected.tolist()
    assert sum(map(np.count_nonzero, memories)) == sum(map(np.count_nonzero, views.values()))


def test_hulls_have_all_pieces_and_no_more() -> None:
    leaving, _ = split(make_plan(), 0)
    hulls = find_hulls(leaving)
    for key, hull in hulls.items():
        boxes = [p.src_slices for m in leaving for p in m.pieces if p.src_tensor == key]
        for k, one in enumerate(hull):
            assert one.start == min(box[k].start for box in boxes)
            assert one.stop == max(box[k].stop for box in boxes)
    # Of "all" each rank holds half of the rows or all, and not every holder sends.
    assert set(hulls) <= {*EXPERTS, "rows", "all"}
