"""The bound against every schedule of small programs, and against every cut by definition."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from shardmath import Layout, PlanError, plan, testing
from shardmath.plans.flows.blocks import Block
from shardmath.plans.flows.bound import find_bound
from shardmath.plans.flows.certificate import Certificate, Witness, make_certificate
from shardmath.plans.flows.topology import H100, Topology

Program = tuple[list[Block], list[int], Topology]


def machine(
    per_node: int, intra: float = 1.0, inter: float = 1.0, latency: float = 0.0
) -> Topology:
    return Topology(
        ranks_per_node=per_node, intra_bytes_per_s=intra, inter_bytes_per_s=inter, latency_s=latency
    )


@st.composite
def programs(
    draw: st.DrawFn, ranks: int = 6, nbytes: int = 9, addends: int = 2, groups: int = 2
) -> Program:
    """Blocks on a few ranks, some of which may take no other part; also ranks that hold and need nothing."""
    who = draw(st.lists(st.integers(0, 2 * ranks), min_size=2, max_size=ranks, unique=True))
    some = st.lists(st.sampled_from(who), min_size=1, max_size=4).map(tuple)
    one = st.builds(
        Block,
        some,
        some,
        st.integers(0, nbytes),
        st.integers(0, addends - 1),
        st.integers(0, groups - 1),
    )
    rates = st.sampled_from([1.0, 2.0, 9.0])
    topology = st.builds(
        machine, st.sampled_from([1, 2, 3, 4, 16]), rates, rates, st.sampled_from([0.0, 0.5])
    )
    return draw(st.lists(one, max_size=6)), who, draw(topology)


# By definition


def elements(blocks: Iterable[Block]) -> dict[tuple[int, int, int], Block]:
    """(group, addend, element) -> the block that it is in."""
    out: dict[tuple[int, int, int], Block] = {}
    for block in blocks:
        first = sum((g, a) == (block.group, block.addend) for g, a, _ in out)
        out.update({(block.group, block.addend, first + i): block for i in range(block.nbytes)})
    return out


def must_enter(inside: Iterable[int], blocks: Sequence[Block]) -> int:
    """Element by element: needed inside and not held there; of a group the addend with most."""
    x = set(inside)
    missing: Counter[tuple[int, int]] = Counter(
        (group, addend)
        for (group, addend, _), block in elements(blocks).items()
        if x.intersection(block.receivers) and not x.intersection(block.holders)
    )
    return sum(max(n for (h, _), n in missing.items() if h == g) for g in {g for g, _ in missing})


def most_links(senders: Sequence[int], receivers: Sequence[int], node, same: bool) -> int:
    """The most pairs of a sender and a receiver, each in one pair, in the same node or in different ones: a flow."""
    s, r = len(senders), len(receivers)
    graph = np.zeros((s + r + 2, s + r + 2), np.int32)
    graph[s + r, :s] = 1
    graph[s : s + r, s + r + 1] = 1
    for (i, a), (j, b) in itertools.product(enumerate(senders), enumerate(receivers)):
        graph[i, s + j] = (node(a) == node(b)) is same
    return int(maximum_flow(csr_array(graph), s + r, s + r + 1).flow_value)


def rate(inside: Iterable[int], program: Program) -> float:
    """Bytes a second into a set of ranks."""
    _, who, topology = program
    x = sorted(inside)
    rest = sorted(set(who) - set(x))
    return (
        most_links(rest, x, topology.node, True) * topology.intra_bytes_per_s
        + most_links(rest, x, topology.node, False) * topology.inter_bytes_per_s
    )


def worst_cut(program: Program) -> float:
    """Seconds of the worst of all sets of ranks, without latency."""
    blocks, who, _ = program
    sets = (x for k in range(1, len(who)) for x in itertools.combinations(who, k))
    return max((n / rate(x, program) for x in sets if (n := must_enter(x, blocks))), default=0.0)


@given(programs())
@example(([], [0, 1], machine(2)))
@example(([Block((0, 1), (1, 0), 5)], [0, 1], machine(1)))
@example(([Block((), (), 5), Block((), (1,), 0)], [0, 1], machine(1)))
def test_witness_is_a_cut_by_definition(program: Program) -> None:
    blocks, who, topology = program
    seconds, witness = find_bound(blocks, who, topology)
    assert (seconds == 0) == (witness is None) == all(must_enter([r], blocks) == 0 for r in who)
    if witness is None:
        return
    assert witness.direction in ("in", "out") and witness.nbytes > 0
    assert list(witness.ranks) == sorted(set(witness.ranks)) and set(witness.ranks) < set(who)
    assert 2 * len(witness.ranks) <= len(who)
    inside = witness.ranks if witness.direction == "in" else sorted(set(who) - set(witness.ranks))
    assert witness.nbytes == must_enter(inside, blocks)
    assert witness.bytes_per_s == rate(inside, program)
    assert seconds == float(
        Fraction(witness.nbytes) / Fraction(witness.bytes_per_s) + Fraction(topology.latency_s)
    )


@given(programs(ranks=5, nbytes=4))
def test_no_cut_is_missed_that_is_a_rank_or_a_node(program: Program) -> None:
    blocks, who, topology = program
    seconds = find_bound(blocks, who, topology)[0] - topology.latency_s
    for x in [[r] for r in who] + [
        [r for r in who if topology.node(r) == topology.node(s)] for s in who
    ]:
        for inside in (x, [r for r in who if r not in x]):
            n = must_enter(inside, blocks)
            assert not n or n / rate(inside, program) <= seconds + 1e-12


def test_few_cuts_are_missed_at_all() -> None:
    """The sets that are looked at stand for all 2^n: of 150 programs the worst of all is missed in at most 3."""
    rng = random.Random(5)
    missed = 0
    for _ in range(150):
        who = list(range(rng.randint(2, 7)))
        sets = [tuple(rng.sample(who, rng.randint(1, min(len(who), 3)))) for _ in range(12)]
        blocks = [Block(*rng.sample(sets, 2), rng.randint(1, 9)) for _ in range(rng.randint(1, 6))]
        topology = machine(rng.choice([1, 2, 3, 4, 8]), rng.choice([1.0, 2.0, 9.0]))
        missed += find_bound(blocks, who, topology)[0] < worst_cut((blocks, who, topology)) - 1e-9
    assert missed <= 3


# Every schedule of small programs
#
# Chunks of one byte, steps of one second, whole rates: in a step each rank may send and receive as many chunks over
# each of its links as the link's bytes a second, and pass on what came in earlier steps. That is one way to keep the
# continuous rules, so no continuous schedule is slower than the best of these, and no bound may exceed it.

Value = tuple[int, int, int]
"""(group, element, set of addends as bits): the sum of these addends."""
State = frozenset[tuple[int, Value]]
"""Which ranks have which values."""


def closed(state: Iterable[tuple[int, Value]]) -> State:
    """With every sum of two values that share no addend, and every difference of one that has all of the other."""
    out = set(state)
    while True:
        pairs = [
            (r, (g, e, a ^ b))
            for r, (g, e, a) in out
            for s, (h, f, b) in out
            if (r, g, e) == (s, h, f) and a != b and a & b in (0, b)
        ]
        if out.issuperset(pairs):
            return frozenset(out)
        out.update(pairs)


def steps(state: State, who: Sequence[int], topology: Topology) -> set[State]:
    """All that one step may lead to, without those that leave out what the same step could have brought."""
    limit = {True: topology.intra_bytes_per_s, False: topology.inter_bytes_per_s}
    values = sorted({value for _, value in state})
    missing = [(rank, value) for rank in who for value in values if (rank, value) not in state]
    found: set[State] = set()

    def choose(at: int, used: Counter[tuple[int, str, bool]], new: State) -> None:
        if at == len(missing):
            found.add(new)
            return
        rank, value = missing[at]
        for sender in who:
            near = topology.node(sender) == topology.node(rank)
            ends = [(sender, "out", near), (rank, "in", near)]
            if (sender, value) in state and all(used[end] < limit[near] for end in ends):
                choose(at + 1, used + Counter(ends), new | {missing[at]})
        choose(at + 1, used, new)

    choose(0, Counter(), frozenset())
    return {closed(state | new) for new in found if not any(new < other for other in found)}


def fewest_steps(program: Program) -> int:
    """Steps of the fastest schedule. To have more is never worse: of states in one another the larger is kept."""
    blocks, who, topology = program
    named = elements(blocks)
    whole: Counter[tuple[int, int]] = Counter()
    for group, addend, element in named:
        whole[group, element] += 1 << addend
    start = closed((r, (g, e, 1 << a)) for (g, a, e), block in named.items() for r in block.holders)
    goal = {(r, (g, e, whole[g, e])) for (g, _, e), block in named.items() for r in block.receivers}
    states, count = {start}, 0
    while not any(goal <= state for state in states):
        after = {s for state in states for s in steps(state, who, topology)}
        states = {s for s in after if not any(s < other for other in after)}
        count += 1
    return count


def small(rng: random.Random) -> Program:
    """At most four ranks and three chunks, or the addends of one or two elements on three ranks."""
    reduction = rng.random() < 0.3
    who = sorted(rng.sample(range(5), rng.randint(2, 3 if reduction else 4)))
    topology = machine(
        rng.choice([1, 2]), *rng.choice([(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 2.0)])
    )
    some = [tuple(sorted(rng.sample(who, rng.randint(1, len(who))))) for _ in range(6)]
    if not reduction:
        return (
            [Block(*rng.choices(some, k=2), 1, group=i) for i in range(rng.randint(1, 3))],
            who,
            topology,
        )
    need, n = some[0], rng.randint(1, 2) if len(who) == 2 else 1
    return [Block(rng.choice(some[1:]), need, n, addend) for addend in range(2)], who, topology


@given(st.randoms(use_true_random=False))
def test_no_schedule_is_faster(rng: random.Random) -> None:
    program = small(rng)
    assert find_bound(*program)[0] <= fewest_steps(program)


def test_schedules_often_reach_the_bound() -> None:
    """Chunks cannot be halved, and a relay waits for a whole one: not always, but often, and mostly within a step."""
    rng = random.Random(1)
    found = [
        (find_bound(*program)[0], fewest_steps(program))
        for program in (small(rng) for _ in range(150))
    ]
    moving = [(seconds, steps) for seconds, steps in found if steps]
    exact = sum(seconds == steps for seconds, steps in moving)
    within = sum(math.ceil(seconds) == steps for seconds, steps in moving)
    assert len(moving) >= 80 and exact >= len(moving) // 3 and within >= len(moving) * 4 // 5


# Plans


def direct(program: Program, rng: random.Random) -> float:
    """Seconds of one plan in which every receiver gets every addend from a holder, all at once."""
    blocks, _, topology = program
    load: Counter[tuple[int, str, bool]] = Counter()
    for block in blocks:
        for rank in set(block.receivers) - set(block.holders):
            for _ in range(block.nbytes):
                source = rng.choice(block.holders)
                near = topology.node(source) == topology.node(rank)
                load.update([(source, "out", near), (rank, "in", near)])
    rates = {True: topology.intra_bytes_per_s, False: topology.inter_bytes_per_s}
    return max(
        (n / rates[near] + topology.latency_s for (_, _, near), n in load.items()), default=0.0
    )


@given(programs(), st.randoms(use_true_random=False))
def test_no_direct_plan_is_faster(program: Program, rng: random.Random) -> None:
    seconds = find_bound(*program)[0]
    assert seconds <= direct(program, rng) * (1 + 1e-12)


def blocks_of(src: Layout, dst: Layout) -> list[Block]:
    """Element by element, who holds what and who needs it."""

    def ranks_of(layout: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
        out: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in layout.mesh.ranks:
            for at in itertools.product(
                *({i for i in x.tolist() if i >= 0} for x in layout.indices(rank))
            ):
                out[at].append(rank)
        return {at: tuple(ranks) for at, ranks in out.items()}

    held, needed = ranks_of(src), ranks_of(dst)
    size = src.itemsize
    return [
        Block(*key, n * size) for key, n in Counter((held[at], needed[at]) for at in needed).items()
    ]


@given(testing.pairs(ops=(None,)), st.sampled_from([1, 2, 4]))
def test_no_plan_between_layouts_is_faster(pair: tuple[Layout, Layout], per_node: int) -> None:
    topology = machine(per_node, 4.0, 1.0)
    load: Counter[tuple[int, str, bool]] = Counter()
    for t in plan(*pair).transfers():
        if t.src_rank != t.dst_rank:
            near = topology.node(t.src_rank) == topology.node(t.dst_rank)
            load.update({(t.src_rank, "out", near): t.nbytes, (t.dst_rank, "in", near): t.nbytes})
    slowest = max((n / (4.0 if near else 1.0) for (_, _, near), n in load.items()), default=0.0)
    seconds, witness = find_bound(
        blocks_of(*pair), {*pair[0].mesh.ranks, *pair[1].mesh.ranks}, topology
    )
    assert seconds <= slowest and (witness is None) == (not load)


# What must not matter


STAYING = [Block((0,), (9,), 1), Block((10,), (8,), 1), Block((8, 10), (10,), 1)]
"""What rank 10 has already hid the worst cut, into ranks 8 and 9."""


@given(programs(), st.randoms(use_true_random=False))
@example((STAYING, [0, 8, 1, 9, 10], machine(4)), random.Random(0))
def test_spelling_does_not_matter(program: Program, rng: random.Random) -> None:
    """Order, repetition, receivers that hold already, and blocks that ask for nothing."""
    blocks, who, topology = program

    def respelled(block: Block) -> Block:
        holders, receivers = (
            [*block.holders, block.holders[0]],
            [*block.receivers, *block.holders[:1]],
        )
        if not set(block.receivers) - set(block.holders):
            receivers = []
        rng.shuffle(holders)
        rng.shuffle(receivers)
        return block._replace(holders=tuple(holders), receivers=tuple(receivers))

    again = [*map(respelled, blocks), Block((), (), 7), Block((), (who[0],), 0)]
    rng.shuffle(again)
    assert find_bound(iter(again), iter([*reversed(who), who[0]]), topology) == find_bound(
        blocks, who, topology
    )


@given(programs(), st.integers(1, 1 << 40))
def test_bytes_scale(program: Program, scale: int) -> None:
    blocks, who, topology = program
    seconds, witness = find_bound(blocks, who, topology)
    many, more = find_bound([b._replace(nbytes=b.nbytes * scale) for b in blocks], who, topology)
    assert (witness is None) == (more is None)
    if witness and more:
        assert more == witness._replace(nbytes=witness.nbytes * scale)
        assert math.isclose(
            many - topology.latency_s, (seconds - topology.latency_s) * scale, rel_tol=1e-9
        )


@given(programs())
def test_dividing_a_block_changes_nothing(program: Program) -> None:
    blocks, who, topology = program
    halves = [
        b._replace(nbytes=n) for b in blocks for n in (b.nbytes // 3, b.nbytes - b.nbytes // 3)
    ]
    assert find_bound(halves, who, topology) == find_bound(blocks, who, topology)


@given(programs(), st.integers(1, 5))
def test_names_of_groups_and_addends_do_not_matter(program: Program, by: int) -> None:
    blocks, who, topology = program
    renamed = [b._replace(addend=-b.addend * by, group=-b.group * by) for b in blocks]
    assert math.isclose(find_bound(renamed, who, topology)[0], find_bound(blocks, who, topology)[0])


# Closed forms


def seconds_of(nbytes: int, bytes_per_s: float) -> float:
    return float(Fraction(nbytes) / Fraction(bytes_per_s) + Fraction(1e-5))


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_broadcast_counts_its_bytes_once(nodes: int) -> None:
    """However many nodes want them, the source's node sends one copy, over all its NICs."""
    n, ranks = 8 * 10**9, range(8 * (nodes + 1))
    seconds, witness = find_bound([Block(tuple(range(8)), tuple(ranks[8:]), n)], ranks, H100)
    assert seconds == seconds_of(n, 400e9)
    assert witness == Witness(tuple(range(8, 16)), "in", n, 400e9)


