"""Rules: the layouts of a model's tensors, in one line that a person types.

1. A **side** is a mesh and rules: `dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h); * (dp n) ...`.
2. The mesh is `axis=size` words, last axis fastest, and optionally `ranks=4:8` or `ranks=0,2,4,6`; by default ranks
   are consecutive from `first_rank`.
3. A rule is a pattern and a layout. A pattern is a kind of the family table (column, row, vocab, replicate)
   or a glob on the tensor's name (`*.q_proj.weight`); the layout is in shardmath's notation, `...` for
   undivided dimensions.
4. The first rule that matches a name applies. Names that no rule matches, and all scalars, are replicated.
5. A rule that applies to no tensor is an error, since it is a typing mistake; only `*` may be idle.
6. A mesh without rules (`tp=4`, `dp=2 tp=2`) means DEFAULTS: `tp` divides by kind, `dp` divides dimension 0 of all
   tensors, inside `tp`, as FSDP does, and `replica` replicates. Other axes need rules.

    side    := mesh (':' rule (';' rule)*)?
    mesh    := (AXIS '=' INT)* ('ranks=' span (',' span)*)?          span := INT | INT ':' INT
    rule    := PATTERN LAYOUT

>>> side = parse("dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h)")
>>> shapes = {"q_proj.weight": ((8, 6), "bfloat16"), "o_proj.weight": ((6, 8), "bfloat16")}
>>> {name: layout.local_shape(3) for name, layout in side.layouts(shapes).items()}
{'q_proj.weight': (2, 6), 'o_proj.weight': (3, 4)}
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardmath.base.arguments import as_integer, instance, listed, mapping
from shardmath.base.arguments import text as plain
from shardmath.base.errors import MeshError, NotationError, ShardError
from shardmath.base.text import shown
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.layouts.styles import KINDS, fits
from shardmath.models.systems.hf import Entry, Shapes

__all__ = ["DEFAULTS", "Rule", "Shapes", "Side", "parse", "parse_mesh"]

WORD = re.compile(r"(?P<axis>\w+)\s*=\s*(?P<value>\d+(?::\d+)?(?:,\d+(?::\d+)?)*)?")
MESH_ALONE = (
    "a mesh is axis=size words with blanks between them, "
    "then ranks=4:8 or ranks=0,2,4,6 if they do not follow each other"
)
MESH_FIX = f"{MESH_ALONE}, then ':'"
RULE_FIX = "write a kind or a name pattern, then a layout: column (tp n) ..."


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the layouts of a Side (a mesh with rules): tensors whose name or kind, such as "column", matches
    `pattern` have the layout text `layout`. If several rules match, the first applies.

    Scalars are replicated, whatever matches their names.
    """

    pattern: str
    layout: str

    def __post_init__(self) -> None:
        pattern = plain(self.pattern, "the pattern of a rule", NotationError)
        words = plain(self.layout, "the layout of a rule", NotationError).split()
        layout = " ".join(words)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "layout", layout)
        if pattern.split() != [pattern] or not layout or ";" in str(self):
            what = f"rule {pattern!r} {layout!r} is not a pattern without blanks and a layout, without ';'"
            raise NotationError(what, fix=RULE_FIX)

    def __str__(self) -> str:
        return f"{self.pattern} {self.layout}"

    def matches(self, name: str) -> bool:
        """Whether `pattern` is the kind (such as column) of the tensor `name`, or a glob that matches the name."""
        return fits(self.pattern, name)


DEFAULTS: dict[tuple[str, ...], tuple[Rule, ...]] = {
    (): (),
    ("tp",): (
        Rule("column", "(tp n) ..."),
        Rule("row", "h (tp n) ..."),
        Rule("vocab", "(tp n) ..."),
    ),
    ("dp",): (Rule("*", "(dp n) ..."),),
    ("dp", "tp"): (
        Rule("column", "(tp dp n) ..."),
        Rule("row", "(dp n) (tp h) ..."),
        Rule("vocab", "(tp dp n) ..."),
        Rule("*", "(dp n) ..."),
    ),
}
"""A dict of the default Rules, for a mesh to which no rules are given; a key is the tuple of the axes dp and tp that
the mesh has, such as ("dp", "tp")."""


