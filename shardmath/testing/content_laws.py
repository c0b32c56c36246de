"""Content laws: the laws of digests of tensors' content, and of sending only changed elements.

The definition of a digest is repeated here, element by element in Python's integers: it shares no code
with `shardmath.values.digests`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from hashlib import sha256, shake_256
from typing import Any, NamedTuple, TypeAlias

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
from shardmath.base.errors import DigestError
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath.plans.programs.messages import Message
from shardmath.plans.programs.part import make_parts
from shardmath.testing.oracle import Array, addends, distribute, run
from shardmath.testing.strategies import tilings
from shardmath.values.changes.placing import Lying, Receivers
from shardmath.values.changes.routing import AskedCells, Senders, count_elements
from shardmath.values.digests.content import Difference, digest_of, find_difference

__all__ = [
    "any_change_is_found",
    "changes_are_the_difference",
    "define_digest",
    "digest_is_its_definition",
    "digest_survives_moves",
    "replicas_are_compared",
    "windows_have_the_digest",
]

PRIME = 2**61 - 1


def define_digest(array: NDArray[Any], dtype: str, seed: int = 0) -> int:
    """Compute the digest (content checksum) of a whole tensor, element by element, as a reference for tests. `array`
    has its values, `dtype` is the name of its dtype, and `seed` selects the digest's random weights."""
    sealed = f"shardmath digest of {dtype}{list(array.shape)}"
    drawn = sha256(sealed.encode()).digest()
    total = int.from_bytes(drawn, "little")
    for index in itertools.product(*map(range, array.shape)):
        weight = 1
        for dimension, position in enumerate(index):
            weight *= _weigh(seed, dimension, position)
        # The words of an element are positions of one more dimension, number -1.
        for word, value in enumerate(_list_words(array[index].tobytes())):
            total += weight * _weigh(seed, -1, word) * value
    return total % PRIME


def _list_words(bits: bytes) -> list[int]:
    """The bytes of an element as signed integers of 16 bits, or of 8 bits if it is one byte."""
    size = min(2, len(bits))
    starts = range(0, len(bits), size)
    parts = [bits[start : start + size] for start in starts]
    return [int.from_bytes(part, "little", signed=True) for part in parts]


def _weigh(seed: int, dimension: int, position: int) -> int:
    """The weight of a position: the product of the factors of its set bits, each drawn as 16 bytes."""
    text = f"shardmath digest {seed} {dimension}"
    drawn = shake_256(text.encode()).digest(1024)
    weight = 1
    for bit in range(position.bit_length()):
        if position >> bit & 1:
            factor = drawn[16 * bit : 16 * bit + 16]
            number = int.from_bytes(factor, "little")
            weight = weight * (number % (PRIME - 1) + 1) % PRIME
    return weight


def _draw_bits(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Random bits as float64, NaNs of all kinds among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 64, shape, np.uint64, endpoint=False).view(np.float64)


def digest_is_its_definition(layout: Layout) -> None:
    """Check that the digest (checksum) computed from ranks' local arrays equals the digest that `define_digest`
    computes from the whole array. Holes (positions without an element) contain NaN, which must not matter."""
    values = _draw_bits(layout.shape)
    held = distribute(layout, [values], hole=np.nan)
    for seed in (0, 7):
        wanted = define_digest(values, layout.dtype, seed)
        assert digest_of(layout, held, seed=seed) == wanted


def digest_survives_moves(src: Layout, dst: Layout) -> None:
    """Check that a plan without reductions leaves a tensor's digest unchanged."""
    held = distribute(src, [_draw_bits(src.shape)])
    moved = run(plan(src, dst), held)
    assert digest_of(src, held) == digest_of(dst, moved)
    assert find_difference(src, held, dst, moved) is None


def windows_have_the_digest(data: st.DataObject, layout: Layout) -> None:
    """Check that a tensor held as windows (layouts that together hold it) has the tensor's digest, even if windows
    overlap."""
    values = _draw_bits(layout.shape)
    held = distribute(layout, [values])
    tiles = Windows((*data.draw(tilings(layout)), *data.draw(tilings(layout))))
    given: dict[int, dict[str, Array]] = {rank: {} for rank in held}
    for key, window_layout in tiles.locals("w"):
        for rank, array in distribute(window_layout, [values], hole=np.inf).items():
            given[rank][key] = array
    assert digest_of({"w": tiles}, given) == {"w": digest_of(layout, held)}


def any_change_is_found(data: st.DataObject, layout: Layout) -> None:
    """Check that a flipped bit changes the digest, and that `find_difference` finds its element."""
    if 0 in layout.shape:
        return
    values = _draw_bits(layout.shape)
    index = tuple(data.draw(st.integers(0, n - 1)) for n in layout.shape)
    bit = data.draw(st.integers(0, 63))
    changed = values.copy()
    words = changed.view(np.uint64)
    words[index] ^= np.uint64(1 << bit)
    before = distribute(layout, [values])
    after = distribute(layout, [changed])
    assert digest_of(layout, before) != digest_of(layout, after)
    box = tuple((position, position + 1) for position in index)
    difference = find_difference(layout, before, layout, after)
    assert difference == Difference("", box)


