"""Flow against brute force, linear programs and its own certificate: what every holder of a line sends."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import coo_array

from shardmath.base.errors import PlanError
from shardmath.plans.flows.flow import Level, find_levels, shares

Holders: TypeAlias = tuple[int, ...]
Instance: TypeAlias = tuple[list[int], list[Holders]]


@st.composite
def instances(draw: st.DrawFn, ranks: int = 6, lines: int = 8, longest: int = 1000) -> Instance:
    """Lengths and holders; lengths often agree, and sets of holders often are the same."""
    chosen = draw(st.lists(st.integers(0, 99), min_size=1, max_size=ranks, unique=True))
    sets = st.sets(st.sampled_from(chosen), min_size=1).map(lambda held: tuple(sorted(held)))
    length = st.integers(0, 4) | st.integers(0, longest)
    rows = draw(st.lists(st.tuples(length, sets), max_size=lines))
    return [n for n, _ in rows], [held for _, held in rows]


def tiny() -> st.SearchStrategy[Instance]:
    """Few enough choices to try all."""
    return instances(ranks=4, lines=4, longest=6).filter(lambda it: sum(it[0]) <= 14)


def loads(rows: list[list[int]], holders: Sequence[Holders]) -> Counter[int]:
    """What each rank sends; ranks that hold a line are there, even if they send nothing."""
    out = Counter({rank: 0 for held in holders for rank in held})
    for row, held in zip(rows, holders, strict=True):
        for rank, nbytes in zip(held, row, strict=True):
            out[rank] += nbytes
    return out


def by_node(load: Counter[int], nodes: dict[int, int]) -> Counter[int]:
    out = Counter(dict.fromkeys(nodes.values(), 0))
    for rank, nbytes in load.items():
        out[nodes[rank]] += nbytes
    return out


def falling(load: Counter[int]) -> list[int]:
    return sorted(load.values(), reverse=True)


def pieces(rows: list[list[int]]) -> int:
    return sum(nbytes > 0 for row in rows for nbytes in row)


def check_divided(
    rows: list[list[int]], lengths: Sequence[int], holders: Sequence[Holders]
) -> None:
    """Every byte of every line is sent by exactly one of its holders."""
    assert [sum(row) for row in rows] == list(lengths)
    assert [len(row) for row in rows] == [len(held) for held in holders]
    assert all(type(nbytes) is int and nbytes >= 0 for row in rows for nbytes in row)


def check_optimal(lengths: Sequence[int], holders: Sequence[Holders]) -> list[list[int]]:
    """A proof: levels fall, each is forced, and loads are the levels', rounded.

    Whatever is chosen, the ranks of the first levels carry at least what these levels have between them; so no vector
    of loads is lexicographically less.
    """
    rows, found = shares(lengths, holders), find_levels(lengths, holders)
    check_divided(rows, lengths, holders)
    means = [Fraction(level.nbytes, len(level.ranks)) for level in found]
    assert all(a > b for a, b in itertools.pairwise(means))
    check_forced(lengths, holders, found)
    load = loads(rows, holders)
    for level, mean in zip(found, means, strict=True):
        assert sum(load[rank] for rank in level.ranks) == level.nbytes
        assert {load[rank] for rank in level.ranks} <= {math.floor(mean), math.ceil(mean)}
    assert pieces(rows) < len(lengths) + len(load) or not load
    return rows


def check_forced(lengths: Sequence[int], holders: Sequence[Holders], found: list[Level]) -> None:
    """Every rank is in one level; lines that the levels above and this one hold between them are its bytes."""
    at = {rank: i for i, level in enumerate(found) for rank in level.ranks}
    assert sorted(at) == sorted({rank for held in holders for rank in held})
    assert sum(len(level.ranks) for level in found) == len(at)
    own = [0] * len(found)
    for nbytes, held in zip(lengths, holders, strict=True):
        own[max(at[rank] for rank in held)] += nbytes
    assert own == [level.nbytes for level in found]
    assert all(level.ranks == tuple(sorted(level.ranks)) for level in found)


def all_loads(lengths: Sequence[int], holders: Sequence[Holders]) -> Iterable[Counter[int]]:
    """The loads of every choice there is."""
    ranks = sorted({rank for held in holders for rank in held})
    found = {(0,) * len(ranks)}
    for nbytes, held in zip(lengths, holders, strict=True):
        at = [ranks.index(rank) for rank in held]
        found = {added(load, at, row) for load in found for row in compositions(nbytes, len(held))}
    return (Counter(dict(zip(ranks, load, strict=True))) for load in found)


def added(load: tuple[int, ...], at: list[int], row: tuple[int, ...]) -> tuple[int, ...]:
    out = list(load)
    for i, nbytes in zip(at, row, strict=True):
        out[i] += nbytes
    return tuple(out)


def compositions(total: int, count: int) -> Iterable[tuple[int, ...]]:
    """All ways to write the total as a sum of `count` integers."""
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, count - 1):
            yield (first, *rest)


def least(
    lengths: Sequence[int],
    holders: Sequence[Holders],
    group: dict[int, int],
    cap: float | None = None,
) -> float:
    """The linear program: the least largest sum of loads of a group, if no rank sends more than `cap`."""
    pairs = [(line, rank) for line, held in enumerate(holders) for rank in held]
    n = len(pairs)
    ranks, groups = sorted(group), sorted(set(group.values()))
    at_line = [line for line, _ in pairs]
    at_rank = [ranks.index(rank) for _, rank in pairs]
    at_group = [groups.index(group[rank]) for _, rank in pairs]
    one = np.ones(n)
    equal = coo_array((one, (at_line, range(n))), shape=(len(lengths), n + 1))
    rows = [*at_group, *range(len(groups))]
    sums = coo_array(([*one, *([-1.0] * len(groups))], (rows, [*range(n), *[n] * len(groups)])))
    below = (
        sums.toarray()
        if cap is None
        else np.vstack([sums.toarray(), incidence(at_rank, len(ranks), n)])
    )
    limits = [0.0] * len(groups) if cap is None else [0.0] * len(groups) + [cap] * len(ranks)
    cost = [0.0] * n + [1.0]
    result = linprog(
        cost, A_ub=below, b_ub=limits, A_eq=equal.toarray(), b_eq=np.array(lengths, float)
    )
    assert result.status == 0
    return float(result.fun)


def incidence(at_rank: list[int], ranks: int, n: int) -> np.ndarray:
    return coo_array((np.ones(n), (at_rank, range(n))), shape=(ranks, n + 1)).toarray()


# Laws


@given(instances(longest=2**60))
@example(([], []))
@example(([0, 0], [(3,), (1, 2)]))
@example(([5], [(7,)]))
@example(([3, 3, 3], [(0, 1), (1, 2), (0, 2)]))
@example(([1, 1, 1, 1], [(0, 1), (1, 2), (2, 3), (0, 3)]))
def test_loads_are_the_levels_rounded_and_levels_are_forced(it: Instance) -> None:
    """Optimal by its certificate, and in few pieces."""
    check_optimal(*it)


@given(tiny())
@example(([2, 0, 5, 1], [(0, 1, 2), (0, 3), (1, 3), (3,)]))
def test_no_choice_of_integers_is_lexicographically_less(it: Instance) -> None:
    """Largest loads first, against every choice there is."""
    assert falling(loads(shares(*it), it[1])) == min(map(falling, all_loads(*it)))


@given(instances(lines=12))
def test_the_largest_load_is_the_linear_programs_rounded_up(it: Instance) -> None:
    """Against HiGHS."""
    assume(it[0])
    load = loads(shares(*it), it[1])
    best = least(*it, {rank: rank for rank in load})
    assert max(load.values()) == math.ceil(best - 1e-6)
    first = find_levels(*it)[0]
    assert first.nbytes / len(first.ranks) == pytest.approx(best)


@given(instances(longest=2**60))
def test_the_first_level_is_the_densest_set_of_ranks(it: Instance) -> None:
    """Max over all sets S of ranks of the bytes that are held only in S, divided by |S|; the largest such S."""
    lengths, holders = it
    assume(holders)
    ranks = sorted({rank for held in holders for rank in held})
    density = {
        chosen: Fraction(
            sum(n for n, held in zip(lengths, holders, strict=True) if set(held) <= set(chosen)),
            size,
        )
        for size in range(1, len(ranks) + 1)
        for chosen in itertools.combinations(ranks, size)
    }
    top = max(density.values())
    union = {rank for chosen, found in density.items() if found == top for rank in chosen}
    assert find_levels(lengths, holders)[0] == Level(int(top * len(union)), tuple(sorted(union)))


@given(st.data(), instances(longest=2**40), st.booleans())
def test_the_order_of_the_lines_means_nothing(
    data: st.DataObject, it: Instance, with_nodes: bool
) -> None:
    """A line sends the same wherever it stands; lines that are alike may change places."""
    lengths, holders = it
    order = data.draw(st.permutations(range(len(lengths))))
    moved = [lengths[i] for i in order], [holders[i] for i in order]
    nodes = {rank: rank % 3 for held in holders for rank in held} if with_nodes else None
    here = zip(lengths, holders, shares(*it, nodes), strict=True)
    assert sorted(here) == sorted(zip(*moved, shares(*moved, nodes), strict=True))
    assert find_levels(*it) == find_levels(*moved)


@given(st.randoms(use_true_random=False), instances(longest=2**40))
def test_other_names_of_ranks_change_loads_by_rounding_alone(
    rng: random.Random, it: Instance
) -> None:
    """Levels carry the names, loads are within a byte, and sorted they are the same."""
    lengths, holders = it
    ranks = sorted({rank for held in holders for rank in held})
    name = dict(zip(ranks, rng.sample(range(1000), len(ranks)), strict=True))
    named = [tuple(sorted(name[rank] for rank in held)) for held in holders]
    before, after = loads(shares(*it), holders), loads(shares(lengths, named), named)
    assert all(abs(before[rank] - after[name[rank]]) <= 1 for rank in ranks)
    assert falling(before) == falling(after)
    renamed = [
        Level(level.nbytes, tuple(sorted(name[rank] for rank in level.ranks)))
        for level in find_levels(*it)
    ]
    assert find_levels(lengths, named) == renamed


@given(instances(longest=2**40), st.integers(1, 9))
def test_a_line_in_parts_is_the_line(it: Instance, count: int) -> None:
    """Cutting every line into parts with its holders changes no load."""
    lengths, holders = it
    parts = [n // count for n in lengths for _ in range(count - 1)] + [
        n - n // count * (count - 1) for n in lengths
    ]
    held = [held for held in holders for _ in range(count - 1)] + holders
    rows = shares(parts, held)
    check_divided(rows, parts, held)
    assert loads(rows, held) == loads(shares(*it), holders)
    assert find_levels(parts, held) == find_levels(*it)


@given(instances(longest=2**40), st.integers(2, 2**30))
def test_levels_scale(it: Instance, factor: int) -> None:
    """Lines that are so many times longer have levels so many times higher."""
    lengths, holders = it
    scaled = find_levels([n * factor for n in lengths], holders)
    assert scaled == [Level(level.nbytes * factor, level.ranks) for level in find_levels(*it)]


@given(instances(longest=2**40), instances(longest=2**40))
def test_what_shares_no_rank_does_not_matter(one: Instance, other: Instance) -> None:
    """Two instances over different ranks are divided as each alone."""
    apart = [tuple(rank + 100 for rank in held) for held in other[1]]
    both = shares(one[0] + other[0], one[1] + apart)
    assert both == shares(*one) + shares(other[0], apart)


# Nodes


@given(st.data(), tiny())
def test_node_loads_are_lexicographically_least_below_the_cap(
    data: st.DataObject, it: Instance
) -> None:
    """Of all choices whose largest rank load is the least, against every choice there is."""
    lengths, holders = it
    nodes = {
        rank: data.draw(st.integers(0, 2))
        for rank in sorted({rank for held in holders for rank in held})
    }
    rows = shares(lengths, holders, nodes)
    check_divided(rows, lengths, holders)
    load = loads(rows, holders)
    choices = list(all_loads(lengths, holders))
    cap = min(max(choice.values(), default=0) for choice in choices)
    assert max(load.values(), default=0) == cap
    kept = [by_node(choice, nodes) for choice in choices if max(choice.values(), default=0) == cap]
    assert falling(by_node(load, nodes)) == min(map(falling, kept))


@given(st.data(), instances(ranks=9, lines=12))
def test_the_largest_node_load_is_the_linear_programs_rounded_up(
    data: st.DataObject, it: Instance
) -> None:
    """Under the cap of ranks, against HiGHS; and few pieces."""
    lengths, holders = it
    assume(lengths)
    nodes = {
        rank: data.draw(st.integers(0, 3))
        for rank in sorted({rank for held in holders for rank in held})
    }
    rows = shares(lengths, holders, nodes)
    check_divided(rows, lengths, holders)
    load = loads(rows, holders)
    cap = max(loads(shares(lengths, holders), holders).values())
    assert max(load.values()) == cap
    assert max(by_node(load, nodes).values()) == math.ceil(
        least(lengths, holders, nodes, cap) - 1e-6
    )
    assert pieces(rows) < len(lengths) + 2 * len(nodes) + len(set(nodes.values()))


@given(st.data(), instances(longest=2**40))
def test_inside_a_node_ranks_are_optimal(data: st.DataObject, it: Instance) -> None:
    """What of each line leaves from a node is shared by its ranks as if there were no others."""
    lengths, holders = it
    nodes = {
        rank: data.draw(st.integers(0, 2))
        for rank in sorted({rank for held in holders for rank in held})
    }
    rows = shares(lengths, holders, nodes)
    load = loads(rows, holders)
    for node in set(nodes.values()):
        inside = [
            [(rank, nbytes) for rank, nbytes in zip(held, row, strict=True) if nodes[rank] == node]
            for held, row in zip(holders, rows, strict=True)
        ]
        parts = [sum(nbytes for _, nbytes in part) for part in inside if part]
        local = [tuple(rank for rank, _ in part) for part in inside if part]
        alone = loads(shares(parts, local), local)
        assert falling(alone) == falling(Counter({rank: load[rank] for rank in alone}))


@given(instances(longest=2**60))
def test_one_node_is_none_and_a_node_for_every_rank_is_as_good(it: Instance) -> None:
    """Nodes that say nothing change nothing."""
    ranks = {rank for held in it[1] for rank in held}
    plain = shares(*it)
    assert shares(*it, dict.fromkeys(ranks, 5)) == plain
    alone = shares(*it, {rank: -rank for rank in ranks})
    assert falling(loads(alone, it[1])) == falling(loads(plain, it[1]))


def test_a_node_that_has_more_is_spared() -> None:
    """Rank 1 has to send 6: its neighbor leaves the shared line to the other node."""
    lengths, holders = [6, 4], [(1,), (0, 2)]
    assert shares(lengths, holders) == [[6], [2, 2]]
    assert shares(lengths, holders, {0: 0, 1: 0, 2: 1}) == [[6], [0, 4]]


def test_ranks_come_before_nodes() -> None:
    """Loads of ranks that are forced stay, though a node then has more."""
    lengths, holders = [12, 9], [(0, 1, 2), (0, 1, 2)]
    nodes = {0: 0, 1: 0, 2: 1}
    assert loads(shares(lengths, holders, nodes), holders) == {0: 7, 1: 7, 2: 7}
    lengths, holders = [12, 5], [(0, 1, 2), (3,)]
    assert loads(shares(lengths, holders, {0: 0, 1: 0, 2: 1, 3: 0}), holders) == {
        0: 4,
        1: 3,
        2: 5,
        3: 5,
    }


# Examples


@pytest.mark.parametrize(
    ("lengths", "holders", "rows"),
    [
        ([], [], []),
        ([0], [(4,)], [[0]]),
        ([9], [(4,)], [[9]]),
        ([10], [(1, 4, 6)], [[4, 3, 3]]),
        ([0], [(1, 4, 6)], [[0, 0, 0]]),
        ([5, 5], [(0, 1), (0, 1)], [[5, 0], [0, 5]]),
        ([2, 7, 3], [(0, 1), (0, 1), (0, 1)], [[0, 2], [6, 1], [0, 3]]),
        ([4, 4], [(0, 1), (2, 3)], [[2, 2], [2, 2]]),
        ([5, 3], [(0,), (0, 1)], [[5], [0, 3]]),
        ([5, 8], [(0,), (0, 1)], [[5], [2, 6]]),
        ([5, 2], [(0, 1, 2), (0, 1)], [[1, 2, 2], [2, 0]]),
    ],
)
def test_small_shares(lengths: list[int], holders: list[Holders], rows: list[list[int]]) -> None:
    assert shares(lengths, holders) == rows


def test_integers_of_numpy_become_integers() -> None:
    rows = shares(np.array([2**62, 2**62]), [(0, 1), (1, 2)])
    check_divided(rows, [2**62, 2**62], [(0, 1), (1, 2)])
    assert find_levels(np.array([2**62, 2**62]), [(0, 1), (1, 2)]) == [Level(2**63, (0, 1, 2))]


def test_large_integers_are_exact() -> None:
    """One byte in 2**60 decides a level."""
    big = 2**60
    assert find_levels([big, big + 1], [(0, 1), (2, 3)]) == [
        Level(big + 1, (2, 3)),
        Level(big, (0, 1)),
    ]
    assert find_levels([big, big, big], [(0, 1), (1, 2), (2, 3)]) == [Level(3 * big, (0, 1, 2, 3))]
    assert (
        loads(shares([big + 1] * 3, [(0, 1), (1, 2), (2, 3)]), [(0, 1), (1, 2), (2, 3)]).total()
        == 3 * big + 3
    )


# Large and hostile


def random_instance(seed: int, lines: int, ranks: int, most: int, skew: float) -> Instance:
    rng = random.Random(seed)
    lengths = [int(2**20 * rng.paretovariate(skew)) % 2**60 for _ in range(lines)]
    return lengths, [
        tuple(sorted(rng.sample(range(ranks), rng.randint(1, most)))) for _ in range(lines)
    ]


@pytest.mark.parametrize(
    ("seed", "lines", "ranks", "most", "skew"),
    [
        (0, 600, 256, 8, 9.0),
        (1, 600, 256, 8, 0.5),
        (2, 400, 300, 2, 1.0),
        (3, 50, 400, 100, 1.0),
        (4, 900, 64, 4, 0.3),
    ],
)
def test_large_random_instances(seed: int, lines: int, ranks: int, most: int, skew: float) -> None:
    """Optimal by the certificate; with nodes, the cap and the bytes hold, and no node has more than without."""
    lengths, holders = random_instance(seed, lines, ranks, most, skew)
    plain = loads(check_optimal(lengths, holders), holders)
    nodes = {rank: rank // 8 for rank in range(ranks)}
    rows = shares(lengths, holders, nodes)
    check_divided(rows, lengths, holders)
    load = loads(rows, holders)
    assert max(load.values()) == max(plain.values())
    assert falling(by_node(load, nodes)) <= falling(by_node(plain, nodes))


@pytest.mark.parametrize("seed", range(3))
def test_nodes_of_random_instances_against_the_linear_program(seed: int) -> None:
    lengths, holders = random_instance(seed, 60, 32, 6, 1.0)
    nodes = {rank: rank // 4 for rank in range(32)}
    load = loads(shares(lengths, holders, nodes), holders)
    cap = max(loads(shares(lengths, holders), holders).values())
    assert max(load.values()) == cap
    best = (
        least([n / 2**20 for n in lengths], holders, {r: nodes[r] for r in load}, cap / 2**20)
        * 2**20
    )
    assert max(by_node(load, nodes).values()) == pytest.approx(best, rel=1e-9)


def test_families_of_holders_inside_each_other() -> None:
    """A line for every rank, one for every eight, one for all."""
    rng = random.Random(0)
    for last in (2**20, 2**32):
        sets = (
            [(r,) for r in range(512)]
            + [tuple(range(8 * i, 8 * i + 8)) for i in range(64)]
            + [tuple(range(512))]
        )
        check_optimal([rng.randrange(2**20) for _ in sets[:-1]] + [last], sets)
    check_optimal([2**20] * 512 + [2**23] * 64 + [2**30], sets)


@pytest.mark.parametrize("count", [200, 300])
def test_chains_of_as_many_levels_as_lines(count: int) -> None:
    """Every level leaves a line to the level below."""
    chain = [(i, i + 1) for i in range(count)]
    lengths = [4**i for i in range(count)]
    check_optimal(lengths, chain)
    assert len(find_levels(lengths, chain)) == count
    nested = [tuple(range(i + 1)) for i in range(count)]
    lengths = [3 ** (count - i) for i in range(count)]
    check_optimal(lengths, nested)
    assert [level.ranks for level in find_levels(lengths, nested)] == [(i,) for i in range(count)]
    check_optimal([(i * 37) % 101 for i in range(count)], chain)
    check_optimal([2**i for i in range(count)], nested)
    rows = shares(lengths, nested, {rank: rank // 8 for rank in range(count)})
    assert loads(rows, nested) == {i: lengths[i] for i in range(count)}


def test_a_shift_along_a_long_chain() -> None:
    """One end has too much, the other nothing: every line moves on. Far more ranks than Python's recursion allows."""
    count = 1100
    chain = [(0,), *((i, i + 1) for i in range(count))]
    rows = check_optimal([count + 1, *[count + 1] * (count - 1), 0], chain)
    assert falling(loads(rows, chain))[0] == count + 1
    check_optimal([count * 5, *[1000] * count], chain)
    check_optimal([1000] * count, chain[1:])
    cycle = [tuple(sorted((i, (i + 1) % count))) for i in range(count)]
    check_optimal([1000 + i % 7 for i in range(count)], cycle)