def test_broadcast_from_one_rank() -> None:
    """With its node it has eight NICs to go through, alone one: ranks that take no part lend nothing."""
    n, far = 10**9, tuple(range(8, 24))
    assert find_bound([Block((3,), far, n)], range(24), H100)[0] == seconds_of(n, 400e9)
    assert find_bound([Block((3,), far, n)], [3, *far], H100) == (
        seconds_of(n, 50e9),
        Witness((3,), "out", n, 50e9),
    )
    three = find_bound([Block((3,), far, n)], [3, 4, 0, *far], H100)
    assert three == (seconds_of(n, 150e9), Witness((0, 3, 4), "out", n, 150e9))


def test_a_rank_has_both_its_links() -> None:
    """Half of what rank 0 needs is beside it; but that half may come by way of the other node too."""
    n = 10**9
    blocks = [Block((1,), (0,), n), Block((8,), (0,), n)]
    assert find_bound(blocks, range(16), H100) == (
        seconds_of(2 * n, 500e9),
        Witness((0,), "in", 2 * n, 500e9),
    )
    assert find_bound(blocks, [0, 1, 8], H100) == (
        seconds_of(n, 50e9),
        Witness((8,), "out", n, 50e9),
    )
    out = [Block((0,), (1,), n), Block((0,), (8,), n)]
    assert find_bound(out, range(16), H100) == (
        seconds_of(2 * n, 500e9),
        Witness((0,), "out", 2 * n, 500e9),
    )