@dataclass(frozen=True, slots=True)
class Side:
    """A mesh, and rules (name patterns with layouts) for the tensors on it. Without rules, the default rules for its
    mesh axes, such as dp and tp, apply.

    `parse(str(side)) == side`. Raises NotationError if `mesh` is not a mesh, or `rules` are not rules.
    """

    mesh: Mesh
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        instance(self.mesh, Mesh, "pass mesh=shardmath.Mesh(...)", NotationError)
        rules = listed(self.rules, "rules", NotationError)
        for rule in rules:
            instance(rule, Rule, "give rules.Rule(pattern, layout)", NotationError)
        object.__setattr__(self, "rules", rules)
        if "ranks" in self.mesh.shape:
            what = f"mesh axis 'ranks' of {self.mesh} means the rank ids in text"
            raise NotationError(what, fix="give the axis another name")

    def __str__(self) -> str:
        mesh = _format_mesh(self.mesh)
        rules = "; ".join(map(str, self.rules))
        return f"{mesh}: {rules}" if rules else mesh

    def matches(self, names: Iterable[str]) -> dict[str, Rule | None]:
        """Return, by name, the first rule that matches each of `names`; None for a name that no rule matches.

        Raises NotationError for a rule that applies to no name, and for a mesh without rules that has an axis without
        a default.
        """
        rules = self.rules or _find_defaults(self)
        given = [plain(name, "the name of a tensor", NotationError) for name in names]
        matched = {name: _find_rule(rules, name) for name in given}
        if self.rules:
            _check_used(self, matched)
        return matched

    def layouts(self, shapes: Shapes) -> dict[str, Layout]:
        """Return the layout of every tensor in `shapes`, by name.

        Raises NotationError, with a caret in the side's text, if a rule is idle or does not fit its tensor.
        """
        given = mapping(shapes, "shapes are ", "name to (shape, dtype)", NotationError)
        layouts = {}
        matches = self.matches(given)
        for name, rule in matches.items():
            shape, dtype = _read_entry(given[name])
            layouts[name] = _make_layout(self, rule, name, shape, dtype)
        return layouts


def _find_rule(rules: tuple[Rule, ...], name: str) -> Rule | None:
    """The first rule that matches the name; None if none does."""
    for rule in rules:
        if rule.matches(name):
            return rule
    return None


def _read_entry(given: object) -> Entry:
    """The shape and the dtype of a tensor. Raises NotationError for anything else."""
    if isinstance(given, tuple) and len(given) == 2:
        return given
    raise NotationError(
        f"{given!r} is not the shape and the dtype of a tensor; give ((8, 6), 'float32')"
    )


def _make_layout(
    side: Side, rule: Rule | None, name: str, shape: tuple[int, ...], dtype: str
) -> Layout:
    """The layout that the rule gives the tensor. Raises NotationError if the rule does not fit the tensor."""
    # A scalar has no dimension that the rule could divide.
    text = rule.layout if rule and shape else "..."
    try:
        return Layout(shape, side.mesh, text, dtype=dtype)
    except ShardError as error:
        if rule is None:
            raise NotationError(f"tensor {name!r} of shape {shape}: {error}") from error
        raise _explain_misfit(side, rule, name, shape, error) from error


def _explain_misfit(
    side: Side, rule: Rule, name: str, shape: tuple[int, ...], error: ShardError
) -> NotationError:
    """The error with a caret in the side's text, at the rule or inside its layout."""
    why, fix, offset = str(error), "", 0
    if isinstance(error, NotationError):
        why, fix, offset = error.what, f"{error.fix}; or ", error.position
    text = str(side) if side.rules else f"{side}: {rule}"
    start = _find_position(side, rule) + len(rule.pattern) + 1
    advice = f"{fix}give the tensor its own rule before this one: {name} ..."
    what = f"rule {str(rule)!r} does not fit tensor {name!r} of shape {shape}: {why}"
    return NotationError(what, text, start + offset, advice)


def _find_position(side: Side, rule: Rule) -> int:
    """The position of the rule in the side's text; a rule of DEFAULTS would follow the mesh."""
    number = side.rules.index(rule) if rule in side.rules else 0
    before = Side(side.mesh, side.rules[:number])
    return len(str(before)) + 2  # ": " and "; " are as long


def _check_used(side: Side, matched: Mapping[str, Rule | None]) -> None:
    """Raise NotationError for a rule that applies to no tensor."""
    used = set(matched.values())
    for rule in side.rules:
        if rule not in used and rule.pattern != "*":
            raise _explain_idle(side, rule, list(matched))


