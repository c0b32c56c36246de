"""Notation: einops-style text for who holds what, to and from dimensions.

1. One word or group a dimension, most significant digit first. A mesh axis chooses the rank, an integer is a
   local digit, the one free name is what remains: `(tp dp n) h` is FSDP over tensor parallel.
2. Left of the free name every digit ceil-chunks; right of it are fixed blocks with a short tail.
   A group without a free name must divide exactly.
3. A free name alone is not divided, mesh axes that are not named replicate, `...` stands for the remaining
   dimensions, undivided.
4. `dp*tp` is one digit over flattened axes; `tp~` is balanced; `tp[7 3]` gives sizes to the axis's coordinates (no
   blank between), `[8 2 2]` to components; `tp@name` is the placement that `rules` calls so; `|` ends a stage.
5. `(8: tp n + 2: kv n)` puts fields one after the other; `=152064` pads; `=<0:4 -4>` lists which logical ranges and
   holes are stored.
6. `{sum: pp}` at the end: the ranks along pp hold addends.
7. Dimension names are not part of the value. The printed form is canonical: reading it back gives the same value.

    layout := dim* ('{' OP ':' AXIS* '}')*
    dim    := NAME | '...' | '(' field ('+' field)* ')' ('=' INT | '=<' (INT ':' INT | '-' INT)* '>')?
    field  := (INT ':')? digit* ('|' digit*)*
    digit  := INT | '[' INT* ']' | NAME | AXIS ('*' AXIS)* ('~' | '[' INT* ']' | '@' NAME)?

>>> dims, partial = parse("(tp dp n) h {sum: pp}", (9, 4), {"pp": 2, "dp": 4, "tp": 2}, {})
>>> unparse(dims, partial, {"pp": 2, "dp": 4, "tp": 2})
'(tp dp n) h {sum: pp}'
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from shardmath.algebra.cuts import Balanced, Block, Chunks, Cut, Rule, Sizes, Splits
from shardmath.algebra.dimension import Dimension, Field, divided, lengths_at
from shardmath.algebra.runs import Runs, from_ranges, identity, spanning
from shardmath.algebra.stages import Digit, Stage
from shardmath.base.errors import NotationError, ShardError
from shardmath.base.given import plural
from shardmath.layouts.placement import OPS
from shardmath.layouts.reader import Axes, Reader, Rules, Token, Word, listed

__all__ = ["Rules", "parse", "rule_names", "unparse"]

Partials: TypeAlias = tuple[tuple[str, str], ...]
"""(mesh axis, operation), in mesh order."""


def parse(
    text: str, shape: tuple[int, ...], axes: Axes, rules: Rules
) -> tuple[tuple[Dimension, ...], Partials]:
    """The dimensions and Partial axes that `text` says of a tensor of this logical shape.

    `axes` are the mesh's axes and sizes. Raises NotationError, with a caret under the place.
    """
    read = Reader(text, shape, axes, rules)
    groups = _read_dims(read)
    partial: dict[str, str] = {}
    while read.here.text == "{":
        partial.update(_read_partial(read))
    if read.here.kind != "end":
        read.fail(
            f"unexpected {read.here.text!r}",
            read.here.at,
            "a layout is words and groups, then {op: axes}",
        )
    return tuple(groups), tuple((name, partial[name]) for name in axes if name in partial)


def _read_dims(read: Reader) -> list[Dimension]:
    dims: list[Dimension] = []
    ellipsis: int | None = None
    while read.here.kind == "word" or read.here.text in ("(", "..."):
        start = read.here.at
        if read.accept("..."):
            if ellipsis is not None:
                read.fail("second '...'", start, "write ... once")
            ellipsis = len(dims)
            rest = max(0, len(read.shape) - _top_level(read.tokens))
            dims += [_undivided(n) for n in read.shape[ellipsis : ellipsis + rest]]
        elif len(dims) == len(read.shape):
            read.fail(
                f"text has more dimensions than the shape {read.shape}",
                start,
                f"write {len(read.shape)} of them",
            )
        else:
            dims.append(_read_dim(read, len(dims)))
    if len(dims) < len(read.shape):
        read.fail(
            f"text has {plural(dims, 'dimension')}, the shape {read.shape} has {len(read.shape)}",
            read.here.at,
            "add a name for each, or '...' for the rest",
        )
    return dims


def _top_level(tokens: list[Token]) -> int:
    """How many dimensions the text names: words and groups outside of groups."""
    depth = count = 0
    for token in tokens:
        if token.text == "{" and not depth:
            break
        count += depth == 0 and (token.kind == "word" or token.text == "(")
        depth += (token.text == "(") - (token.text == ")")
    return count


def _undivided(n: int) -> Dimension:
    return Dimension(n, (Field(n),))


def _claim(read: Reader, name: str, d: int, at: int) -> None:
    """Note that dimension d is called `name`."""
    if read.names.setdefault(name, d) != d:
        read.fail(
            f"free name {name!r} is used in two dimensions", at, "give each dimension its own name"
        )


def _read_dim(read: Reader, d: int) -> Dimension:
    if read.here.text != "(":
        token = read.take()
        if token.text in read.axes:
            read.fail(
                f"mesh axis {token.text!r} stands alone",
                token.at,
                f"write ({token.text} n) to divide, or leave it out to replicate",
            )
        if token.text in read.names:
            read.fail(
                f"free name {token.text!r} is used in two dimensions",
                token.at,
                "give each dimension its own name",
            )
        _claim(read, token.text, d, token.at)
        return _undivided(read.shape[d])
    return _read_group(read, d)


def _read_group(read: Reader, d: int) -> Dimension:
    start = read.take().at
    if read.here.text == ")":
        read.fail("empty group", start, "write a free name for an undivided dimension")
    written = [_read_field(read, d)]
    while read.accept("+"):
        written.append(_read_field(read, d))
    read.expect(")", "close the group")
    stored = _read_stored(read, read.shape[d])
    total = read.shape[d] if stored is None else len(stored)
    try:
        fields = tuple(_field(read, size, stages, total, len(written)) for size, stages in written)
        dimension = Dimension(read.shape[d], fields, stored)
    except NotationError:
        raise
    except ShardError as error:
        read.fail(str(error), start, f"dimension {d} of {read.shape}")
    _claim_axes(read, dimension, start)
    return dimension


def _claim_axes(read: Reader, dimension: Dimension, at: int) -> None:
    for name in dimension.axes:
        if name in read.used:
            read.fail(
                f"mesh axis {name!r} is used in two dimensions",
                at,
                "an axis divides one dimension; leave it out of the other",
            )
        read.used[name] = at


def _read_field(read: Reader, d: int) -> tuple[int | None, list[list[Word]]]:
    size = None
    if read.here.kind == "int" and read.tokens[read.next + 1].text == ":":
        size = read.integer()
        read.take()
    start = read.here.at
    stages = [_read_words(read, d)]
    while read.accept("|"):
        stages.append(_read_words(read, d))
    if not all(stages):
        read.fail("empty field or stage", start, "write a free name for what is not divided")
    _once(read, [word for stage in stages for word in stage])
    return size, stages


def _once(read: Reader, words: list[Word]) -> None:
    seen: set[str] = set()
    for word in words:
        for name in word.axes:
            if name in seen:
                read.fail(
                    f"mesh axis {name!r} is used twice in one field",
                    word.at,
                    "an axis divides once",
                )
            seen.add(name)


def _read_words(read: Reader, d: int) -> list[Word]:
    words: list[Word] = []
    while read.here.kind in ("word", "int") or read.here.text == "[":
        words.append(_read_word(read))
        if words[-1].free:
            _claim(read, words[-1].free, d, words[-1].at)
    return words


def _read_word(read: Reader) -> Word:
    at = read.here.at
    if read.here.kind == "int":
        number = read.integer()
        if number < 1:
            read.fail("a local digit of 0", at, "write 1 or more")
        return Word(at, number=number)
    if read.here.text == "[":
        return Word(at, sizes=_read_sizes(read))
    if read.here.text not in read.axes:
        return Word(at, free=read.take().text)
    axes = [read.axis().text]
    while read.accept("*"):
        axes.append(read.axis().text)
    return _read_mark(read, Word(at, axes=tuple(axes)))


def _read_mark(read: Reader, word: Word) -> Word:
    if read.accept("~"):
        return Word(word.at, word.axes, mark="~")
    before = read.tokens[read.next - 1]
    if read.here.text == "[" and read.here.at == before.at + len(before.text):
        return Word(word.at, word.axes, sizes=_read_sizes(read))
    if read.accept("@"):
        name = read.word("the name of a rule")
        if name.text not in read.rules:
            read.fail(f"unknown rule {name.text!r}", name.at, f"rules= has {listed(read.rules)}")
        return Word(word.at, word.axes, mark=name.text)
    return word


def _read_sizes(read: Reader) -> tuple[int, ...]:
    start, sizes = read.take().at, []
    while read.here.kind == "int":
        sizes.append(read.integer())
    read.expect("]", "sizes are integers between [ and ]")
    if not sizes:
        read.fail("empty list of sizes", start, "write one size or more")
    return tuple(sizes)


def _read_stored(read: Reader, n: int) -> Runs | None:
    start = read.here.at
    try:
        if read.accept("="):
            return padded(n, read.integer())
        if read.accept("=<"):
            stored = from_ranges(_read_ranges(read))
            if stored.extent > n:
                raise ShardError(
                    f"stored {stored} reaches position {stored.extent - 1}, beyond the dimension"
                )
            return stored
    except NotationError:
        raise
    except ShardError as error:
        read.fail(str(error), start, f"the dimension has {n} logical positions")
    return None


def padded(n: int, size: int) -> Runs:
    """n logical positions stored at the front of `size`. Raises ShardError if they do not fit."""
    if size < n:
        raise ShardError(
            f"stored size {size} is below the {n} logical positions; pad to {n} or more"
        )
    return Runs(identity(n).segments, size)


def _read_ranges(read: Reader) -> list[tuple[int, int] | int]:
    out: list[tuple[int, int] | int] = []
    while not read.accept(">"):
        if read.accept("-"):
            out.append(read.integer())
        else:
            start = read.integer()
            read.expect(":", "a stored range is start:stop, a hole -n")
            out.append((start, read.integer()))
    return out


def _field(
    read: Reader, size: int | None, stages: list[list[Word]], total: int, count: int
) -> Field:
    at = stages[0][0].at
    if size is None and count > 1:
        read.fail("a field without a size", at, "write (8: tp n + 2: n): every field its size")
    n = total if size is None else size
    first = stages[0][0]
    if first.sizes is not None and sum(first.sizes) != n:
        fix = f"the dimension, or field, has {n}"
        read.fail(f"sizes {list(first.sizes)} add up to {sum(first.sizes)}", first.at, fix)
    raw = tuple(_stage(read, words) for words in stages)
    for s, words in enumerate(stages):
        if not any(word.free for word in words):
            _check_exact(read, divided(n, raw[:s]), words)
    return divided(n, raw)


def _check_exact(read: Reader, before: Field, words: list[Word]) -> None:
    """A stage without a free name: its digits multiply to the length that they divide."""
    product = math.prod(_count(read, word) for word in words)
    wrong = lengths_at(before, len(before.stages)) - {product}
    if wrong:
        fix = f"add a free name, or make the length {product}"
        read.fail(
            f"a group without a free name divides {product} exactly, not {min(wrong)}",
            words[0].at,
            fix,
        )


def _count(read: Reader, word: Word) -> int:
    if word.mark or word.sizes is not None:
        read.fail("a group with ~, sizes or a rule needs a free name", word.at, "write (tp~ n)")
    return word.number or math.prod(read.axes[name] for name in word.axes)


def _stage(read: Reader, words: list[Word]) -> Stage:
    free = [i for i, word in enumerate(words) if word.free]
    if len(free) > 1:
        first, second = words[free[0]], words[free[1]]
        fix = f"one must be a mesh axis ({listed(read.axes)}) or an integer"
        read.fail(f"{first.free!r} and {second.free!r} are both free names", second.at, fix)
    end = free[0] if free else len(words)
    return (
        *(_left(read, word) for word in words[:end]),
        *_right(read, words[end + 1 :], bool(free)),
    )


def _left(read: Reader, word: Word) -> Digit:
    sizes = tuple(read.axes[name] for name in word.axes)
    return Digit(_left_cut(read, word, word.number or math.prod(sizes)), word.axes, sizes)


def _left_cut(read: Reader, word: Word, parts: int) -> Cut:
    if word.sizes is not None:
        if word.axes and len(word.sizes) != parts:
            read.fail(
                f"{plural(word.sizes, 'size')} for {plural(parts, 'coordinate')}",
                word.at,
                "give one size a coordinate",
            )
        return Sizes(word.sizes)
    if word.mark == "~":
        return Balanced(parts)
    return Rule(read.rules[word.mark], parts) if word.mark else Chunks(parts)


def _right(read: Reader, words: list[Word], free: bool) -> list[Digit]:
    """The free name's own blocks and the digits right of it, each a block of what is right of it."""
    digits: list[Digit] = []
    block = 1
    for word in reversed(words):
        if word.mark or word.sizes is not None:
            read.fail(
                "~, sizes and rules stand left of the free name",
                word.at,
                "right of it are fixed blocks",
            )
        sizes = tuple(read.axes[name] for name in word.axes)
        digits.append(Digit(Block(block), word.axes, sizes))
        block *= word.number or math.prod(sizes)
    return [Digit(Block(block)), *reversed(digits)] if free else []


