"""The parts of the exchange that need no second process."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import shardmath as sm
from shardmath.layouts.algebra.runs import Runs
from shardmath.plans.programs.part import own_boxes
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.saving import SavePlanner, as_tensor
from shardmath_torch.groups import dtypes
from shardmath_torch.groups.agreement.agree import PURPOSE, RECORD, Ballot, decode, encode, vote
from shardmath_torch.groups.agreement.failure import FailureDetector, Report, find_first_failed
from shardmath_torch.groups.agreement.wire import Wire
from shardmath_torch.moves.exchange.endpoints import join, locate, select
from shardmath_torch.moves.exchange.local import by_key, check, signature, wanted

LAYOUT = sm.Layout((4, 6), sm.Mesh(tp=1), "n h")
WANTS = wanted(sm.plan(LAYOUT, LAYOUT), 0)


@pytest.mark.parametrize(
    ("reports", "first"),
    [
        ({0: 2, 1: 2, 3: 2}, 2),
        ({0: 1, 1: 2, 3: 0}, 2),
        ({0: None, 1: 3, 3: None}, 2),
        ({0: 1, 1: 0, 2: 0, 3: 0}, 0),
        ({1: 1, 0: 1, 2: 1, 3: 2}, 1),
        ({0: None, 1: None, 2: None, 3: None}, None),
        ({0: 3, 1: 3, 2: 0, 3: 0}, 3),
    ],
    ids=[
        "all saw it",
        "a chain",
        "nobody saw it",
        "all went on",
        "it says so itself",
        "nothing tells",
        "it was late, and blames who did not wait",
    ],
)
def test_who_failed_first(reports: dict[int, int | None], first: int | None) -> None:
    """The blamed who is silent; else who is silent; else the most blamed, the first of equals."""
    assert find_first_failed(reports, range(4)) == first


def test_a_detector_without_a_store_goes_by_what_it_saw() -> None:
    """No store: its own report; a store that a rank served and that no longer answers: nobody is blamed."""
    saw = Report(3, "w", "its connection closed")
    let_go: list[int] = []
    alone = FailureDetector(None, None, "1", 0, range(4), 0.2)
    assert alone.detect(saw, lambda: let_go.append(1)) == (3, saw)
    served = FailureDetector(None, 2, "1", 0, range(4), 0.2)
    assert served.detect(saw, lambda: let_go.append(2)) == (None, saw)
    assert let_go == [1, 2]


@pytest.mark.parametrize("text", ["", "no", "é" * 2000, "x" * 5000])
def test_records_have_one_size(text: str) -> None:
    """Long texts are cut, also inside a letter of several bytes."""
    ballot = Ballot(text, text, objection=text, peers=3, serves_store=True, nonce=(1 << 32) - 1)
    record = encode(ballot)
    read = decode(record)
    assert len(record) == RECORD
    for was, now in ((ballot.claim, read.claim), (ballot.purpose, read.purpose)):
        fits = len(was.encode()) <= PURPOSE
        assert now == was if fits else was.startswith(now.partition("... ")[0])
    assert text.startswith(read.objection)
    assert bool(read.objection) == bool(text)
    assert read[4:] == ballot[4:]


@pytest.mark.parametrize("text", ["é" * 2000, "x" * 5000])
def test_what_differs_beyond_a_cut_differs(text: str) -> None:
    """A claim and a purpose that are cut say what they were."""
    one, other = text + "y", text + "z"
    assert decode(encode(Ballot(one))).intent != decode(encode(Ballot(other))).intent
    assert decode(encode(Ballot("", one))).intent != decode(encode(Ballot("", other))).intent


def test_each_field_of_a_ballot_is_told() -> None:
    """By itself, and no flag is taken for another."""
    for field in ("records_gradient", "is_unordered", "serves_store"):
        ballot = Ballot("move 1")._replace(**{field: True})
        assert decode(encode(ballot)) == ballot


class _Told:
    """A wire on which the other ranks' records have come."""

    def __init__(self, *others: Ballot) -> None:
        self._others = others

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        return [record, *map(encode, self._others)]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Ballot("move 2"), "rank 1: move 2"),
        (Ballot("move 1", "b"), "rank 1: move 1, for 'b'"),
        (Ballot("move 1", "a", records_gradient=True), "rank 1: move 1, for 'a', a gradient to"),
    ],
)
def test_ranks_intend_the_same(other: Ballot, said: str) -> None:
    """Or all are told who intends what; what is no intent may differ."""
    mine = Ballot("move 1", "a")
    with pytest.raises(sm.ExchangeError, match="ranks disagree on what to do") as refused:
        vote(cast(Wire, _Told(other)), (0, 1), mine)
    assert said in str(refused.value)
    alike = mine._replace(peers=7, is_unordered=True, serves_store=True, nonce=5)
    assert vote(cast(Wire, _Told(alike)), (0, 1), mine) == (mine, alike)


def _checked(src: torch.Tensor, dst: torch.Tensor) -> None:
    check(WANTS, (by_key(WANTS[0], src), by_key(WANTS[1], dst)), torch.device("cpu"))


def test_interleaved_views_of_one_buffer_are_apart() -> None:
    """Two column blocks, or odd and even columns, of one buffer share no element."""
    buffer = torch.zeros(4, 12)
    _checked(buffer[:, :6], buffer[:, 6:])
    _checked(buffer[:, ::2], buffer[:, 1::2])
    _checked(torch.zeros(1).expand(4, 6), torch.zeros(4, 6))


@pytest.mark.parametrize("start", [0, 1, 5])
def test_views_that_share_an_element_are_refused(start: int) -> None:
    """Overlapping columns, and the same tensor twice."""
    buffer = torch.zeros(4, 12)
    with pytest.raises(sm.ExchangeError, match="share memory: arriving bytes would overwrite"):
        _checked(buffer[:, :6], buffer[:, start : start + 6])