def _explain_idle(side: Side, rule: Rule, names: list[str]) -> NotationError:
    """The error for a rule that applies to none of the names."""
    pattern, position = rule.pattern, _find_position(side, rule)
    taken = [name for name in names if rule.matches(name)]
    if taken:
        what = f"rule {pattern!r} is idle: an earlier rule takes {taken[0]!r} and all else that it matches"
        return NotationError(what, str(side), position, "move it before that rule, or remove it")
    near = difflib.get_close_matches(
        pattern, [word for word in (*KINDS, *names) if word != pattern], n=1, cutoff=0.5
    )
    hint = f"did you mean {near[0]!r}? " if near else ""
    some = names[:3] + ["..."] * (len(names) > 3)
    what = f"rule {pattern!r} matches no tensor of {len(names)} ({', '.join(some)})"
    kinds = ", ".join(KINDS)
    fix = f"{hint}write a kind ({kinds}) or a glob on the whole name (*.q_proj.weight)"
    return NotationError(what, str(side), position, fix)


def _find_defaults(side: Side) -> tuple[Rule, ...]:
    """The rules of a side without rules. Raises NotationError for an axis that has no default."""
    axes = side.mesh.shape
    for axis, n in axes.items():
        if axis not in ("dp", "replica", "tp"):
            text = str(side)
            raise NotationError(
                f"axis {axis!r} has no default rule, and the mesh has no rules",
                text,
                text.index(f"{axis}={n}"),
                f"write rules after ':', such as  {text}: * ({axis} n) ...  "
                f"or name the axes dp (divides dimension 0), replica, tp",
            )
    return DEFAULTS[tuple(name for name in ("dp", "tp") if name in axes)]


def _format_mesh(mesh: Mesh) -> str:
    """The axes and the ranks, as `parse` reads them."""
    words = [f"{name}={n}" for name, n in mesh.axes]
    ranks = _format_ranks(mesh.ranks)
    return " ".join([*words, f"ranks={ranks}"])


def _format_ranks(ranks: tuple[int, ...]) -> str:
    """The ranks as a span, or one by one."""
    first, end = ranks[0], ranks[0] + len(ranks)
    if ranks == tuple(range(first, end)):
        return f"{first}:{end}"
    return ",".join(map(str, ranks))


def parse(text: str, *, first_rank: int = 0) -> Side:
    """Parse text such as "dp=2 tp=2: column (tp dp n) ..." into a Side (a mesh and rules); ranks count from
    `first_rank` if the text does not list them.

    Raises NotationError, with a caret, for text that is not a side; whether rules fit tensors is checked later.
    """
    text = plain(text, "a side", NotationError)
    mesh, end = _read_mesh(text, as_integer(first_rank, "first_rank", MeshError))
    if end == len(text):
        return Side(mesh)
    after_colon = end + 1
    return Side(mesh, _read_rules(text, after_colon))


def parse_mesh(text: str) -> Mesh:
    """Parse text such as "dp=2 tp=4" into a Mesh; ranks count from 0 if the text does not list them.

    Raises NotationError, with a caret, for text that is not a mesh.
    """
    text = plain(text, "a mesh", NotationError)
    try:
        mesh, end = _read_mesh(text, 0)
    except NotationError as error:
        raise NotationError(error.what, error.text, error.position, MESH_ALONE) from None
    if end < len(text):
        what = f"expected only a mesh, found {text[end:]!r} after it"
        raise NotationError(what, text, end, MESH_ALONE)
    return mesh


def _read_mesh(text: str, first_rank: int) -> tuple[Mesh, int]:
    """(mesh, position of its end): the ':' before the rules, or the end of the text."""
    sizes: dict[str, int] = {}
    ranks: tuple[int, ...] | None = None
    earlier_names: set[str] = set()
    position = ranks_at = _skip(text, 0)
    while position < len(text) and text[position] != ":":
        axis, value, start = _read_word(text, position, earlier_names)
        earlier_names.add(axis)
        if axis == "ranks":
            ranks = _read_ranks(text, value, start)
            ranks_at = position
        else:
            sizes[axis] = _read_number(text, value, start)
            total = math.prod(sizes.values())
            if total > MOST_RANKS:
                what = f"a mesh of {total} ranks, more than {MOST_RANKS}"
                raise NotationError(what, text, position, "write smaller sizes")
        position = _skip(text, start + len(value))
    if not sizes and ranks is None:
        raise NotationError("expected a mesh axis, found none", text, position, MESH_FIX)
    return _make_mesh(text, sizes, ranks, first_rank, ranks_at), position


