"""Digests of content: what they tell apart, what they do not, and what has none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import shardmath as sm
from shardmath.base import dtypes
from shardmath.layouts.edits import cast
from shardmath.testing.content_laws import define_digest

ONE, TWO, FOUR = sm.Mesh(), sm.Mesh(tp=2), sm.Mesh(dp=2, tp=2)
NUMPY = sorted(name for name in dtypes.ITEMSIZE if hasattr(np, name))


def alone(array: np.ndarray, dtype: str | None = None, seed: int = 0) -> int:
    """The digest of a whole array on one rank."""
    text = " ".join("nhk"[: array.ndim])
    layout = sm.Layout(array.shape, ONE, text, dtype=dtype or array.dtype)
    return sm.content.digest_of(layout, {0: array}, seed=seed)


@pytest.mark.parametrize("dtype", [*NUMPY, "bfloat16", "float8_e4m3fn"])
def test_every_bit_of_every_dtype_counts(dtype: str) -> None:
    size = dtypes.itemsize(dtype)
    drawn = np.random.default_rng(1).integers(0, 2, 6 * size, np.uint8)
    array = drawn.view(dtype if hasattr(np, dtype) else f"u{size}").reshape(2, 3)
    found = {alone(array, dtype)}
    for byte, bit in itertools.product(range(6 * size), range(8)):
        changed = array.copy()
        changed.view(np.uint8).reshape(-1)[byte] ^= np.uint8(1 << bit)
        found.add(alone(changed, dtype))
    assert len(found) == 1 + 6 * size * 8


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "int64", "complex128"])
def test_rearranged_elements(dtype: str) -> None:
    """Swaps, permutations of rows and columns, shifts, and the same elements in another shape."""
    array = np.arange(1, 121, dtype=dtype).reshape(10, 12)
    swapped = array.copy()
    swapped[3, 4], swapped[3, 5] = array[3, 5], array[3, 4]
    others = [
        *(np.roll(array, by, axis) for by in range(1, 5) for axis in (0, 1, None)),
        *(array[np.random.default_rng(i).permutation(10)] for i in range(5)),
        *(array[:, np.random.default_rng(i).permutation(12)] for i in range(5)),
        swapped,
        array[::-1],
        array[:, ::-1],
        -array,
        array * 2,
        array.reshape(12, 10),
        array.T,
        array.reshape(120),
        array.reshape(5, 2, 12),
        array[None],
    ]
    found = {alone(np.ascontiguousarray(other)) for other in (array, *others)}
    assert len(found) == 1 + len(others)


def test_signs_of_many_elements() -> None:
    """Top bits do not cancel, in even numbers of elements either."""
    for dtype in ("int64", "float64", "float32", "int8"):
        zeros = np.zeros((4, 4), dtype)
        flipped = []
        for cells in itertools.combinations(range(16), 2):
            other = zeros.copy()
            other.view(np.uint8).reshape(16, -1)[list(cells), -1] = 0x80
            flipped.append(alone(other))
        assert len({alone(zeros), *flipped}) == 1 + 120
    assert alone(np.array([0.0])) != alone(np.array([-0.0]))
    payloads = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64)
    assert alone(payloads[:1], "float64") != alone(payloads[1:], "float64")


def test_dtype_shape_and_seed_enter() -> None:
    empty = [(), (0,), (1,), (0, 2), (2, 0), (1, 1)]
    zeros = [
        alone(np.zeros(shape, dtype))
        for shape in empty
        for dtype in ("float32", "int32", "float64")
    ]
    assert len(set(zeros)) == len(zeros)
    assert len({alone(np.ones((2, 3)), seed=seed) for seed in range(9)}) == 9


def test_digests_are_these() -> None:
    """Kept in files, they are the same in later versions."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert alone(values) == define_digest(values, "float32") == 1271690384323580899
    assert alone(values, seed=-5) == define_digest(values, "float32", -5)