# Errors


@pytest.mark.parametrize(
    ("lengths", "holders", "nodes", "message"),
    [
        (
            [1],
            [],
            None,
            ("there are 1 lengths and 0 sets of holders; give one length and one set per line"),
        ),
        ([1, -2], [(0,), (1,)], None, "lengths[1] is -2 bytes; give lengths of 0 or more"),
        (
            [1, 2],
            [(0,), ()],
            None,
            "holders[1] is empty; give a rank that holds the bytes, or leave them out",
        ),
        (
            [2],
            [(0, 3, 1)],
            None,
            ("holders[0] has rank 1 after rank 3; give ascending ranks: tuple(sorted(set(...)))"),
        ),
        (
            [2],
            [(3, 3)],
            None,
            ("holders[0] has rank 3 after rank 3; give ascending ranks: tuple(sorted(set(...)))"),
        ),
        (
            [2],
            [(0, 3)],
            {0: 0},
            "rank 3 is one of the holders (0, 3), but has no node in nodes=; add its node",
        ),
        (
            [2],
            [(0,)],
            {},
            ("rank 0 is one of the holders (0,), but has no node in nodes=; add its node"),
        ),
    ],
)
def test_messages(
    lengths: list[int], holders: list[Holders], nodes: dict[int, int] | None, message: str, fails
) -> None:
    fails(lambda: shares(lengths, holders, nodes), PlanError, message)
    if nodes is None:
        fails(lambda: find_levels(lengths, holders), PlanError, message)


def test_bytes_are_integers() -> None:
    with pytest.raises(TypeError):
        shares([1.5], [(0, 1)])  # type: ignore[list-item]