def _read_word(text: str, position: int, earlier_names: set[str]) -> tuple[str, str, int]:
    """(name, value, position of the value) of the word at a position.

    An axis has one number as its value, `ranks` any number of spans. Raises NotationError for another word, and for a
    name that was seen before.
    """
    word = WORD.match(text, position)
    if word is None:
        given, *_ = text[position:].split()
        raise NotationError(f"{given!r} is not axis=size", text, position, MESH_FIX)
    axis, value = word["axis"], word["value"] or ""
    if axis in earlier_names:
        raise NotationError(
            f"{axis!r} appears twice", text, position, "name each mesh axis, and ranks, once"
        )
    start = word.end() - len(value)
    if not value or (axis != "ranks" and not value.isdecimal()):
        after, *_ = text[start:].split(" ")
        given = value or after
        found = repr(given) if given else "the end of the text"
        raise NotationError(f"{axis!r} needs a size, found {found}", text, start, MESH_FIX)
    return axis, value, start


def _read_ranks(text: str, value: str, at: int) -> tuple[int, ...]:
    """The ranks of spans such as 4:8 or 3, separated by commas."""
    ranks: list[int] = []
    for span in value.split(","):
        start, _, stop = span.partition(":")
        first = _read_number(text, start, at)
        end = _read_number(text, stop, at + len(start) + 1) if stop else first + 1
        if end <= first:
            fix = "write first:one past the last, as 4:8 for 4, 5, 6, 7"
            raise NotationError(f"ranks {span} is an empty range", text, at, fix)
        if len(ranks) + end - first > MOST_RANKS:
            what = f"{len(ranks) + end - first} ranks, more than {MOST_RANKS}"
            raise NotationError(what, text, at, "name fewer ranks")
        ranks += range(first, end)
        at += len(span) + 1
    return tuple(ranks)


MOST_RANKS = 1 << 24
"""The most ranks in text; more are a typing mistake, and would take all memory."""


def _read_number(text: str, digits: str, at: int) -> int:
    """The number of these digits. Raises NotationError above MOST_RANKS; int() itself fails for very long ones."""
    figures = digits.lstrip("0") or "0"
    if len(figures) > len(str(MOST_RANKS)) or int(figures) > MOST_RANKS:
        unquoted = shown(digits)[1:-1]
        what = f"the number {unquoted} is above {MOST_RANKS}"
        raise NotationError(what, text, at, "write a smaller number")
    return int(figures)


def _make_mesh(
    text: str, sizes: Mapping[str, int], ranks: tuple[int, ...] | None, first_rank: int, at: int
) -> Mesh:
    """The mesh of these sizes. Raises NotationError, with a caret, for sizes and ranks that do not fit."""
    try:
        if ranks is None:
            mesh = Mesh(sizes)
            return mesh.relabel({rank: first_rank + rank for rank in mesh.ranks})
        return Mesh(sizes, ranks=ranks)
    except ShardError as error:
        raise NotationError(str(error), text, at, MESH_FIX) from error


def _read_rules(text: str, at: int) -> tuple[Rule, ...]:
    """The rules from a position on."""
    rules: list[Rule] = []
    for part in text[at:].split(";"):
        start = _skip(text, at)  # at the ; or the end of the text if the part is blank
        at += len(part) + 1
        rule = _read_rule(text, part, start)
        if rule in rules:
            raise NotationError(f"rule {str(rule)!r} appears twice", text, start, "remove one")
        rules.append(rule)
    return tuple(rules)


def _read_rule(text: str, part: str, start: int) -> Rule:
    """One rule, which begins at this position of the text."""
    pattern, *layout = part.split() or [""]
    if not pattern:
        raise NotationError("expected a rule, found none", text, start, RULE_FIX)
    if not layout:
        fix = f"write {pattern} (tp n) ... or {pattern} ..."
        raise NotationError(f"rule {pattern!r} has no layout", text, start + len(pattern), fix)
    return Rule(pattern, " ".join(layout))


def _skip(text: str, at: int) -> int:
    """The first position from `at` on that is not blank."""
    rest = text[at:].lstrip()
    return len(text) - len(rest)