def test_layouts_of_one_tensor() -> None:
    """Replicas, padding, storage order, meshes of any ranks, windows that overlap, and dtypes that numpy lacks."""
    values = np.random.default_rng(0).integers(0, 1 << 16, (9, 6), np.uint16)
    other = sm.Mesh(tp=3, ranks=(7, 2, 4))
    layouts = [
        sm.Layout((9, 6), FOUR, "(tp dp n) h", dtype="bfloat16"),
        sm.Layout((9, 6), FOUR, "n (tp h)", dtype="bfloat16"),
        sm.Layout((9, 6), FOUR, "n h", dtype="bfloat16"),
        sm.Layout((9, 6), other, "n (tp h)", dtype="bfloat16"),
        sm.Layout((9, 6), sm.Mesh(tp=4), "(tp n)=16 h", dtype="bfloat16"),
        sm.Layout((9, 6), TWO, "(3 tp n) h", dtype="bfloat16"),
    ]
    whole = alone(values, "bfloat16")
    for layout in layouts:
        assert sm.content.digest_of(layout, hold(layout, values)) == whole
    mesh = sm.Mesh(tp=2)
    row = sm.Layout((9, 6), mesh, "(tp n) h", dtype="bfloat16")
    windows = (sm.window(row, ((0, 7), (0, 6))), sm.window(row, ((3, 9), (0, 6))))
    local = [hold(one, values) for one in windows]
    arrays = {rank: {"w[0]": local[0][rank], "w[1]": local[1][rank]} for rank in (0, 1)}
    assert sm.content.digest_of({"w": windows}, arrays) == {"w": whole}
    unnamed = {rank: {"[0]": local[0][rank], "[1]": local[1][rank]} for rank in (0, 1)}
    assert sm.content.digest_of(windows, unnamed) == whole
    arrays[0]["w[1]"][3, 2] ^= 1
    with pytest.raises(
        sm.DigestError, match=r"tensor 'w': rank 0 holds other bits in \[3:4, 2:3\] than rank 0"
    ):
        sm.content.digest_of({"w": windows}, arrays)


def hold(layout: sm.Layout, values: np.ndarray) -> dict[int, np.ndarray]:
    """Every rank's local array, with random bits in holes."""
    out = {}
    for rank in layout.mesh.ranks:
        local = (
            np.random.default_rng(rank)
            .integers(0, 9, layout.local_shape(rank))
            .astype(values.dtype)
        )
        for here, there in layout.boxes(rank):
            index = tuple(slice(*span) for span in here)
            local[index] = values[tuple(slice(*span) for span in there)]
        out[rank] = local
    return out


def test_a_partial_axis_of_one_rank_makes_no_difference() -> None:
    """Its ranks hold whole values, as under the layout without it."""
    alone = sm.Layout((4, 6), sm.Mesh(tp=1, dp=2), "(dp n) h {sum: tp}")
    plain = sm.Layout((4, 6), sm.Mesh(tp=1, dp=2), "(dp n) h")
    assert alone.addend_axes == () and sm.equivalent(alone, plain)
    held = hold(plain, np.arange(24, dtype=np.float32).reshape(4, 6))
    assert sm.content.digest_of(alone, held) == sm.content.digest_of(plain, held)


def test_replicas_that_differ(fails) -> None:
    layout = sm.Layout((4, 6), FOUR, "(tp n) h", dtype="uint8")
    held = hold(layout, np.arange(24, dtype=np.uint8).reshape(4, 6))
    held[3][1, 2:5] ^= 1
    fails(
        lambda: sm.content.digest_of(layout, held),
        sm.DigestError,
        (
            "the tensor: rank 3 holds other bits in [3:4, 2:5] than rank 1; make the "
            "replicas equal, or use a layout with Partial if they are addends"
        ),
    )