def replicas_are_compared(data: st.DataObject, layout: Layout) -> None:
    """Check that a digest detects a flipped bit at one rank. If other ranks hold the same element, computing the digest
    must raise; if not, the digest must change."""
    held = distribute(layout, [_draw_bits(layout.shape)])
    before = digest_of(layout, held)
    rank = data.draw(st.sampled_from(layout.mesh.ranks))
    rank_held = _list_held(layout, rank)
    if not rank_held:
        return
    local_index, element = data.draw(st.sampled_from(rank_held))
    words = held[rank].view(np.uint64)
    words[local_index] ^= np.uint64(1)
    holders = [other for other in layout.mesh.ranks if _holds(layout, other, element)]
    if len(holders) == 1:
        assert digest_of(layout, held) != before
        return
    box = ", ".join(f"{position}:{position + 1}" for position in element)
    assert f" other bits in [{box}] than rank" in _explain_refusal(layout, held)


_Index: TypeAlias = tuple[int, ...]


def _list_held(layout: Layout, rank: int) -> list[tuple[_Index, _Index]]:
    """(local index, global index) of all elements that the rank holds."""
    indices = layout.indices(rank)
    cells = [np.flatnonzero(index >= 0).tolist() for index in indices]
    held = []
    for local in itertools.product(*cells):
        element = tuple(int(index[i]) for index, i in zip(indices, local, strict=True))
        held.append((local, element))
    return held


def _explain_refusal(layout: Layout, held: dict[int, Array]) -> str:
    """The error that these arrays have no digest; "" if they have one."""
    try:
        digest_of(layout, held)
    except DigestError as error:
        return str(error)
    return ""


def _holds(layout: Layout, rank: int, element: tuple[int, ...]) -> bool:
    """Whether the rank holds the element."""
    return all(
        position in index for index, position in zip(layout.indices(rank), element, strict=True)
    )


# What has changed


def changes_are_the_difference(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """Check that a repeated move can send changes only: the changed elements, written over the result of the first
    move, give the same as moving the changed tensor whole."""
    planned = plan(src, dst)
    (old,) = addends(src)
    last = max(old.size - 1, 0)
    which = data.draw(st.lists(st.integers(0, last), max_size=8))
    new = old.copy()
    # The slice leaves no index if the tensor is empty.
    new.flat[which[: old.size]] += 1
    before = distribute(src, [old])
    after = distribute(src, [new])
    held = run(planned, before)
    for sent in _list_changes(planned, before, after):
        rank = sent.message.dst_rank
        _put(held[rank], sent)
    for rank, expected in run(planned, after).items():
        assert np.array_equal(held[rank], expected)


class _Sent(NamedTuple):
    """Elements of a message, ascending, and their values."""

    message: Message
    elements: Ints
    values: Array


def _put(destination: Array, sent: _Sent) -> None:
    """Put the elements that were sent into the destination."""
    # Strides of bytes count elements.
    strides = np.empty(destination.shape, np.int8).strides
    lying = Lying(0, 0, strides)
    receivers = Receivers({"": lying}, [sent.message])
    flat = destination.reshape(-1)
    for storage, indices, cells in receivers.place(0, sent.elements):
        assert storage == 0
        assert len(np.unique(cells)) == len(sent.elements)
        flat[cells] = sent.values[indices]


def _list_changes(plan: Plan, before: dict[int, Array], after: dict[int, Array]) -> Iterator[_Sent]:
    """The changed elements in each message."""
    for part in make_parts(plan):
        if part.rank not in before:
            continue
        messages: list[Message] = []
        for round_ in part.rounds:
            messages += round_.sends
            messages += round_.keeps
        held = after[part.rank]
        held_before = before[part.rank]
        cells = np.flatnonzero(held != held_before)
        values = held.reshape(-1)[cells]
        senders = Senders({"": held.shape}, messages)
        cell, piece, element = _route(senders, cells)
        pairs = set(zip(piece.tolist(), element.tolist(), strict=True))
        assert len(pairs) == len(cell), "each element is sent once in a message"
        for message, pieces in zip(messages, senders.pieces, strict=True):
            is_own = np.isin(piece, pieces)
            elements = element[is_own]
            taken = values[cell[is_own]]
            order = elements.argsort()
            assert (elements < count_elements(message)).all()
            yield _Sent(message, elements[order], taken[order])


def _route(senders: Senders, cells: Ints) -> Ints:
    """Three rows, of all batches together: the numbers of cells, of pieces, and of elements."""
    nothing = np.zeros((3, 0), np.int64)
    batches = [nothing]
    for routed in senders.route([AskedCells("", cells)]):
        batches.append(np.stack(routed))
    return np.concatenate(batches, 1)
