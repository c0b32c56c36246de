"""Tensors: a move that differs from the last one in a few tensors, or in ranks, is planned as if it were the first."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, PlanError, Topology, clear_caches, plan
from shardmath.layouts.edits import relabeled
from shardmath.plans import tensors
from shardmath.testing.strategies import pairs, trees

Trees = tuple[dict[str, Layout], dict[str, Layout]]

MESH, OTHER = Mesh(tp=2), Mesh(tp=2, ranks=[2, 3])
ROWS = Layout((4, 2), MESH, "(tp n) h")
COLUMNS = Layout((4, 2), OTHER, "n (tp h)")


def plan_or_error(src: object, dst: object, **options: object) -> Plan | str:
    try:
        return plan(src, dst, **options)
    except PlanError as error:
        return str(error)


def assert_same(found: Plan | str, expected: Plan | str) -> None:
    """Not only equal, but alike in all that callers and other modules read."""
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert found == expected
    for read in (lambda p: p.src, lambda p: p.dst, lambda p: p.rules):
        assert list(read(found).items()) == list(read(expected).items())
    assert all(type(name) is str for name in found.src)
    assert found.alike == expected.alike
    assert found.in_part == expected.in_part
    assert found.ranks == expected.ranks
    assert [b.names for b in found.batches] == [b.names for b in expected.batches]
    assert list(found.transfers()) == list(expected.transfers())
    for rank in found.ranks:
        assert list(found.transfers(src=rank)) == list(expected.transfers(src=rank))
        assert list(found.transfers(dst=rank)) == list(expected.transfers(dst=rank))
    assert found.sent_bytes() == expected.sent_bytes()
    assert found.received_bytes() == expected.received_bytes()


@st.composite
def changes(draw: st.DrawFn, tree: Trees) -> Trees:
    """The tree with a tensor changed, added or removed, with other ranks, or only with its names in another order."""
    src, dst = map(dict, tree)
    name = draw(st.sampled_from([*src, "added", "w"]))
    pair = draw(pairs())
    kind = draw(st.sampled_from(["both", "source", "target", "alike", "remove", "ranks", "order"]))
    if kind == "both":
        src[name], dst[name] = pair
    elif kind == "alike":
        other = draw(st.sampled_from(list(tree[0])))
        src[name], dst[name] = tree[0][other], tree[1][other]
    elif kind == "source":  # the names or shapes of both sides may differ now
        src[name] = pair[0]
    elif kind == "target":
        dst[name] = pair[1]
    elif kind == "remove":
        src.pop(name, None)
        dst.pop(name, None)
    elif kind == "ranks":
        changed = draw(st.sampled_from([src, dst]))
        fresh = 1 + max((r for layout in changed.values() for r in layout.mesh.ranks), default=0)
        ranks = {draw(st.integers(0, 9)): fresh, draw(st.integers(10, 19)): fresh + 1}
        ranks = {rank: new for rank, new in ranks.items() if rank < fresh}
        changed.update({key: relabeled(layout, ranks) for key, layout in changed.items()})
    else:
        dst = dict(reversed(dst.items()))
    return src, dst


@given(st.data(), trees(), st.sampled_from([0, 64]), st.booleans())
def test_a_changed_move_is_planned_as_if_it_were_the_first(
    data: st.DataObject, tree: Trees, few: int, near: bool
) -> None:
    options = {"topology": Topology(ranks_per_node=2)} if near else {}
    clear_caches()
    last = plan(*tree, **options)
    with mock.patch.object(tensors, "FEW", few):
        for _ in range(data.draw(st.integers(1, 3))):
            tree = data.draw(changes(tree))
            found = plan_or_error(*tree, **options)
            clear_caches()
            expected = plan_or_error(*tree, **options)
            assert_same(found, expected)
            if isinstance(expected, str) or not tree[0]:
                return
            last = expected
    assert last is plan(*tree, **options)


def made_of_reads(src: dict[str, Layout], dst: dict[str, Layout]) -> tuple[Plan, int]:
    """The plan, and how many tensors were grouped anew for it."""
    grouped = []
    read = tensors.read_tensors
    with mock.patch("shardmath.plans.plan.read_tensors", lambda *s: grouped.append(0) or read(*s)):
        return plan(src, dst), len(grouped)


def many(count: int) -> Trees:
    src = {f"w{i:05}": ROWS for i in range(count)}
    return src, dict.fromkeys(src, COLUMNS)


@pytest.mark.parametrize("count", [100, 3000])
def test_only_what_changed_is_read(count: int) -> None:
    src, dst = many(count)
    kept = plan(src, dst)
    resized = Layout((6, 2), MESH, "(tp n) h"), Layout((6, 2), OTHER, "n (tp h)")
    one = {**src, "w00050": resized[0]}, {**dst, "w00050": resized[1]}
    fewer = {k: v for k, v in src.items() if k != "w00050"}
    less = fewer, dict.fromkeys(fewer, COLUMNS)
    more = {"v": ROWS, **src}, {**dst, "v": COLUMNS}
    moved = src, dict.fromkeys(src, relabeled(COLUMNS, {3: 9}))
    for tree in (one, less, more, moved):
        assert kept is plan(src, dst)
        found, grouped = made_of_reads(*tree)
        assert grouped == 0
        assert found.src.keys() == tree[0].keys() and found.rules.keys() == tree[0].keys()
        clear_caches()
        assert_same(found, plan(*tree))
        kept = plan(src, dst)


def test_what_is_the_same_is_shared() -> None:
    src, dst = many(5)
    kept = plan(src, dst)
    again = plan(src, dst | {"w00002": relabeled(COLUMNS, {3: 9})})
    assert again.src is kept.src and again.rules is kept.rules and again.dst is not kept.dst
    assert len({*map(id, again.dst.values())}) == 2 and len(again.alike) == 2


def test_sums_come_and_go() -> None:
    sums = Layout((4, 2), MESH, "n h {sum: tp}")
    src, dst = many(4)
    plain, summed = (src, dst), ({**src, "w00002": sums}, dst)
    for before, after in ((plain, summed), (summed, plain)):
        kept = plan(*before)
        found = plan(*after)
        clear_caches()
        assert found != kept
        assert_same(found, plan(*after))


def test_values_that_are_no_layouts_are_refused_as_ever(fails) -> None:
    src, dst = many(3)
    kept = plan(src, dst)
    message = "tensor 'w00001' is [1]; give a Layout or a tuple of Layouts"
    fails(lambda: plan(src, {**dst, "w00001": [1]}), PlanError, message)
    fails(
        lambda: plan({"v": ROWS, **src}, {"v": COLUMNS, **dst, "w00001": [1]}), PlanError, message
    )
    assert plan(src, {**dst, "w00001": (COLUMNS,)}, window=True).digest == kept.digest


def test_a_window_given_alone_stays_a_window(fails) -> None:
    """A tuple of one layout may leave elements out, and the same layout may not, unless the caller says so."""
    part = Layout((4, 2), Mesh(ranks=[2]), "(n)=<0:2> h")
    src, dst = many(3)
    dst = {**dst, "w00001": (part,)}
    kept = plan(src, dst)
    message = (
        "tensor 'w00002': no rank of the destination holds element (2, 0) under float32[4, 2] (n)=<0:2> h on one rank; "
        "give it to a rank, or call plan(..., window=True) if elements may be left out"
    )
    for name in ("w00000", "w00002"):
        named = message.replace("w00002", name)
        fails(lambda name=name: plan(src, {**dst, name: part}), PlanError, named)
    assert kept is plan(src, dst) and kept.in_part == ("w00001",)


def test_names_of_other_types_stay_out() -> None:
    class Name(str):
        pass

    src, dst = many(3)
    kept = plan(src, dst)
    named = {Name(name): layout for name, layout in src.items()}
    assert plan(named, dst) is kept
    renamed = {Name(name): Layout((4, 2), MESH, "n (tp h)") for name in src}
    found = plan(renamed, dst)
    assert {type(n) for names in found.alike for n in names} == {str}


class Key(str):
    """A name with a hash of its own."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(("Key", str.__str__(self)))

    __eq__ = str.__eq__


