"""The code that computes what ranks hold, run on a length that z3 decides about: every branch that some length takes
is taken, and what comes out is proved for all lengths of that path.

Nothing here knows how many lengths decide: it is the second derivation of what `prove` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import ne
from typing import Any

import pytest
import z3

import shardmath as sm
from shardmath.layouts.algebra import dimension
from shardmath.layouts.algebra.dimension import Field
from shardmath.layouts.algebra.stages import list_coordinates

pytestmark = pytest.mark.long

N = z3.Int("n")


class Paths:
    """The branches that a program takes: each run follows some, and leaves those still to be taken."""

    def __init__(self) -> None:
        self.todo: list[list[bool]] = [[]]

    def start(self) -> None:
        self.prefix = self.todo.pop()
        self.taken: list[bool] = []
        self.solver = z3.Solver()
        self.solver.add(N >= 0)

    def possible(self, condition: z3.BoolRef) -> bool:
        return self.solver.check(condition) == z3.sat

    def decide(self, condition: z3.BoolRef) -> bool:
        known = z3.simplify(condition)
        if z3.is_true(known) or z3.is_false(known):
            return z3.is_true(known)
        if len(self.taken) < len(self.prefix):
            answer = self.prefix[len(self.taken)]
        else:
            answer = self.possible(known)
            if answer and self.possible(z3.Not(known)):
                self.todo.append([*self.taken, False])
        self.taken.append(answer)
        self.solver.add(known if answer else z3.Not(known))
        return answer


PATHS = Paths()


def lift(value: Any) -> Any:
    return value.term if isinstance(value, Symbol | Truth) else z3.IntVal(int(value))


class Truth:
    """A comparison: asking whether it is true chooses a branch; as a number it is 0 or 1."""

    def __init__(self, claim: z3.BoolRef) -> None:
        self.claim = claim
        self.term = z3.If(claim, 1, 0)

    def __bool__(self) -> bool:
        return PATHS.decide(self.claim)

    def __add__(self, other: Any) -> Symbol:
        return Symbol(self.term + lift(other))

    __radd__ = __add__


class Symbol:
    """An integer that depends on n."""

    def __init__(self, term: Any) -> None:
        self.term = z3.simplify(term)

    def __add__(self, other: Any) -> Symbol:
        return Symbol(self.term + lift(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Symbol:
        return Symbol(self.term - lift(other))

    def __rsub__(self, other: Any) -> Symbol:
        return Symbol(lift(other) - self.term)

    def __neg__(self) -> Symbol:
        return Symbol(-self.term)

    def __mul__(self, other: int) -> Symbol:
        return Symbol(self.term * other)

    __rmul__ = __mul__

    # z3 divides as Python does if the divisor is positive.
    def __floordiv__(self, divisor: int) -> Symbol:
        return Symbol(self.term / divisor)

    def __mod__(self, divisor: int) -> Symbol:
        return Symbol(self.term % divisor)

    def __divmod__(self, divisor: int) -> tuple[Symbol, Symbol]:
        return self // divisor, self % divisor

    def __lt__(self, other: Any) -> Truth:
        return Truth(self.term < lift(other))

    def __le__(self, other: Any) -> Truth:
        return Truth(self.term <= lift(other))

    def __gt__(self, other: Any) -> Truth:
        return Truth(self.term > lift(other))

    def __ge__(self, other: Any) -> Truth:
        return Truth(self.term >= lift(other))

    def __eq__(self, other: object) -> bool:
        is_number = isinstance(other, int | Symbol)
        return is_number and PATHS.decide(self.term == lift(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return PATHS.decide(self.term != 0)

    __hash__ = None  # type: ignore[assignment]

    def __index__(self) -> int:
        """A small number: `range(min(parts, size))` asks for one."""
        for value in range(64):
            if self == value:
                return value
        raise OverflowError("a length without a bound")


def every_path(spec: str, mesh: sm.Mesh) -> Iterator[list[Any]]:
    """What all coordinates hold of a dimension of n, path by path; `PATHS.solver` knows which n take the path."""
    (only,) = sm.Layout((8,), mesh, spec).dims[0].fields
    length = Symbol(N)
    field = Field(length, only.stages)  # type: ignore[arg-type]
    PATHS.todo = [[]]
    while PATHS.todo:
        PATHS.start()
        yield [field.runs(coords) for coords in list_coordinates(mesh.shape)]


def smallest_against(claim: Any) -> int | None:
    """The smallest n of this path for which the claim is false."""
    found = None
    PATHS.solver.push()
    PATHS.solver.add(z3.Not(claim))
    while PATHS.solver.check() == z3.sat:
        found = PATHS.solver.model().eval(N, model_completion=True).as_long()
        PATHS.solver.add(found > N)
    PATHS.solver.pop()
    return found


SPECS = {
    (3,): ("(tp n)", "(tp~ n)", "(2 tp n)", "(3 tp~ n)"),
    (2, 2): ("(tp dp n)", "(tp~ dp n)", "(dp~ tp~ n)"),
}


@pytest.mark.parametrize(("sizes", "spec"), [(k, s) for k, specs in SPECS.items() for s in specs])
def test_ranks_hold_each_element_once(sizes: tuple[int, ...], spec: str) -> None:
    mesh = sm.Mesh(dict(zip(("tp", "dp"), sizes, strict=False)))
    paths = 0
    for held in every_path(spec, mesh):
        paths += 1
        spans = [(lift(g), lift(g) + lift(n)) for runs in held for _, g, n in runs.segments]
        total = sum((stop - start for start, stop in spans), z3.IntVal(0))
        apart = [
            z3.Or(stop <= begin, end <= start)
            for (start, stop), (begin, end) in itertools.combinations(spans, 2)
        ]
        inside = [z3.And(start >= 0, start < stop, stop <= N) for start, stop in spans]
        # Disjoint ranges inside of n that have n positions are all of n.
        assert smallest_against(z3.And(total == N, *apart, *inside)) is None
    assert paths > 1
    assert sm.prove(sm.Layout((8,), mesh, spec)).proved


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_where_two_readings_differ(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that DTensor's reading gives against those that FSDP2 stores, by paths of both."""
    mesh = sm.Mesh(dp=sizes[0], tp=sizes[1])
    lengths = []
    with monkeypatch.context() as patch:
        # `len` can only give an int.
        patch.setattr(dimension, "len", lambda runs: runs.length, raising=False)
        for spec in ("(2 dp n | tp n)", "(tp dp n)"):
            by_path = []
            for held in every_path(spec, mesh):
                conditions = z3.And(*PATHS.solver.assertions())
                by_path.append((conditions, [lift(runs.length) for runs in held]))
            lengths.append(by_path)
    smallest = []
    for (one, says), (other, stores) in itertools.product(*lengths):
        solver = z3.Optimize()
        solver.add(one, other, z3.Or(*itertools.starmap(ne, zip(says, stores, strict=True))))
        solver.minimize(N)
        if solver.check() == z3.sat:
            smallest.append(solver.model().eval(N, model_completion=True).as_long())
    verdict = sm.prove_equivalent(
        sm.Layout((8,), mesh, "(2 dp n | tp n)"), sm.Layout((8,), mesh, "(tp dp n)")
    )
    found = verdict.counterexample
    assert min(smallest, default=None) == (None if found is None else found.size)