def _read_partial(read: Reader) -> dict[str, str]:
    read.take()
    op = read.word("a reduction")
    if op.text not in OPS:
        read.fail(f"unknown reduction {op.text!r}", op.at, f"use one of {', '.join(OPS)}")
    read.expect(":", "write {sum: axes}")
    out: dict[str, str] = {}
    while not read.accept("}"):
        axis = read.axis()
        if axis.text in read.used:
            read.fail(
                f"mesh axis {axis.text!r} is used already",
                axis.at,
                "an axis divides a dimension or is Partial, not both",
            )
        read.used[axis.text] = axis.at
        out[axis.text] = op.text
    return out


NAMES = ("n", "h", "w", "d")


def unparse(dims: tuple[Dimension, ...], partial: Partials, axes: Axes) -> str:
    """The canonical text of these dimensions and Partial axes."""
    named = rule_names(dims)
    words = [_dim_text(dim, _name(d, axes), named) for d, dim in enumerate(dims)]
    ops = {op: [name for name, o in partial if o == op] for _, op in partial}
    return " ".join(words + [f"{{{op}: {' '.join(names)}}}" for op, names in ops.items()])


def _name(d: int, axes: Axes) -> str:
    name = NAMES[d] if d < len(NAMES) else f"n{d}"
    while name in axes:
        name += "_"
    return name


