"""Change laws: what is sent of a tensor of which a few elements have changed.

A law is a function with a one-line docstring that asserts; one law, one cause of failure.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np

from shardmath.changes.routing import Receivers, Senders, count_elements
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath.programs.messages import Message
from shardmath.programs.part import make_parts
from shardmath.testing.oracle import Array, addends, distribute, run

__all__ = ["changes_are_the_difference"]


def changes_are_the_difference(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """The changed elements, put into what a move brought before, are what a move brings now."""
    p = plan(src, dst)
    (old,) = addends(src)
    new = old.copy()
    which = data.draw(st.lists(st.integers(0, max(old.size - 1, 0)), max_size=8))
    new.flat[which[: old.size]] += 1
    before = distribute(src, [old])
    after = distribute(src, [new])
    held = run(p, before)
    for rank, message, cells, values in _list_changes(p, before, after):
        layout_shape = dst.local_shape(rank)
        strides = np.empty(layout_shape, np.int8).strides
        placed = Receivers({"": strides}, [message]).place(0, cells)
        flat = held[rank].reshape(-1)
        assert len(set(placed.cell.tolist())) == len(placed.cell)
        assert not placed.tensor.any()
        flat[placed.cell] = values
    for rank, expected in run(p, after).items():
        assert np.array_equal(held[rank], expected)


def _list_changes(
    p: Plan, before: dict[int, Array], after: dict[int, Array]
) -> list[tuple[int, Message, Array, Array]]:
    """For each message of which something changed: who receives it, itself, the elements' numbers and values."""
    found = []
    for part in make_parts(p):
        messages = [m for one in part.rounds for m in (*one.sends, *one.keeps)]
        if part.rank not in before:
            continue
        held = after[part.rank].reshape(-1)
        cells = np.flatnonzero(before[part.rank].reshape(-1) != held)
        routed = Senders({"": after[part.rank].shape}, messages).route("", cells)
        assert len(set(zip(routed.message, routed.element, strict=True))) == len(routed.cell)
        for number, message in enumerate(messages):
            here = routed.message == number
            elements = routed.element[here]
            assert (elements < count_elements(message)).all()
            values = held[cells[routed.cell[here]]]
            found.append((message.dst_rank, message, elements, values))
    return found
