"""Notation: einops-style text for which ranks hold what, read as dimensions.

1. One word or group per dimension, most significant digit first. A mesh axis chooses the rank, an
   integer is a local digit, the one free name stands for the rest: `(tp dp n) h` is FSDP over tensor parallel.
2. Left of the free name every digit ceil-chunks; right of it are fixed blocks with a short tail.
   A group without a free name must divide exactly.
3. A single free name is not divided, mesh axes that are not named replicate, `...` stands for the
   remaining dimensions, undivided.
4. `dp*tp` is one digit over flattened axes; `tp~` is balanced; `tp[7 3]` gives sizes to the axis's
   coordinates (no blank between), `[8 2 2]` to components; `tp@name` is the placement of this name in
   `rules`; `|` ends a stage.
5. `(8: tp n + 2: kv n)` puts fields one after the other; `=152064` pads; `=<0:4 -4>` lists which logical
   ranges and holes are stored.
6. `{sum: pp}` at the end: the ranks along pp hold addends.
7. Dimension names are not part of the value. The printed form (`unparse`) is canonical: reading it back
   gives the same value.

    layout := dim* ('{' OP ':' AXIS* '}')*
    dim    := NAME | '...' | '(' field ('+' field)* ')' ('=' INT | '=<' (INT ':' INT | '-' INT)* '>')?
    field  := (INT ':')? digit* ('|' digit*)*
    digit  := INT | '[' INT* ']' | NAME | AXIS ('*' AXIS)* ('~' | '[' INT* ']' | '@' NAME)?

>>> from shardmath.layouts.unparse import unparse
>>> dims, partial = parse("(tp dp n) h {sum: pp}", (9, 4), {"pp": 2, "dp": 4, "tp": 2}, {})
>>> unparse(dims, partial, {"pp": 2, "dp": 4, "tp": 2})
'(tp dp n) h {sum: pp}'
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

from shardmath.base.errors import NotationError, ShardError
from shardmath.base.text import plural
from shardmath.layouts.algebra.dimension import Dimension, Field
from shardmath.layouts.algebra.runs import Runs, from_ranges, identity
from shardmath.layouts.placement import OPS
from shardmath.layouts.reader import Axes, LayoutReader, Rules, Token, join_names
from shardmath.layouts.words import WrittenDigit, make_field

__all__ = ["Partials", "Rules", "count_dimensions", "pad", "parse"]

Partials: TypeAlias = tuple[tuple[str, str], ...]
"""(mesh axis, operation), in mesh order."""


def parse(
    text: str, shape: tuple[int, ...], axes: Axes, rules: Rules
) -> tuple[tuple[Dimension, ...], Partials]:
    """Parse `text`, the notation of a layout, and return the tensor's dimensions and its Partial axes. `axes` maps mesh
    axes to sizes, and `rules` maps each name written as @name in `text` to a placement.

    Raises NotationError, with a caret under the error.
    """
    reader = LayoutReader(text, shape, axes, rules)
    dims = _read_dims(reader)
    ops: dict[str, str] = {}
    while reader.here.text == "{":
        ops.update(_read_partial(reader))
    if reader.here.kind != "end":
        reader.fail(
            f"unexpected {reader.here.text!r} after a dimension",
            reader.here.at,
            "write a name or (a group) per dimension, then {sum: axes} for Partial axes",
        )
    return tuple(dims), tuple((name, ops[name]) for name in axes if name in ops)


def count_dimensions(text: str, axes: Axes) -> int:
    """Return how many dimensions `text`, the notation of a layout over the mesh axes `axes`, names; `...` counts as
    none. Raises NotationError for a character that no layout has."""
    return _count_named(LayoutReader(text, (), axes, {}).tokens)


def _read_dims(reader: LayoutReader) -> list[Dimension]:
    """One dimension for each size of the shape."""
    dims: list[Dimension] = []
    ellipsis: int | None = None
    while reader.here.kind == "word" or reader.here.text in ("(", "..."):
        start = reader.here.at
        if reader.accept("..."):
            if ellipsis is not None:
                reader.fail("'...' is written twice", start, "write ... once")
            ellipsis = len(dims)
            count = max(0, len(reader.shape) - _count_named(reader.tokens))
            dims += [_undivided(n) for n in reader.shape[ellipsis : ellipsis + count]]
        elif len(dims) == len(reader.shape):
            reader.fail(
                f"text has more dimensions than the shape {reader.shape}",
                start,
                f"write {plural(reader.shape, 'dimension')}",
            )
        else:
            dims.append(_read_dim(reader, len(dims)))
    if len(dims) < len(reader.shape):
        reader.fail(
            f"text has {plural(dims, 'dimension')}, but the shape {reader.shape} has {len(reader.shape)}",
            reader.here.at,
            "add a name for each, or '...' for the rest",
        )
    return dims


def _count_named(tokens: list[Token]) -> int:
    """The number of dimensions that the text names: words and groups outside of groups."""
    depth = count = 0
    for token in tokens:
        if token.text == "{" and not depth:
            break
        opens = token.text == "("
        if depth == 0 and (opens or token.kind == "word"):
            count += 1
        if opens:
            depth += 1
        elif token.text == ")":
            depth -= 1
    return count


def _undivided(n: int) -> Dimension:
    return Dimension(n, (Field(n),))


def _claim_name(reader: LayoutReader, name: str, d: int, at: int) -> None:
    """Note that dimension d has this name. Raises NotationError if another dimension has it."""
    owner = reader.names.setdefault(name, d)
    if owner != d:
        reader.fail(
            f"free name {name!r} is used in two dimensions", at, "give each dimension its own name"
        )


def _read_dim(reader: LayoutReader, d: int) -> Dimension:
    """Dimension d: a group, or a single free name."""
    if reader.here.text == "(":
        return _read_group(reader, d)
    _, name, at = reader.take()
    if name in reader.axes:
        reader.fail(
            f"mesh axis {name!r} stands alone",
            at,
            f"write ({name} n) to divide, or leave it out to replicate",
        )
    _claim_name(reader, name, d, at)
    return _undivided(reader.shape[d])


def _read_group(reader: LayoutReader, d: int) -> Dimension:
    """Dimension d in parentheses: its fields, and the positions that are stored of it."""
    start = reader.take().at
    if reader.here.text == ")":
        reader.fail("empty group", start, "write a free name for an undivided dimension")
    fields = [_read_field(reader, d)]
    while reader.accept("+"):
        fields.append(_read_field(reader, d))
    reader.expect(")", "close the group")
    stored = _read_stored(reader, d)
    try:
        dimension = _make_dimension(reader, reader.shape[d], fields, stored)
    except NotationError:
        raise
    except ShardError as error:
        _fail_as(reader, error, start, d)
    _claim_axes(reader, dimension, start)
    return dimension


_Written: TypeAlias = tuple[int | None, list[list[WrittenDigit]]]
"""A field as written: its size, if it has one, and the words of each stage."""


def _make_dimension(
    reader: LayoutReader, n: int, written: list[_Written], stored: Runs | None
) -> Dimension:
    """The dimension of these fields; a single field has the size of all that is stored."""
    total = n if stored is None else len(stored)
    fields = []
    for size, stages in written:
        if size is None and len(written) > 1:
            first = stages[0][0]
            fix = "give every field its size, as in (8: tp n + 2: n)"
            reader.fail("a field has no size", first.at, fix)
        fields.append(make_field(reader, total if size is None else size, stages))
    return Dimension(n, tuple(fields), stored)


def _claim_axes(reader: LayoutReader, dimension: Dimension, at: int) -> None:
    """Note that the axes divide this dimension. Raises NotationError if one divides another dimension."""
    for name in dimension.axes:
        if name in reader.used:
            reader.fail(
                f"mesh axis {name!r} is used in two dimensions",
                at,
                "leave it out of one dimension",
            )
        reader.used[name] = at


def _read_field(reader: LayoutReader, d: int) -> _Written:
    """A field of dimension d, up to the + or ) after it."""
    size = None
    if reader.here.kind == "int" and reader.tokens[reader.next + 1].text == ":":
        size = reader.integer()
        reader.take()
    start = reader.here.at
    stages = [_read_words(reader, d)]
    while reader.accept("|"):
        stages.append(_read_words(reader, d))
    if not all(stages):
        reader.fail("empty part of a group", start, "write a free name if nothing divides it")
    _check_once(reader, stages)
    return size, stages


def _check_once(reader: LayoutReader, stages: list[list[WrittenDigit]]) -> None:
    """Raise NotationError if an axis stands twice in a field."""
    seen: set[str] = set()
    for words in stages:
        for word in words:
            for name in word.axes:
                if name in seen:
                    reader.fail(
                        f"mesh axis {name!r} is used twice in one field",
                        word.at,
                        "write it once",
                    )
                seen.add(name)


def _read_words(reader: LayoutReader, d: int) -> list[WrittenDigit]:
    """The words of one stage."""
    words: list[WrittenDigit] = []
    while reader.here.kind in ("word", "int") or reader.here.text == "[":
        word = _read_word(reader)
        if word.free:
            _claim_name(reader, word.free, d, word.at)
        words.append(word)
    return words


def _read_word(reader: LayoutReader) -> WrittenDigit:
    """An integer, sizes, the free name, or mesh axes with their mark."""
    at = reader.here.at
    if reader.here.kind == "int":
        number = reader.integer()
        if number < 1:
            reader.fail("a number of pieces is 0", at, "write 1 or more")
        return WrittenDigit(at, number=number)
    if reader.here.text == "[":
        return WrittenDigit(at, sizes=_read_sizes(reader))
    if reader.here.text not in reader.axes:
        return WrittenDigit(at, free=reader.take().text)
    axes = [reader.axis().text]
    while reader.accept("*"):
        axes.append(reader.axis().text)
    return _read_mark(reader, WrittenDigit(at, axes=tuple(axes)))


def _read_mark(reader: LayoutReader, word: WrittenDigit) -> WrittenDigit:
    """The word with the mark after its axes: ~, sizes, or the name of a rule."""
    if reader.accept("~"):
        return WrittenDigit(word.at, word.axes, mark="~")
    # `tp[7 3]` gives sizes to the coordinates of tp; in `tp [7 3]` the sizes are a separate digit.
    last_axis = reader.tokens[reader.next - 1]
    axis_end = last_axis.at + len(last_axis.text)
    if reader.here.text == "[" and reader.here.at == axis_end:
        sizes = _read_sizes(reader)
        return WrittenDigit(word.at, word.axes, sizes=sizes)
    if reader.accept("@"):
        _, name, at = reader.word("the name of a rule")
        if name not in reader.rules:
            reader.fail(
                f"unknown placement '@{name}'",
                at,
                f"add {name!r} to rules=, which has {join_names(reader.rules)}",
            )
        return WrittenDigit(word.at, word.axes, mark=name)
    return word


def _read_sizes(reader: LayoutReader) -> tuple[int, ...]:
    """Integers between [ and ]."""
    start = reader.take().at
    sizes = []
    while reader.here.kind == "int":
        sizes.append(reader.integer())
    reader.expect("]", "sizes are integers between [ and ]")
    if not sizes:
        reader.fail("empty list of sizes", start, "write one size or more")
    return tuple(sizes)


def _fail_as(reader: LayoutReader, error: ShardError, at: int, d: int) -> NoReturn:
    """Raise NotationError at a position of the text, with the words of an error about dimension d."""
    what, _, fix = str(error).partition("; ")
    reader.fail(f"dimension {d} of shape {reader.shape}: {what}", at, fix)


def _read_stored(reader: LayoutReader, d: int) -> Runs | None:
    """The stored positions of dimension d: a padded size, or ranges; None if the text gives neither."""
    start = reader.here.at
    n = reader.shape[d]
    try:
        if reader.accept("="):
            return pad(n, reader.integer())
        if reader.accept("=<"):
            stored = from_ranges(_read_ranges(reader))
            if stored.extent > n:
                raise ShardError(
                    f"stored positions {stored} reach {stored.extent - 1}, but there are only {n}; "
                    f"store only positions below {n}"
                )
            return stored
    except NotationError:
        raise
    except ShardError as error:
        _fail_as(reader, error, start, d)
    return None


def pad(n: int, size: int) -> Runs:
    """Return Runs of `size` positions: all `n` positions of a dimension, then holes.

    Raises ShardError if `size` is below `n`.
    """
    if size < n:
        raise ShardError(
            f"stored size {size} is less than the {n} positions of the tensor; pad to {n} or more"
        )
    return Runs(identity(n).segments, size)


_Range: TypeAlias = tuple[int, int] | int
"""Start and stop of a range, or the length of a hole."""


def _read_ranges(reader: LayoutReader) -> list[_Range]:
    """Ranges and holes up to the closing >."""
    ranges: list[_Range] = []
    while not reader.accept(">"):
        if reader.accept("-"):
            ranges.append(reader.integer())
        else:
            start = reader.integer()
            reader.expect(":", "a stored range is start:stop, a hole -n")
            stop = reader.integer()
            ranges.append((start, stop))
    return ranges


def _read_partial(reader: LayoutReader) -> dict[str, str]:
    """The reduction that each axis between { and } waits for."""
    reader.take()
    _, op, at = reader.word("a reduction")
    if op not in OPS:
        choices = ", ".join(OPS)
        reader.fail(f"unknown reduction {op!r}", at, f"use one of {choices}")
    reader.expect(":", "write {sum: axes}")
    ops: dict[str, str] = {}
    while not reader.accept("}"):
        _, axis, at = reader.axis()
        if axis in reader.used:
            reader.fail(
                f"mesh axis {axis!r} is used already",
                at,
                "leave it out of one: an axis divides a dimension or is Partial, not both",
            )
        reader.used[axis] = at
        ops[axis] = op
    return ops
