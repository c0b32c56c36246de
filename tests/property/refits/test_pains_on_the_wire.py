"""What went wrong in other systems on the way: who sends, in which messages, and how long it took to find out.

Docstrings cite where it was seen. The table in docs/refit.md has most of these, and what is no planner's.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable

import shardmath as sm
from shardmath.models.storage.stored import Shapes
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.vllm import vllm
from shardmath.plans.programs.messages import Message, staging_bytes
from shardmath.plans.programs.part import RankProgram, make_parts
from shardmath.storage import Spot, Stored, Vocabulary, bind, parse
from tests.refits.carrying import LAYER, SERVED, TRAINED, divided, whole

ROWS = "layers.{l}.w = layers.{l}.w : (tp n) h"
COLUMNS = "layers.{l}.w = layers.{l}.w : n (tp h)"


def in_stages(table: str, *, pp: int, layers: int, tp: int = 1) -> Stored:
    """A side of pipeline stages with equally many layers."""
    spots = tuple(Spot({"pp": n * pp // layers}, 0, n) for n in range(layers))
    return Stored(parse(table), (sm.Mesh(pp=pp, tp=tp),), {"l": spots})


def shapes_of(count: int, *shape: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """So many tensors of one shape."""
    return {f"layers.{n}.w": (shape, "bfloat16") for n in range(count)}


# Who sends what


def test_every_rank_plans_alone() -> None:
    """NeMo-RL 945: one controller makes and sends out the plans of all. Here ranks have text, and one digest."""
    shapes = {f"{LAYER}mlp.experts.{e}.down_proj.weight": ((4, 4), "bfloat16") for e in range(64)}
    trainer = megatron(TRAINED, ranks=range(4), ep=4, vocab=100)
    engine = vllm(SERVED, ranks=range(4, 8), tp=4, ep=True)
    told, asked = trainer.to_json(), engine.to_json()
    draw = random.Random(7)
    digests = set()
    for _ in range(8):
        # A rank may have met the tensors in any order.
        own = dict(draw.sample(sorted(shapes.items()), len(shapes)))
        moved = sm.refit(Stored.from_json(told), Stored.from_json(asked), own)
        digests.add(moved.plan.digest)
    assert len(digests) == 1
    other = vllm(SERVED, ranks=range(4, 8), tp=4)
    assert sm.refit(trainer, other, shapes).plan.digest not in digests


def test_nobody_gathers_the_whole_model() -> None:
    """NeMo-RL 70: an all-gather before the transfer. A trainer's rank takes in nothing, an engine's only its own."""
    shapes = shapes_of(10, 64, 64)
    moved = sm.refit(divided(ROWS, range(4)), divided(ROWS, range(4, 8)), shapes)
    everything = 10 * 64 * 64 * 2
    gathered = everything * 3 // 4
    taken_in = moved.plan.received_bytes()
    assert [taken_in[rank] for rank in range(8)] == [0] * 4 + [everything // 4] * 4
    assert max(taken_in.values()) < gathered


def test_an_embedding_that_several_stages_have() -> None:
    """NeMo-RL 2471: what is shared with the last stage is sent by each that has it."""
    shapes = {"embed": ((64, 1024), "bfloat16")}
    table = "embed @pp=0 = embed\nalso head @pp=-1 = embed"
    trainer = Stored(parse(table), (sm.Mesh(pp=4),))
    moved = sm.refit(trainer, whole("embed = embed", (4,)), shapes)
    once = 64 * 1024 * 2
    wrong = sum(once for _ in (0, 3))
    sent = moved.plan.sent_bytes()
    assert sum(sent.values()) == once < wrong
    assert sent[0] == sent[3] == once // 2


def test_slots_that_are_padded_to_the_largest() -> None:
    """Megatron-LM 6712: what goes over the wire is src x dst x the largest. Here it is what ranks need."""
    sizes = [1 << k for k in range(10)]
    shapes = {f"layers.{n}.w": ((size, 8), "bfloat16") for n, size in enumerate(sizes)}
    table = "layers.{l}.w = layers.{l}.w"
    spread = in_stages(table, pp=5, layers=10)
    moved = sm.refit(spread, divided(COLUMNS, range(5, 9)), shapes)
    needed = 16 * sum(sizes)
    messages = list_messages(make_parts(moved.plan))
    padded = 5 * 4 * max(m.nbytes for m in messages)
    assert sum(m.nbytes for m in messages) == needed == sum(moved.plan.received_bytes().values())
    assert padded > 2 * needed


def test_an_engine_that_is_gone() -> None:
    """NeMo-RL 3472, AReaL 1101: one dead rank blocks every refit. A plan without its engine names it not."""
    shapes = shapes_of(2, 8, 8)
    engines = {"a": divided(ROWS, range(2, 4)), "b": divided(ROWS, range(4, 6))}
    trainer = divided(ROWS, range(2))
    assert {4, 5} <= set(sm.refit(trainer, engines, shapes).plan.ranks)
    del engines["b"]
    left = sm.refit(trainer, engines, shapes).plan
    sm.verify(left)
    assert set(left.ranks) == {0, 1, 2, 3}


# In which messages


def list_messages(parts: tuple[RankProgram, ...]) -> list[Message]:
    """All that travels, once."""
    return [m for part in parts for one in part.rounds for m in one.sends]


def test_tensor_by_tensor() -> None:
    """verl with SGLang, 200 s for 16 billion parameters: a collective per tensor. Here one message per pair."""
    counts = []
    for layers in (10, 400):
        shapes = shapes_of(layers, 8, 8)
        moved = sm.refit(divided(ROWS, range(2)), divided(ROWS, range(2, 6)), shapes)
        transfers = sum(1 for _ in moved.plan.transfers())
        assert transfers >= 4 * layers
        counts.append(len(list_messages(make_parts(moved.plan))))
    assert counts == [4, 4]


def test_more_operations_in_a_group_than_it_takes() -> None:
    """pytorch 174288: 24,000 operations of one group hang, 8,000 pass."""
    mesh, other = sm.Mesh(tp=32), sm.Mesh(tp=32, ranks=range(32, 64))
    shapes = shapes_of(30, 32, 32)
    moved = sm.refit(Stored(parse(ROWS), (mesh,)), Stored(parse(COLUMNS), (other,)), shapes)
    in_one_group = sum(1 for _ in moved.plan.transfers(src=0))
    assert in_one_group == 30 * 32
    limit = 1 << 20  # as few as 8 messages of 64 KiB each way have room
    for part in make_parts(moved.plan, max_inflight_bytes=limit):
        assert all(len(one.sends) <= 8 and len(one.receives) <= 8 for one in part.rounds)


def test_packing_that_takes_the_memory_of_a_model() -> None:
    """NeMo-RL 630: all is packed before the first byte is sent, and memory is needed twice."""
    shapes = shapes_of(64, 256, 256)
    moved = sm.refit(divided(ROWS, range(2)), divided(COLUMNS, range(2, 4)), shapes)
    packed = moved.plan.sent_bytes()[0]
    limit = 1 << 18
    assert packed > 8 * limit
    for part in make_parts(moved.plan, max_inflight_bytes=limit):
        assert max(map(staging_bytes, part.rounds)) <= limit


def test_a_rank_that_only_sends_beside_one_that_only_receives() -> None:
    """nccl 2130: batched operations whose two ends are listed unlike hang, though nothing is missing."""
    shapes = {f"layers.{n}.w": ((8 * (n + 1), 8), "bfloat16") for n in range(12)}
    trainer = in_stages(ROWS, pp=2, layers=12, tp=2)
    engine = divided(COLUMNS, range(4, 8))
    backwards = dict(reversed(shapes.items()))
    ends = [sm.refit(trainer, engine, own).plan for own in (shapes, backwards)]
    assert list(shapes) != list(backwards)  # the order of each end's own list
    sender, receiver = ({part.rank: part for part in make_parts(p)} for p in ends)
    for src, dst in itertools.product(range(4), range(4, 8)):
        sends = [m for one in sender[src].rounds for m in one.sends if m.dst_rank == dst]
        receives = [m for one in receiver[dst].rounds for m in one.receives if m.src_rank == src]
        assert sends and sends == receives


def test_devices_of_unequal_memory() -> None:
    """NeMo-RL: borders of packs are a share of the device's own memory, so that counts differ, and ranks hang."""
    sizes = [3_000_000] * 8
    counts = [count_packs(sizes, memory // 50) for memory in (400_000_000, 700_000_000)]
    assert counts[0] != counts[1]
    # Borders are of a limit that all have agreed on: another limit on one rank is an error on all
    # (tests/distributed/exchange/test_compile.py), and borders of one limit are equal at both ends.
    shapes = shapes_of(8, 256, 256)
    moved = sm.refit(divided(ROWS, range(2)), divided(COLUMNS, range(2, 4)), shapes)
    borders = {}
    for limit in (1 << 18, 1 << 20):
        parts = make_parts(moved.plan, max_inflight_bytes=limit)
        ends = [[m for one in part.rounds for m in (*one.sends, *one.receives)] for part in parts]
        assert sorted(ends[0] + ends[1]) == sorted(ends[2] + ends[3])
        borders[limit] = len(ends[0])
    assert borders[1 << 18] != borders[1 << 20]


def count_packs(sizes: list[int], target: int) -> int:
    """Packs of tensors, each ended once it is above the target."""
    packs, held = 0, 0
    for size in sizes:
        held += size
        if held > target:
            packs, held = packs + 1, 0
    return packs + bool(held)


# How long it takes to find out


def count_calls(act: Callable[[], object]) -> int:
    """Calls of functions while this is done."""
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


def test_experts_that_are_looked_for_one_by_one() -> None:
    """sglang 30849: each name is compared with each expert's, a minute per pass."""
    engine = vllm({**SERVED, "num_experts": 512}, ranks=range(8), tp=8, ep=True)

    def look(count: int) -> int:
        shapes: Shapes = {
            f"{LAYER}mlp.experts.{e}.{x}_proj.weight": ((4, 4), "bfloat16")
            for e in range(count)
            for x in ("gate", "up", "down")
        }
        return count_calls(lambda: bind(engine, Vocabulary(shapes)).slots(3))

    compared = [count * count for count in (128, 512)]
    assert compared[1] == 16 * compared[0]
    look(128)  # what is kept between calls is made once
    assert look(512) < 5 * look(128)