def test_memory_that_is_gone_is_refused() -> None:
    """A storage freed or shrunk since it was checked is checked again; fake and transformed tensors have none."""
    shrunk = torch.zeros(4, 6)
    before = signature(({"": shrunk}, {}))
    shrunk.untyped_storage().resize_(8)
    assert signature(({"": shrunk}, {})) != before
    with FakeTensorMode():
        fake = torch.zeros(4, 6)
    with pytest.raises(sm.ExchangeError, match="a FakeTensor, which has no plain memory"):
        _checked(fake, torch.zeros(4, 6))
    with pytest.raises(
        sm.ExchangeError, match="the source tensor reaches 96 bytes into a storage of 8"
    ):
        _checked(shrunk, torch.zeros(4, 6))

    def move(src: torch.Tensor) -> torch.Tensor:
        with pytest.raises(sm.ExchangeError, match="the source tensor has no memory itself"):
            _checked(src, torch.zeros(4, 6))
        return src

    torch.vmap(move)(torch.zeros(2, 4, 6))
    torch.func.grad(lambda src: move(src).sum())(torch.zeros(4, 6))


def test_what_a_collective_returns_is_waited_for() -> None:
    """And a part of a storage needs only that part."""
    arrived = AsyncCollectiveTensor(torch.zeros(4, 6))
    _checked(arrived, torch.zeros(4, 6))
    assert type(by_key(WANTS[0], arrived)[""]) is torch.Tensor
    part = torch.zeros(8, 6)[:4]
    part.untyped_storage().resize_(96)
    _checked(part, torch.zeros(4, 6))


def test_a_lazy_conjugate_is_refused() -> None:
    """Its bytes are not its values."""
    layout = sm.Layout((4, 6), sm.Mesh(tp=1), "n h", dtype="complex64")
    wants = wanted(sm.plan(layout, layout), 0)
    src, dst = torch.zeros(4, 6, dtype=torch.complex64), torch.zeros(4, 6, dtype=torch.complex64)
    with pytest.raises(sm.ExchangeError, match=r"lazy conjugate or negative.*resolve_conj"):
        check(wants, ({"": src.conj()}, {"": dst}), torch.device("cpu"))


def test_a_signature_tells_tensors_apart() -> None:
    """The same place and kind are equal; another place, stride or kind is not; what is no tensor equals nothing."""
    t = torch.zeros(6, 6)
    assert signature(({"": t}, {})) == signature(({"": t.view(6, 6)}, {}))
    for other in (torch.zeros(6, 6), t.T, t.view(torch.int32), 7):
        assert signature(({"": t}, {})) != signature(({"": other}, {}))  # type: ignore[dict-item]
    assert signature(({"": t}, {})) != signature(({}, {"": t}))
    assert signature(({"a": t}, {})) != signature(({"b": t}, {}))
    assert signature(({"": t}, {})) != signature(({"": torch._neg_view(t)}, {}))


def test_views_are_slices() -> None:
    """A view selects the slice; views that follow each other in memory are one, others are not."""
    t = torch.arange(48).view(6, 8)
    a, b, c = (slice(1, 3), slice(0, 8)), (slice(3, 4), slice(0, 8)), (slice(1, 3), slice(0, 4))
    views = [locate("t", t.stride(), s, tuple(t[s].shape)) for s in (a, b, c)]
    for view, s in zip(views, (a, b, c), strict=True):
        assert torch.equal(select(t, view), t[s])
    joined = join(views[:2])
    assert joined is not None
    assert torch.equal(select(t, joined), t[1:4].flatten())
    assert join([views[1], views[0]]) is None
    assert join(views[2:]) is None


def test_own_cells_leave_holes_out() -> None:
    """Boxes of local positions, joined where only the global side jumps; one empty box for a scalar."""
    runs = Runs(((0, 8, 2), (2, 0, 1), (5, 1, 1)), 7)
    assert own_boxes((runs, Runs(((0, 0, 4),)))) == (
        (slice(0, 3), slice(0, 4)),
        (slice(5, 6), slice(0, 4)),
    )
    assert own_boxes(()) == ((),)


def test_arithmetic_does_not_depend_on_the_place() -> None:
    """Every fold gives the same bits for a whole tensor as for its elements one by one."""
    for name, op in [
        (n, o) for n in ("float32", "bfloat16", "complex64", "uint16") for o in ("sum", "product")
    ]:
        made = [
            torch.randint(0, 50, (2, 37, 8), dtype=torch.uint8).view(getattr(torch, name))
            for _ in range(2)
        ]
        whole, single = made[0].clone(), made[0].clone()
        dtypes.fold(op, whole, made[1])
        for i in range(whole.shape[1]):
            dtypes.fold(op, single[:, i], made[1][:, i])
        assert torch.equal(whole.view(torch.uint8), single.view(torch.uint8)), (name, op)


def test_freed_memory_is_not_saved() -> None:
    """Neither a tensor's nor that of bytes."""
    layout, whole = sm.Layout((4, 6), sm.Mesh(tp=1), "n h"), torch.zeros(4, 6)
    whole.untyped_storage().resize_(0)
    planner = SavePlanner({"w": layout}, rank=0)
    planner.set_up_planner({"w": whole})
    with pytest.raises(
        sm.ExchangeError, match="source tensor 'w' reaches 96 bytes into a storage of 0"
    ):
        planner.create_local_plan()
    blob = torch.zeros(4, dtype=torch.uint8)
    blob.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="'b' reaches 4 bytes into a storage of 0"):
        as_tensor("b", blob)