def rule_names(dims: tuple[Dimension, ...]) -> dict[Splits, str]:
    """A name for every rule in the dimensions: its class in lower case, numbered from the second."""
    cuts = (digit.cut for dim in dims for f in dim.fields for stage in f.stages for digit in stage)
    out: dict[Splits, str] = {}
    for by in dict.fromkeys(cut.by for cut in cuts if isinstance(cut, Rule)):
        base = type(by).__name__.lower()
        numbered = (f"{base}{i}" for i in itertools.count(2))
        out[by] = next(
            name for name in itertools.chain([base], numbered) if name not in out.values()
        )
    return out


def _dim_text(dim: Dimension, name: str, named: Mapping[Splits, str]) -> str:
    if dim.stored is None and dim.fields == (Field(dim.size),):
        return name
    many = len(dim.fields) > 1
    fields = [(f"{f.size}: " if many else "") + _field_text(f, name, named) for f in dim.fields]
    return f"({' + '.join(fields)}){_stored_text(dim)}"


def _stored_text(dim: Dimension) -> str:
    if dim.stored is None:
        return ""
    pad = dim.stored.segments == identity(dim.size).segments
    return f"={len(dim.stored)}" if pad else f"=<{spanning(dim.stored)}>"


def _field_text(f: Field, name: str, named: Mapping[Splits, str]) -> str:
    return " | ".join(" ".join(_stage_words(stage, name, named)) for stage in f.stages) or name


def _stage_words(stage: Stage, name: str, named: Mapping[Splits, str]) -> Iterator[str]:
    """The stage's words: cuts, then the free name, then blocks and the size of the smallest."""
    block = 0
    for digit in stage:
        cut = digit.cut
        if not isinstance(cut, Block):
            yield _word(digit, named)
        elif not block:
            block = cut.size
            yield name
        else:
            yield "*".join(digit.axes) or str(block // cut.size)
            block = cut.size
    if not block:
        yield name
    elif block > 1:
        yield str(block)


def _word(digit: Digit, named: Mapping[Splits, str]) -> str:
    cut, axes = digit.cut, "*".join(digit.axes)
    match cut:
        case Sizes(sizes):
            return f"{axes}[{' '.join(map(str, sizes))}]"
        case Balanced():
            return f"{axes}~"
        case Rule(by, _):
            return f"{axes}@{named[by]}"
        case Chunks(parts):
            return axes or str(parts)
    raise AssertionError(digit)