def test_where_sides_differ() -> None:
    rows = sm.Layout((40, 60), FOUR, "(tp dp n) h", dtype="int16")
    columns = sm.Layout((40, 60), TWO, "n (tp h)", dtype="int16")
    values = np.arange(2400, dtype=np.int16).reshape(40, 60)
    other = values.copy()
    other[17, 20], other[31, 50] = -1, -2
    src = {"a": rows, "b": rows}
    dst = {"a": columns, "b": columns}
    here = {rank: {"a": array, "b": array} for rank, array in hold(rows, values).items()}
    changed = hold(columns, other)
    there = {
        rank: {"a": array, "b": changed[rank]} for rank, array in hold(columns, values).items()
    }
    assert sm.content.find_difference(src, here, dst, there) == sm.content.Difference(
        "b", ((17, 32), (20, 51))
    )
    assert sm.content.find_difference(src, here, src, here) is None


def test_what_has_no_digest(fails) -> None:
    layout = sm.Layout((4, 6), TWO, "(tp n) h")
    held = hold(layout, np.zeros((4, 6), np.float32))
    partial = sm.Layout((4, 6), TWO, "n h {sum: tp}")
    part = sm.window(layout, ((0, 3), (0, 6)))
    wrong = [
        (
            lambda: sm.content.digest_of(partial, held),
            f"the tensor is Partial, so its ranks do not hold its content: "
            f"{partial}; reduce it first, by a plan to a layout without Partial",
        ),
        (
            lambda: sm.content.digest_of(part, held),
            f"the tensor: no rank holds element (3, 0) under {part}; "
            "give every element to a rank, since a digest is of the whole tensor",
        ),
        (
            lambda: sm.content.digest_of(layout, {0: held[0]}),
            f"the array of rank 1 is missing; give the arrays of all ranks of {layout}",
        ),
        (
            lambda: sm.content.digest_of({"w": layout}, held),
            f"rank 0: array 'w' is missing; give the arrays of all ranks of {layout}",
        ),
        (
            lambda: sm.content.digest_of(layout, {0: held[0], 1: held[1][:1]}),
            f"the array of rank 1 has shape (1, 6), but {layout} "
            "gives this rank (2, 6); pass an array of that shape",
        ),
        (
            lambda: sm.content.digest_of(cast(layout, "bfloat16"), held),
            "the array of rank 0 has elements of dtype float32, 4 B "
            f"each, but {cast(layout, 'bfloat16')} has 2 B; pass bfloat16, or its bits as integers of that size",
        ),
        (
            lambda: sm.content.digest_of(layout, {0: held[0].astype(">f4"), 1: held[1]}),
            "the array of rank 0 has dtype >f4, of another byte order; pass x.astype(x.dtype.newbyteorder('='))",
        ),
        (
            lambda: sm.content.digest_of(
                cast(layout, "int64"), {rank: x.astype(object) for rank, x in held.items()}
            ),
            "the array of rank 0 has elements of dtype object, which have no bits; "
            "pass int64, or its bits as integers of that size",
        ),
        (
            lambda: sm.content.digest_of(layout, [held]),
            f"arrays are {[held]!r}; give a mapping from rank to array",
        ),
        (
            lambda: sm.content.digest_of(layout, {0: held[0].tolist(), 1: held[1]}),
            "the array of rank 0 is of type list; give a numpy array",
        ),
        (
            lambda: sm.content.find_difference({"a": layout}, {}, {"b": layout}, {}),
            (
                "only one side has 2 tensors, ['a', 'b']; compare sides whose tensors have "
                "the same names"
            ),
        ),
        (
            lambda: sm.content.find_difference(layout, held, cast(layout, "int32"), held),
            f"the tensor is {layout} on one side and "
            f"{cast(layout, 'int32')} on the other; compare tensors of one shape and dtype",
        ),
    ]
    for make, message in wrong:
        fails(make, sm.DigestError, message)
    with pytest.raises(sm.DigestError, match="seed"):
        sm.content.digest_of(layout, held, seed="x")
    with pytest.raises(sm.DigestError, match="give a Layout"):
        sm.content.digest_of("n h", held)
    with pytest.raises(sm.DigestError, match="the tensor"):
        sm.content.digest_of((layout, cast(layout, "int32")), held)