NAMES = [f"w{i:03}" for i in range(200)]
MOVED = Layout((4, 2), Mesh(tp=2, ranks=[8, 9]), "n (tp h)")
PART = Layout((4, 2), Mesh(ranks=[2]), "(n)=<0:2> h")


def test_names_with_another_hash_are_plain_names() -> None:
    clear_caches()
    expected = plan(dict.fromkeys(NAMES, ROWS), dict.fromkeys(NAMES, MOVED))
    clear_caches()
    keys = [Key(name) for name in NAMES]
    src = dict.fromkeys(keys, ROWS)
    kept = plan(src, dict.fromkeys(keys, COLUMNS))
    assert_same(plan(src, dict.fromkeys(keys, MOVED)), expected)
    kept = plan(src, dict.fromkeys(keys, COLUMNS))
    fewer = NAMES[1:]
    found = plan(dict.fromkeys(fewer, ROWS), dict.fromkeys(fewer, COLUMNS))
    assert kept != found and list(found.src) == fewer
    assert plan({keys[0]: ROWS}, {keys[0]: (PART,)}).in_part == ("w000",)
    with pytest.raises(PlanError, match="holds element"):
        plan({keys[0]: ROWS}, {keys[0]: PART})


class Overlay(dict[str, Layout]):
    """Layouts, of which [] gives one that items do not have."""

    def __init__(self, items: dict[str, Layout], found: Layout) -> None:
        super().__init__(items)
        self.found = found

    def __getitem__(self, name: str) -> Layout:
        return self.found


def test_a_mapping_is_read_by_name() -> None:
    """Items do not count: neither the equal ones, nor the one that differs from the last plan's."""
    clear_caches()
    src = dict.fromkeys(NAMES, ROWS)
    items = dict.fromkeys(NAMES, COLUMNS)
    kept = plan(src, Overlay(items, MOVED))
    found = plan(src, Overlay(items | {"w001": MOVED}, COLUMNS))
    assert kept.dst_ranks == (8, 9) and found.dst_ranks == (2, 3)


def test_a_plan_that_another_thread_makes_meanwhile_is_not_returned() -> None:
    clear_caches()
    compare = Topology.__eq__
    made = [plan(ROWS, COLUMNS, topology=Topology(ranks_per_node=1))]

    def compare_late(self: Topology, other: object) -> bool:
        # Where topologies are compared, Python may run another thread.
        if len(made) == 1:
            made.append(made[0])
            made.append(plan(ROWS, COLUMNS, topology=Topology(ranks_per_node=2)))
        return compare(self, other)

    asked = Topology(ranks_per_node=1)
    with mock.patch.object(Topology, "__eq__", compare_late):
        found = plan(ROWS, COLUMNS, topology=asked)
    assert len(made) == 3 and found.topology == asked
