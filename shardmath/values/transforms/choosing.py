"""Choosing: which transform a tensor has, by its name.

1. A pattern is a kind of layer or a glob, as in `shardmath.rules`, or the whole name. The first that matches counts.
2. The companions of a transformed tensor follow it; no rule chooses a transform for them.
3. A rule that takes no tensor is an error, since it is a typing mistake; only `*` may take none.

>>> from shardmath.values.transforms.pointwise import Cast
>>> sorted(choose({"*.bias": Cast("float32"), "row": Cast("bfloat16")}, ["fc2.weight", "fc1.weight", "fc1.bias"]))
['fc1.bias', 'fc2.weight']
>>> choose({"fc3.weight": Cast("bfloat16")}, ["fc2.weight", "fc1.weight"])
Traceback (most recent call last):
shardmath.PlanError: rule 'fc3.weight' matches no tensor of 2 (fc2.weight, fc1.weight); \
did you mean 'fc2.weight'? \
write a kind (column, row, vocab, replicate) or a glob on the whole name (*.q_proj.weight)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardmath.base.arguments import mapping, text
from shardmath.base.errors import PlanError
from shardmath.base.text import shown
from shardmath.layouts.holdings import LayoutOrWindows
from shardmath.layouts.styles import KINDS, fits
from shardmath.plans.groups import Side, check_names, key_by_name
from shardmath.values.transforms.components import End, Transform, list_companions
from shardmath.values.transforms.wires import Held

__all__ = ["Paired", "choose", "pair"]


class Paired(NamedTuple):
    """Three dicts by tensor name. In `src` (before a move) and `dst` (after it), a value is a tuple: the tensor's
    layout, then the layouts of its companions (further tensors that belong to it, such as scales). In `chosen`, a value
    is the transform that converts the tensor."""

    src: Mapping[str, Held]
    dst: Mapping[str, Held]
    chosen: Mapping[str, Transform]


def pair(src: Side, dst: Side, rules: Mapping[str, Transform]) -> Paired:
    """Choose each tensor's transform by `rules` (name pattern to transform), and collect its layouts before a move
    (`src`) and after it (`dst`). For each of the two, the Paired has one tuple per tensor: its layout, then the layouts
    of companions (tensors stored with it, such as scales).

    Raises PlanError as `choose` does, for a companion that is missing, and for a tensor that only one side has.
    """
    src_tensors, dst_tensors = key_by_name(src, dst)
    chosen = choose(rules, list(src_tensors))
    companion_names: set[str] = set()
    for name, transform in chosen.items():
        companions = list_companions(transform, "source")
        companion_names.update(name + companion.suffix for companion in companions)
    for name in companion_names:
        chosen.pop(name, None)
    sent = _join_companions(src_tensors, chosen, "source")
    received = _join_companions(dst_tensors, chosen, "destination")
    check_names(sent, received)
    return Paired(sent, received, chosen)


def _join_companions(
    side: Mapping[str, LayoutOrWindows], chosen: Mapping[str, Transform], end: End
) -> dict[str, Held]:
    """The tensors of a side, each with its companions."""
    companions = {}
    companion_names: set[str] = set()
    for name, transform in chosen.items():
        companions[name] = _find_companions(side, name, transform, end)
        shared_names = companion_names.intersection(companions[name])
        if shared_names:
            what = f"{min(shared_names)!r} belongs to both {name!r} and another tensor at the {end}"
            raise PlanError(f"{what}; give the scales of one another suffix")
        companion_names.update(companions[name])
    joined = {}
    for name, held in side.items():
        if name not in companion_names:
            joined[name] = (held, *companions.get(name, {}).values())
    return joined


def _find_companions(
    side: Mapping[str, LayoutOrWindows], name: str, transform: Transform, end: End
) -> dict[str, LayoutOrWindows]:
    """The companions of a tensor, by name. Raises PlanError for one that is missing."""
    companions = {}
    for companion in list_companions(transform, end):
        full_name = name + companion.suffix
        if full_name not in side:
            what = f"{transform} of {name!r} needs {full_name!r}, which the {end} does not have"
            raise PlanError(f"{what}; add its layout to the {end}")
        if full_name in companions:
            raise PlanError(
                f"{transform} has {full_name!r} twice for {name!r}; give each a separate suffix"
            )
        companions[full_name] = side[full_name]
    return companions


def choose(rules: Mapping[str, Transform], names: Sequence[str]) -> dict[str, Transform]:
    """Return a dict from tensor name to transform: each of `names` has the transform of the first pattern in `rules`, a
    glob or a kind of weight such as "column", that matches it. Names that match no pattern are left out.

    Raises PlanError for an unused pattern.
    """
    by_pattern = _read_rules(rules)
    chosen = {}
    used_patterns = set()
    for name in names:
        pattern = _find_first(by_pattern, name)
        if pattern is not None:
            used_patterns.add(pattern)
            chosen[name] = by_pattern[pattern]
    for pattern in by_pattern:
        if pattern not in used_patterns and pattern != "*":
            raise PlanError(_word_idle(pattern, names))
    return chosen


def _read_rules(rules: object) -> dict[str, Transform]:
    """The transforms by pattern. Raises PlanError for a value that is not a transform."""
    by_pattern = {}
    given = mapping(rules, "rules are ", "name pattern to transform", PlanError)
    for key, transform in given.items():
        pattern = text(key, "the pattern of a rule", PlanError)
        # A class of transforms has all methods of the protocol, too.
        if not isinstance(transform, Transform) or isinstance(transform, type):
            fix = "give a value such as transforms.Cast('bfloat16')"
            raise PlanError(f"rule {pattern!r} has {shown(transform)}, not a transform; {fix}")
        by_pattern[pattern] = transform
    return by_pattern


def _find_first(patterns: Iterable[str], name: str) -> str | None:
    for pattern in patterns:
        if pattern == name or fits(pattern, name):
            return pattern
    return None


def _word_idle(pattern: str, names: Sequence[str]) -> str:
    """The message that says why the rule takes no tensor."""
    from difflib import get_close_matches  # 3 ms that only a mistake should cost

    for name in names:
        if pattern == name or fits(pattern, name):
            what = f"rule {pattern!r} is never used: earlier rules match {name!r} and all else it matches"
            return f"{what}; move it before them, or remove it"
    examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    others = [word for word in (*KINDS, *names) if word != pattern]
    closest = get_close_matches(pattern, others, n=1, cutoff=0.5)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    what = f"rule {pattern!r} matches no tensor of {len(names)} ({examples})"
    kinds = ", ".join(KINDS)
    return f"{what}; {hint}write a kind ({kinds}) or a glob on the whole name (*.q_proj.weight)"
