"""Answer: all that the page says about a question, as values for JSON, the quickest part first.

1. Each answer has all of the answers before it, so the page may show whichever it has.
2. Bad input is part of the answer: `faults`, by the name of the text, and `refused` for two layouts that have no plan.

>>> texts = {"shape": "8", "src_mesh": "tp=2", "src": "(tp n)", "dst_mesh": "dp=4", "dst": "(dp n)"}
>>> *_, last = answers(texts)
>>> last["plan"]["bytes"], last["done"], sorted(last["src"])
(24, True, ['axes', 'more', 'ranks', 'sentences', 'spellings', 'text'])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardmath.base.errors import ShardError
from shardmath.display.explorer.code import write_script, write_test
from shardmath.display.explorer.facts import (
    Facts,
    cost_facts,
    layout_facts,
    plan_facts,
    spelling_facts,
)
from shardmath.display.explorer.question import Question, read
from shardmath.display.pictures.drawing import svg
from shardmath.layouts.layout import Layout
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan, plan

__all__ = ["SCHEMA", "answers", "plan_answer"]

SCHEMA = "shardmath.explore/1"
"""The name of the answers' form: it changes whenever a key changes its meaning or is gone."""


def answers(texts: Mapping[str, str]) -> Iterator[Facts]:
    """Yield answers to what was typed (see `question.FIELDS`), each with more than the one before. The last one has
    `done` set to True.

    Never raises a ShardError.
    """
    asked = read(texts)
    faults = dict(asked.faults)
    answer: Facts = {"schema": SCHEMA, "done": False, "faults": faults}
    sides: dict[str, Layout] = {}
    for name, layout in (("src", asked.src), ("dst", asked.dst)):
        answer[name] = None
        if layout is not None:
            try:
                answer[name] = layout_facts(layout, asked.rank, spelled=False)
                sides[name] = layout
            except ShardError as error:
                # A layout may be right, and have more pieces than memory holds.
                faults[name] = str(error)
    yield answer
    for name, layout in sides.items():
        answer[name] = answer[name] | {"spellings": spelling_facts(layout)}
    if len(sides) < 2:
        yield from _draw_sides(answer, sides)
        return
    yield from _answer_both(answer, asked, sides)


def _draw_sides(answer: Facts, sides: Mapping[str, Layout]) -> Iterator[Facts]:
    """The pictures of the sides that can be read, without a plan."""
    pictures = {}
    for name, layout in sides.items():
        pictures[name] = answer[name] | {"picture": svg(layout, inline=True)}
    yield answer | pictures | {"done": True}


def _answer_both(answer: Facts, asked: Question, sides: Mapping[str, Layout]) -> Iterator[Facts]:
    """The plan between both sides, or why there is none."""
    try:
        planned = plan(sides["src"], sides["dst"], topology=asked.topology, window=True)
        answer = answer | _explain(planned, asked)
    except ShardError as error:
        yield from _draw_sides(answer | {"refused": str(error)}, sides)
        return
    yield answer
    answer = answer | {"picture": svg(planned, topology=asked.topology, inline=True)}
    yield answer
    yield answer | {"cost": cost_facts(planned, asked.topology), "done": True}


def _explain(planned: Plan, asked: Question) -> Facts:
    """The facts of a plan of one tensor, and its code."""
    ((src,),) = planned.src.values()
    ((dst,),) = planned.dst.values()
    window = bool(planned.in_part)
    topology = asked.topology
    code = {
        "python": write_script(src, dst, topology, window=window),
        "test": write_test(planned, topology, window=window),
    }
    return {"plan": plan_facts(planned, asked.rank), "code": code}


def plan_answer(planned: Plan, topology: Topology | None) -> Facts:
    """Return the answer for a plan that is there already, of any number of tensors: its picture and transfers."""
    return {
        "schema": SCHEMA,
        "done": True,
        "faults": {},
        "src": None,
        "dst": None,
        "plan": plan_facts(planned),
        "picture": svg(planned, topology=topology, inline=True),
        "cost": cost_facts(planned, topology),
    }