def test_one_node_has_no_use_for_its_nics() -> None:
    n = 9 * 10**9
    assert find_bound([Block((0,), (1, 2, 3), n)], range(4), H100) == (
        seconds_of(n, 450e9),
        Witness((1,), "in", n, 450e9),
    )
    alone = find_bound([Block((0,), (1, 2, 3), n)], range(9), H100)
    assert alone == (seconds_of(n, 500e9), Witness((1,), "in", n, 500e9))


def test_holders_that_share_are_crowded_together() -> None:
    """No node of 0, 1, 2 holds anything alone, the three of them hold much; node 3 holds less than one's share.

    What is needed in a node that holds it does not count, nor which ranks of two nodes hold something.
    """
    topology, n = machine(2, 1e9, 1.0), 10**6
    far = [tuple(range(8 + 2 * i, 10 + 2 * i)) for i in range(12)]
    pairs = [(0, 2), (2, 4), (4, 0)]
    blocks = [Block(held, x, n - 1) for held in pairs for x in far]
    blocks += [Block((a + 1, b + 1), x, 1) for a, b in pairs for x in far]
    blocks += [Block((6, 7), x, n // 2) for x in far]
    seconds, witness = find_bound(
        [*blocks, Block((0, 2, 4, 6), (1,), 1000 * n)], range(32), topology
    )
    assert witness == Witness(tuple(range(6)), "out", 36 * n, 6.0)
    assert seconds == 6.0 * n


def test_ranks_that_share_are_crowded_together() -> None:
    """The same inside one node: ranks 0, 1 and 2 give out together; rank 3 has less than one's share."""
    topology, n = machine(8, 3.0, 1.0), 10**6
    blocks = [Block(held, (x,), n) for held in [(0, 1), (1, 2), (2, 0)] for x in range(4, 8)]
    blocks += [Block((3,), (x,), n // 2) for x in range(4, 8)]
    seconds, witness = find_bound(blocks, range(8), topology)
    assert witness == Witness((0, 1, 2), "out", 12 * n, 9.0)
    assert seconds == float(Fraction(12 * n, 9))


def test_part_of_a_node_takes_in() -> None:
    """What six ranks need of two ranks of their node and of other nodes enters over two NVLinks and six NICs."""
    n, need = 10**9, range(2, 8)
    blocks = [Block((0, 1), (r,), 3 * n) for r in need] + [
        Block(tuple(range(8, 24)), (r,), n) for r in need
    ]
    witness = find_bound(blocks, range(24), machine(8, 450.0, 50.0))[1]
    assert witness == Witness(tuple(need), "in", 24 * n, 1200.0)


def test_part_of_a_node_gives_out() -> None:
    n, hold = 10**9, range(2, 8)
    blocks = [Block((r,), (r % 2,), 3 * n) for r in hold] + [
        Block((r,), tuple(range(8, 24)), n) for r in hold
    ]
    witness = find_bound(blocks, range(24), machine(8, 450.0, 50.0))[1]
    assert witness == Witness(tuple(hold), "out", 24 * n, 1200.0)


def test_more_than_half_of_the_ranks_give_out() -> None:
    """The witness is the others, which must take in; 8 and 9 hold and need, and so are in no family with 0 and 1."""
    n, hold = 10**9, range(2, 8)
    blocks = [Block((r,), (r % 2,), 3 * n) for r in hold] + [
        Block((r,), (8, 9), n // 10) for r in hold
    ]
    witness = find_bound([*blocks, Block((8,), (9,), 1)], range(10), machine(8, 450.0, 50.0))[1]
    assert witness == Witness((0, 1, 8, 9), "in", 186 * n // 10, 1000.0)


@pytest.mark.parametrize("source", [0, 2, 4])
def test_a_node_among_nodes_that_all_hold_and_need(source: int) -> None:
    """Its two ranks give out 20 bytes, of an addend that is not the first."""
    topology, (a, b) = machine(2, 9.0, 1.0), [r for r in (0, 2, 4) if r != source]
    heavy = [Block((source,), (a,), 10, 1), Block((source + 1,), (b,), 10, 1)]
    light = [Block((r,), ((r + 2) % 6,), 1, addend) for r in range(6) for addend in (0, 1)]
    assert find_bound(heavy + light, range(6), topology) == (
        11.0,
        Witness((source, source + 1), "out", 22, 2.0),
    )


@pytest.mark.parametrize("source", range(4))
def test_a_rank_among_ranks_that_all_hold_and_need(source: int) -> None:
    others = [r for r in range(4) if r != source]
    heavy = [Block((source,), (r,), 10, 1) for r in others]
    light = [Block((r,), (source,), 1, addend) for r in others for addend in (0, 1)]
    assert find_bound(heavy + light, range(4), machine(4)) == (
        30.0,
        Witness((source,), "out", 30, 1.0),
    )


def test_deepseek_v3() -> None:
    """PP16 EP16 -> TP32 DP8 on 256 + 256 ranks: 1342.3 GB, of which 2.3 GB for every rank: 337.3 GB enter each node."""
    blocks = deepseek()
    assert len({b.holders for b in blocks}) == 272 and len({b.receivers for b in blocks}) == 33
    assert sum(b.nbytes for b in blocks) == 1342_300_000_000
    seconds, witness = find_bound(blocks, range(512), H100)
    assert witness == Witness(tuple(range(256, 264)), "in", 337_300_000_000, 400e9)
    assert seconds == seconds_of(337_300_000_000, 400e9) and round(seconds, 3) == 0.843


def deepseek() -> list[Block]:
    """Two tables of whole bytes: sharded 32 ways, and replicated; each stage and each rank holds its share."""
    stages = [tuple(range(16 * s, 16 * s + 16)) for s in range(16)]
    held = [*stages, *((r,) for r in range(256))]
    parts = [tuple(range(256 + t, 512, 32)) for t in range(32)]
    shares = [even(1340 * 10**9 // 32, 272), even(2300 * 10**6, 272)]
    return [
        *(Block(h, v, n) for h, n in zip(held, shares[0], strict=True) for v in parts),
        *(Block(h, tuple(range(256, 512)), n) for h, n in zip(held, shares[1], strict=True)),
    ]


def even(total: int, count: int) -> list[int]:
    return [total * (i + 1) // count - total * i // count for i in range(count)]


def test_qwen3_235b() -> None:
    """TP4 PP8 EP16 -> TP8 DP16 on 128 + 128 ranks: every node takes in all 470.2 GB."""
    stages = [tuple(range(16 * s, 16 * s + 16)) for s in range(8)]
    parts = [tuple(range(128 + t, 256, 8)) for t in range(8)]
    blocks = [Block(h, v, 470_200_000_000 // 64) for h in stages for v in parts]
    assert find_bound(blocks, range(256), H100) == (
        seconds_of(470_200_000_000, 400e9),
        Witness(tuple(range(128, 136)), "in", 470_200_000_000, 400e9),
    )


# Reductions


def addends(ranks: Sequence[int], need: Sequence[int], n: int, group: int = 0) -> list[Block]:
    return [Block((r,), tuple(need), n, addend, group) for addend, r in enumerate(ranks)]


def test_one_combined_addend_is_enough() -> None:
    """An all-reduce of eight ranks: seven addends are missing everywhere, one sum of them makes up for it."""
    n = 10**9
    assert find_bound(addends(range(8), range(8), n), range(8), H100)[0] == seconds_of(n, 450e9)
    assert find_bound(addends(range(8), [8], n), range(9), H100) == (
        seconds_of(n, 50e9),
        Witness((8,), "in", n, 50e9),
    )
    far = find_bound(addends(range(16), range(16), n), range(16), H100)
    assert far == (seconds_of(n, 400e9), Witness(tuple(range(8)), "in", n, 400e9))


def test_groups_are_different_elements() -> None:
    n = 10**9
    both = addends(range(8), range(8), n) + addends(range(8), range(8), 2 * n, group=1)
    assert find_bound(both, range(8), H100)[0] == seconds_of(3 * n, 450e9)
    plain = [*addends(range(4), [4], n), Block((0,), (4,), n // 2, group=9)]
    assert find_bound(plain, range(5), H100)[0] == seconds_of(n + n // 2, 450e9)


def test_the_addend_that_misses_most_counts() -> None:
    """Addend 0 misses one of two elements at rank 2, addend 1 both."""
    blocks = [Block((0,), (2,), 5, 0), Block((0, 2), (2,), 7, 0), Block((1,), (2,), 12, 1)]
    assert find_bound(blocks, range(3), machine(4)) == (12.0, Witness((2,), "in", 12, 1.0))


# Values and errors


def test_nothing_has_to_move() -> None:
    for blocks in (
        [],
        [Block((0,), (0,), 5)],
        [Block((0, 1), (1, 0), 5)],
        [Block((0,), (1,), 0)],
        [Block((), (), 3)],
    ):
        assert find_bound(blocks, [0, 1], H100) == (0.0, None)
    assert make_certificate((0.0, None), 0.0) == Certificate(0.0, 0.0, 1.0, None)
    assert str(make_certificate((0.0, None), 0.0)) == "0 s; nothing has to move"
    assert make_certificate((0.0, None), 2.0).ratio == math.inf


def test_latency_comes_on_top() -> None:
    assert find_bound([Block((0,), (1,), 1)], [0, 1], machine(1, 1.0, 1.0, 0.25))[0] == 1.25


def test_certificate() -> None:
    found = find_bound(deepseek(), range(512), H100)
    near = make_certificate(found, 0.8524)
    assert near == Certificate(found[0], 0.8524, 0.8524 / found[0], found[1])
    assert str(near) == (
        "852.4 ms, 1.011 times the bound of 843.3 ms: 8 ranks (256, 257, 258, 259, 260, 261, 262, 263) "
        "must take in 337.3 GB at 400 GB/s"
    )
    assert make_certificate(found, found[0]).ratio == 1.0
    assert make_certificate(found, found[0] * (1 - 1e-12)).ratio == 1.0


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            Block((0,), (9,), 1),
            ("rank 9 of a block is not among the 2 ranks (0, 3) of the program; add it to ranks"),
        ),
        (
            Block((1, 0), (3,), 1),
            ("rank 1 of a block is not among the 2 ranks (0, 3) of the program; add it to ranks"),
        ),
        (
            Block((-1,), (3,), 1),
            ("rank -1 of a block is not among the 2 ranks (0, 3) of the program; add it to ranks"),
        ),
        (
            Block((), (3,), 5),
            (
                "no rank holds the 5 bytes that rank 3 must have; add a "
                "rank to the holders of the block"
            ),
        ),
        (Block((0,), (3,), -5), "the size of a block is -5 bytes; give 0 or more"),
        (
            Block((0,), (3,), (1 << 62) - 1),
            f"the blocks have {1 << 62} bytes in all; give fewer than {1 << 62}",
        ),
        (Block((0,), (3,), 1.5), "the size of a block is 1.5; give an integer"),  # type: ignore[arg-type]
    ],
)
def test_errors(fails, block: Block, message: str) -> None:
    fails(lambda: find_bound([Block((0,), (3,), 1), block], [3, 0], H100), PlanError, message)


def test_ranks_are_integers(fails) -> None:
    one = [Block((0,), (3,), 1)]
    fails(lambda: find_bound(one, [0, 3.0], H100), PlanError, "a rank is 3.0; give an integer")  # type: ignore[list-item]


def test_most_bytes() -> None:
    n = (1 << 62) - 1
    assert find_bound([Block((0,), (3,), n)], [3, 0], machine(1)) == (
        float(n),
        Witness((3,), "in", n, 1.0),
    )
