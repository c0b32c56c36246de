"""Numbering: runs of a loader on tensors whose values identify their elements, and the element in each cell.

1. Elements of one type are numbered. In the first runs their values are the digits of their numbers (`drawing`), which
   identify the element in a cell; in all later runs the cell must have that element's value, too.
2. Targets have other values before each run. Cells that have these after every run, or are always zero, were not
   written.
3. In the last runs no element is finite. A loader may reject these, by an error or by leaving a target as it was.
4. Values are compared by bits. NaN of few bits, and NaN that was cast, equal any NaN: torch's casts make several.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base import dtypes
from shardmath.models.recordings.numbers import find_pieces
from shardmath.models.recordings.pieces import Piece
from shardmath.models.storage.stored import Shapes
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.probes.drawing import SPECIAL, Run, TypedElements, list_runs
from shardmath_torch.tensors.probes.patterns import (
    Words,
    as_tensor,
    as_words,
    cast,
    is_nan,
    real,
)

__all__ = ["ANY", "Found", "Numbering", "Reading", "is_left"]

Found: TypeAlias = int | Tensor
"""The values of a target before a run: the word (bits as an integer) of all, or a tensor."""

_Flat: TypeAlias = NDArray[np.int64]
_Truths: TypeAlias = NDArray[np.bool_]

ANY = frozenset(
    getattr(torch, name) for name in dtypes.ITEMSIZE if name != "bool" and hasattr(torch, name)
)
"""The dtypes of targets for runs that suit any target. Not bool: it has only two values, so runs would be many."""
FEW_BITS = 2
"""The largest size, in bytes, of types that may be cast on the way, as bfloat16 to float32 for numpy."""


class Numbering:
    """A numbering of all elements of checkpoint tensors, and a list of trial runs of a weight loader. Each run gives an
    element one value; an element's values in all runs identify it, which shows where the loader stores it.

    `targets` has the dtypes of the tensors that the loader loads into. The runs depend on these and on `shapes` only.
    """

    def __init__(self, shapes: Shapes, targets: Collection[torch.dtype]) -> None:
        self.shapes = shapes
        by_type: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
        for name, (shape, dtype) in shapes.items():
            by_type.setdefault(dtype_of(dtype), {})[name] = tuple(shape)
        self.targets = frozenset(targets)
        wanted = tuple(sorted({real(dtype) for dtype in targets}, key=str))
        self.kinds = []
        for place, (kind, tensors) in enumerate(by_type.items()):
            self.kinds.append(TypedElements(place, kind, tensors, wanted))
        self.runs = list_runs(self.kinds)
        # The first runs, whose values are the digits of the elements' numbers.
        self.digits = sum(run.way == "digit" for run in self.runs)

    def make(self, name: str, run: Run) -> Tensor:
        """Return the full checkpoint tensor `name`, filled with the values that the weight loader gets in the trial run
        `run`.
        """
        dtype = dtype_of(self.shapes[name][1])
        (kind,) = (kind for kind in self.kinds if kind.dtype == dtype)
        return kind.make(name, run)

    def find_other(self, pieces: Sequence[Piece], run: Run, after: Tensor) -> str:
        """Return an error text if the values in `after` contradict `pieces`, else "". `after` is a model's tensor after
        the trial run `run` of the weight loader; `pieces` say which checkpoint element is at which position.
        """
        words = _flatten(after, after.dtype)
        for kind in self.kinds:
            starts = dict(zip(kind.names, kind.starts.tolist(), strict=False))
            numbers = np.zeros(len(words), np.int64)
            is_in_piece = np.zeros(len(words), np.bool_)
            for piece in pieces:
                if piece.tensor in starts:
                    numbers[piece.cells] = starts[piece.tensor] + piece.elements
                    is_in_piece[piece.cells] = True
            guess = _Guess(kind, after.dtype, numbers, is_in_piece)
            guess.check(run, words)
            if guess.fault is not None:
                _, fault_text = guess.fault
                return fault_text
        return ""

    def find_written(self, found: Found, after: Tensor) -> tuple[_Truths, _Truths]:
        """Return two masks of a tensor's positions: those that a trial run of the weight loader changed, and those that
        it changed to nonzero bits. `found` is the content before the run, `after` the content after it.
        """
        words = _flatten(after, after.dtype)
        written = ~is_left(found, after)
        return written, written & (words != 0).any(axis=1)


class Reading:
    """The values of one target (a tensor to load into) after each trial run of a weight loader, and the checkpoint
    elements that these values identify.
    """

    def __init__(self, numbering: Numbering, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.digits = numbering.digits
        self.kinds = [kind for kind in numbering.kinds if kind.goes_to(dtype)]
        self.others = [kind.dtype for kind in numbering.kinds if kind not in self.kinds]
        # Whether the runs were made for targets of this type: those that suit any target are not for bool.
        self.is_wanted = dtype in numbering.targets
        # The positions that no run has changed, and those that were zero after every run: all, before the first.
        self.unwritten: _Truths = np.array(True)
        self.zero: _Truths = np.array(True)
        self.guesses: list[_Guess] = []
        # Whether each run wrote to the target, by whether it keeps what that had before.
        self._wrote: dict[bool, list[bool]] = {False: [], True: []}
        # The first runs, whose values are digits, and the target's words after each.
        self._digit_runs: list[tuple[Run, Words]] = []

    def add(self, run: Run, found: Found, after: Tensor) -> None:
        """Use the trial run `run` of a weight loader to narrow down which checkpoint element the loader stores at each
        position of one model tensor. `found` is this tensor's content before the run, `after` its content after it.
        """
        words = _flatten(after, self.dtype)
        unchanged = is_left(found, after)
        # A loader may refuse values that are not finite: such a run says nothing about what it writes.
        if run.way in SPECIAL and unchanged.all():
            return
        # Runs with a start value are further runs, which `is_written_at_times` does not count.
        if run.value is None:
            self._wrote[run.keeps].append(not unchanged.all())
        self.unwritten = self.unwritten & unchanged
        self.zero = self.zero & (words == 0).all(axis=1)
        if len(self._digit_runs) < self.digits:
            # A copy, since the next run writes into the same memory.
            self._digit_runs.append((run, words.copy()))
            if len(self._digit_runs) == self.digits:
                self._guess()
        else:
            for guess in self.guesses:
                guess.check(run, words)

    def _guess(self) -> None:
        """Identify the element in each cell by the digits of its number."""
        # Of complex numbers only the real part has digits.
        digits = [words[:, 0] for _, words in self._digit_runs]
        for kind in self.kinds:
            guess = _Guess(kind, self.dtype, *kind.find(digits, self.dtype))
            for run, words in self._digit_runs:
                guess.check(run, words)
            self.guesses.append(guess)
        # The values are no longer needed, and may be as large as the target.
        self._digit_runs = [(run, words[:0]) for run, words in self._digit_runs]

    @property
    def is_written(self) -> bool:
        """Whether any position of the target was written in any run; True for an empty target."""
        return not self.unwritten.all() or not self.unwritten.size

    @property
    def is_written_at_times(self) -> bool:
        """Whether the weight loader wrote to the tensor in some trial run, but only in these: the first run, and runs
        that began with the tensor's old content. In all other runs, the tensor began with a start value.

        Runs before which the target holds a given `value` do not count.
        """
        first_wrote, *later_wrote = self._wrote[False]
        keeping_wrote = self._wrote[True]  # runs that began with the old content
        return not any(later_wrote) and (first_wrote or any(keeping_wrote))

    def find_fault(self) -> str:
        """Return an error for the first position of the target whose values match no checkpoint element, or several; ""
        if there is none. Positions that the weight loader did not write, or at which it always wrote zero, are skipped.
        """
        written = ~(self.unwritten | self.zero)
        matches = np.zeros(written.shape, np.int64)
        for guess in self.guesses:
            matches = matches + guess.right
        cells = np.flatnonzero(written & (matches != 1))
        if not len(cells):
            return ""
        cell = int(cells[0])
        if matches[cell] > 1:
            names = [
                guess.kind.name(int(guess.numbers[cell]))
                for guess in self.guesses
                if guess.right[cell]
            ]
            return f"position {cell} may hold {' or '.join(names)}"
        return self._explain(cell)

    def _explain(self, cell: int) -> str:
        """The error for a position whose values match no checkpoint element."""
        for guess in self.guesses:
            if guess.fault and guess.fault[0] == cell and self.is_wanted:
                return guess.fault[1]
        why = "by numbers" if self.is_wanted else "in the recording of a loader with collectives"
        lacking_casts = [f"; {other} is not cast to {self.dtype} {why}" for other in self.others]
        what = f"position {cell} holds no element of a logical tensor"
        return "".join([what, *lacking_casts]).replace("torch.", "")

    def list_pieces(self) -> list[Piece]:
        """Return Pieces that say which checkpoint element is at which position of the loaded tensor. They are for the
        positions that the weight loader wrote and whose values, in the trial runs, identify an element.

        Positions that are always zero count as unwritten.
        """
        written = ~(self.unwritten | self.zero)
        pieces: list[Piece] = []
        for guess in self.guesses:
            cells = np.flatnonzero(written & guess.right)
            written = written & ~guess.right
            pieces += _list_pieces(guess.kind, cells, guess.numbers[cells])
        return pieces


class _Guess:
    """The supposed element, of one type, in each cell (position in a target), and whether it is `right` so far.

    `fault` is the first error: its cell, and its text.
    """

    def __init__(
        self, kind: TypedElements, dtype: torch.dtype, numbers: _Flat, right: _Truths
    ) -> None:
        self.kind = kind
        self.dtype = dtype
        self.numbers = numbers
        self.right = right
        self.fault: tuple[int, str] | None = None
        part = real(dtype)
        # A cast may change the bits of a NaN.
        self._takes_any_nan = kind.dtype != dtype or part.itemsize <= FEW_BITS

    def check(self, run: Run, seen: Words) -> None:
        """Check the earlier guess of which checkpoint element each position of the target tensor holds. Set `right`, a
        mask by position, to False where `seen`, the target's values after `run`, differs from that element's value in
        this run.
        """
        cells = np.flatnonzero(self.right)
        if not len(cells):
            return
        drawn = cast(self.kind.draw(self.numbers[cells], run), self.kind.dtype, self.dtype)
        expected = drawn.reshape(len(cells), -1)
        actual = seen[cells]
        wrong = np.flatnonzero((expected != actual).any(axis=1))
        if self._takes_any_nan:
            wrong = wrong[self._differ(expected[wrong], actual[wrong])]
        if not len(wrong):
            return
        self.right[cells[wrong]] = False
        if self.fault is None:
            cell, wrong_row = int(cells[wrong[0]]), wrong[0]
            actual_text = _show(actual[wrong_row], self.dtype)
            expected_text = _show(expected[wrong_row], self.dtype)
            element = self.kind.name(int(self.numbers[cell]))
            what = f"position {cell} holds {actual_text}, where {element} is {expected_text}"
            self.fault = cell, what

    def _differ(self, expected: Words, actual: Words) -> _Truths:
        """Mask of the cells with another value, if all NaN are equal."""
        both_nan = _is_nan(expected, self.dtype) & _is_nan(actual, self.dtype)
        differ: _Truths = ((expected != actual) & ~both_nan).any(axis=1)
        return differ


def is_left(found: Found, after: Tensor) -> _Truths:
    """Return a mask of the positions at which `after`, a target's values after a run, still equals `found`, the values
    before it.
    """
    # An int is the word of every position.
    before = found if isinstance(found, int) else _flatten(found, after.dtype)
    unchanged: _Truths = (_flatten(after, after.dtype) == before).all(axis=1)
    return unchanged


def _flatten(after: Tensor, dtype: torch.dtype) -> Words:
    """The words of each cell: a row of one word, or of two for complex numbers."""
    plain = after.detach().to("cpu", dtype)
    words: Words = as_words(plain).reshape(after.numel(), 1 + dtype.is_complex).numpy()
    return words


def _is_nan(words: Words, dtype: torch.dtype) -> _Truths:
    """Mask of the words that are NaN, also for parts of complex numbers."""
    row = np.ascontiguousarray(words).reshape(-1)
    mask: _Truths = is_nan(row, real(dtype))
    return mask.reshape(words.shape)


def _show(words: Words, dtype: torch.dtype) -> str:
    """The value of one cell, for messages."""
    try:
        value: Any = as_tensor(np.ascontiguousarray(words), dtype).item()
    except RuntimeError:
        return f"bits {int(words[0]):#x}"
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def _list_pieces(kind: TypedElements, cells: _Flat, numbers: _Flat) -> list[Piece]:
    """The pieces of all logical tensors of a type, whose elements with these numbers lie in these cells."""
    # The cells are grouped by tensor: each group is a tensor's stretch of `order`.
    tensors = np.searchsorted(kind.starts, numbers, side="right") - 1
    order = np.argsort(tensors, kind="stable")
    distinct, counts = np.unique(tensors, return_counts=True)
    ends = np.cumsum(counts)
    pieces: list[Piece] = []
    # np.split makes one group even of no cells, which have no tensor.
    for tensor, group in zip(distinct.tolist(), np.split(order, ends[:-1]), strict=False):
        elements = numbers[group] - kind.starts[tensor]
        pieces += find_pieces(kind.names[tensor], cells[group], elements)
    return pieces
