"""Rows: one stored parameter per line, `NATIVE = LOGICAL : STRUCTURE`.

1. NATIVE is the name under which ranks store a tensor, LOGICAL names its components, and STRUCTURE says how they lie
   in it, one word or group per dimension (`structure`). Without a structure the tensor is whole on each rank.
2. A tensor with fewer dimensions takes the first words: a bias under `(tp n) h` is divided, under `h (tp n)` whole.
3. An index as a dimension is a stack: `e (tp n) h` stores the tensors {e} one after the other in dimension 0.
4. `@pp=0` is stored only at this coordinate, `@pp=-1` at the last, `@l=-1` where the last number of index l is. `also`
   marks a copy of a tensor that another row stores; ranks that have the tensor already do not store it twice.
5. `? NAME` applies if this tensor exists too, `! NAME` if it does not; `/` before NAME names it from the root.
6. `.T` stores the dimensions in reverse, `.mT` the last two. `neg_exp(NAME)` stores a function of the tensor, and
   `blocks(NAME)` the cells that the structure lays out in another order (`arranging`).
7. `... = ...` stores every tensor that no row before it takes, each under its own name; `x.... = y....` stores those
   whose names begin with `y.`, as `x.`.
8. `[NATIVE = LOGICAL]` on a separate line puts prefixes before the rows below it, up to the next such lines.

    table  := (head+ row*)* ;  '#' begins a comment
    head   := '[' NAME '=' NAME ']' place?
    row    := 'also'? NAME place? '=' (FUNCTION '(')? NAME ')'? ('.T' | '.mT')? ('?' NAME)? ('!' NAME)? (':' dim*)?
    place  := '@' AXIS '=' INT

>>> (row,) = parse('''
... [decoder.layers.{l}. = model.layers.{l}.]
... mlp.linear_fc1.* = mlp.[gate up]_proj.* : (tp (gate + up)) h
... ''')
>>> print(row)
decoder.layers.{l}.mlp.linear_fc1.* = model.layers.{l}.mlp.[gate up]_proj.* : (tp (gate + up)) h
>>> parse(str(row)) == (row,)
True
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardmath.base.errors import NotationError
from shardmath.base.memo import memo
from shardmath.models.storage import names
from shardmath.models.storage.names import Name, PatternPart
from shardmath.models.storage.structure import Structure, list_words, read_dims

__all__ = ["AxisPlace", "Row", "parse", "show"]

TRANSPOSES = (".mT", ".T")
NAME = re.compile(r"(?:[^\s\[\]{}=:@?!()#]|\[[^\]=]*\]|\{[^}]*\})+")
ALSO = re.compile(r"also\s")
FUNCTION = re.compile(r"(?P<name>\w+)\(")
BLANKS = re.compile(r"\s*")
PLACE = re.compile(r"@\s*(?P<axis>\w+)\s*=\s*(?P<at>-?\d+)")


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """One coordinate of a mesh axis, such as 0 of pp, written @pp=0 in a row; -1 is the last coordinate. If `axis` is
    an index, such as the layer's l, the tensor is stored where number `at` of the index is."""

    axis: str
    at: int

    def __str__(self) -> str:
        return f"@{self.axis}={self.at}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a storage table: a stored tensor's name, the logical (checkpoint) tensors in it, and how ranks divide
    its dimensions."""

    native: Name
    logical: Name
    dims: tuple[Structure, ...] | None = None
    place: AxisPlace | None = None
    also: bool = False
    function: str = ""
    transpose: str = ""
    needs: Name | None = None
    lacks: Name | None = None

    def __str__(self) -> str:
        words = ["also"] if self.also else []
        words.append(str(self.native))
        if self.place:
            words.append(str(self.place))
        logical = f"{self.function}({self.logical})" if self.function else str(self.logical)
        words += ["=", f"{logical}{self.transpose}"]
        for mark, name in (("?", self.needs), ("!", self.lacks)):
            if name is not None:
                words += [mark, f"/{name}"]
        if self.dims is not None:
            words += [":", *map(str, self.dims)]
        return " ".join(words)

    @property
    def spread(self) -> PatternPart | None:
        """The placeholder, such as {ep e}, that stands for an expert's index on its rank in the stored names; None if
        the names have no such placeholder. In {ep e}, the mesh axis ep divides the experts e."""
        for index in self.native.indices:
            if len(index.words) > 1:
                return index
        return None

    def close(self, rest: str) -> Row:
        """Return the row with `rest` instead of the `...` at the end of its stored name and its logical name."""
        return dataclasses.replace(
            self, native=self.native.close(rest), logical=self.logical.close(rest)
        )


@dataclass(frozen=True, slots=True)
class _Head:
    """The prefixes and place of the rows below."""

    native: str = ""
    logical: str = ""
    place: AxisPlace | None = None


@memo(64)
def parse(text: str) -> tuple[Row, ...]:
    """Parse the text of a storage table into a tuple of Rows. Below a line [NATIVE = LOGICAL], every row's stored name
    gets the prefix NATIVE, and its logical name the prefix LOGICAL.

    A row below several such lines becomes one Row for each of them. Raises NotationError with a caret in the line.
    """
    rows: list[Row] = []
    heads = [_Head()]
    below = True  # a row stands below the last heads, so that the next head replaces them
    for line in text.splitlines():
        code = line.partition("#")[0].rstrip()
        if not code.strip():
            continue
        if _is_head(code):
            # Several heads in a row: each row below is read once under every one of them.
            heads = [_read_head(code)] if below else [*heads, _read_head(code)]
            below = False
        else:
            rows += [_read_row(code, head) for head in heads]
            below = True
    return tuple(rows)


def show(rows: Iterable[Row]) -> str:
    """Return `rows` as the text of a storage table, one line per row, which `parse` reads back."""
    return "\n".join(map(str, rows))


def _is_head(line: str) -> bool:
    """Whether the line opens with brackets, closed or not, that contain =; a choice contains none."""
    inside, _, _ = line.partition("]")
    return inside.lstrip().startswith("[") and "=" in inside


class _Line:
    """A line of a storage table, and the position up to which it has been read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._skip()

    def _skip(self) -> None:
        """Move past blanks."""
        match = BLANKS.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match `pattern` at the current position and move past the match; return the match, or None without one."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
            self._skip()
        return match

    def accept(self, mark: str) -> bool:
        """Return whether the text `mark` comes next and, if it does, move past it."""
        is_next = self.text.startswith(mark, self.at)
        if is_next:
            self.at += len(mark)
            self._skip()
        return is_next

    def expect(self, mark: str, fix: str) -> None:
        """Move past the text `mark`. Raises NotationError, with `fix` as advice, if something else comes next."""
        if not self.accept(mark):
            raise NotationError(
                f"expected {mark!r}, found {self._show_rest()}", self.text, self.at, fix
            )

    def _show_rest(self) -> str:
        """The text that is not read yet, for messages."""
        rest = self.text[self.at :]
        return repr(rest) if rest else "the end of the line"

    def name(self, meaning: str) -> Name:
        """Move past a name pattern and return it as a Name. Raises NotationError, which says that `meaning` was
        expected, if none comes next."""
        start = self.at
        match = self.take(NAME)
        if match is None:
            what = f"expected {meaning}, found {self._show_rest()}"
            raise NotationError(what, self.text, start, "write NATIVE = LOGICAL : STRUCTURE")
        try:
            return names.parse(match[0])
        except NotationError as error:
            at = start + error.position
            raise NotationError(error.what, self.text, at, error.fix) from None

    def place(self) -> AxisPlace | None:
        """Move past an AxisPlace such as @pp=0, and return it; None if none comes next."""
        match = self.take(PLACE)
        return AxisPlace(match["axis"], int(match["at"])) if match else None


def _read_head(line: str) -> _Head:
    """Read a head: [NATIVE = LOGICAL], and perhaps a place."""
    cursor = _Line(line)
    cursor.expect("[", "write [NATIVE = LOGICAL]")
    rest = cursor.text[cursor.at :]
    inside, _, _ = rest.partition("]")
    # The last = divides the names: a place, which has another one, comes after the bracket.
    native, _, logical = inside.rpartition("=")
    cursor.at += len(inside)
    cursor.expect("]", "close the head")
    place = cursor.place()
    if cursor.at < len(line):
        what = f"unexpected {line[cursor.at :]!r} after [NATIVE = LOGICAL]"
        fix = "write nothing after it, or only a place, such as @pp=0"
        raise NotationError(what, line, cursor.at, fix)
    return _Head(native.strip(), logical.strip(), place)


def _read_row(line: str, head: _Head) -> Row:
    """Read one row, with the prefixes of its head."""
    cursor = _Line(line)
    also = cursor.take(ALSO) is not None
    native = cursor.name("the name that ranks store")
    place = cursor.place() or head.place
    cursor.expect("=", "write NATIVE = LOGICAL : STRUCTURE")
    function = cursor.take(FUNCTION)
    logical = cursor.name("the logical name")
    if function:
        cursor.expect(")", "close the function")
    logical, transpose = _split_transpose(logical, cursor)
    needs = _read_condition(cursor, "?", head)
    lacks = _read_condition(cursor, "!", head)
    row = Row(
        native=_prefix(head.native, native),
        logical=_prefix(head.logical, logical),
        dims=_read_structure(cursor),
        place=place,
        also=also,
        function=function["name"] if function else "",
        transpose=transpose,
        needs=needs,
        lacks=lacks,
    )
    _check(row, line)
    return row


def _prefix(prefix: str, name: Name) -> Name:
    """The name with the prefix before it."""
    return names.parse(f"{prefix}{name}")


def _split_transpose(logical: Name, cursor: _Line) -> tuple[Name, str]:
    """Split a logical name into the name and the .T or .mT behind it; "" without one."""
    text = str(logical)
    for mark in TRANSPOSES:
        if text.endswith(mark):
            return names.parse(text.removesuffix(mark)), mark
        # Behind the parenthesis of a function the mark is not yet read as part of the name.
        if cursor.accept(mark):
            return logical, mark
    return logical, ""


def _read_condition(cursor: _Line, mark: str, head: _Head) -> Name | None:
    """Read the condition behind the mark as a name from the root; None without the mark."""
    if not cursor.accept(mark):
        return None
    text = str(cursor.name("the name of a tensor"))
    if text.startswith("/"):
        return names.parse(text[1:])
    return names.parse(f"{head.logical}{text}")


def _read_structure(cursor: _Line) -> tuple[Structure, ...] | None:
    """Read the dimensions behind the colon; None without them."""
    if cursor.at == len(cursor.text):
        return None
    cursor.expect(":", "write NATIVE = LOGICAL : STRUCTURE")
    try:
        return read_dims(cursor.text[cursor.at :])
    except NotationError as error:
        at = cursor.at + error.position
        raise NotationError(error.what, cursor.text, at, error.fix) from None


def _check_conditions(row: Row, line: str) -> None:
    """Raise NotationError for a condition that does not name one tensor."""
    known = {index.name for index in row.logical.indices}
    for condition in filter(None, (row.needs, row.lacks)):
        unknown = [index for index in condition.indices if index.name not in known]
        if not unknown and not condition.starred:
            continue
        what = (
            f"the condition {condition} has a *"
            if condition.starred
            else f"the condition {condition} has the index {unknown[0]}, which {row.logical} lacks"
        )
        at = max(line.find(str(condition)), 0)
        raise NotationError(what, line, at, "name one tensor, without *, by the row's own indices")


def _check_numbers(row: Row, line: str) -> None:
    """Raise NotationError for a plain number in a logical name, or for one index twice."""
    indices = [index.name for index in row.logical.indices]
    if len(set(indices)) < len(indices):
        twice = next(name for name in indices if indices.count(name) > 1)
        what = f"index {twice!r} is twice in the logical name {row.logical}"
        raise NotationError(what, line, 0, "give each number of a name a different index")
    _, numbers = names.split(str(row.logical).removesuffix(names.REST))
    if numbers:
        what = f"the logical name {row.logical} has the number {numbers[0]}"
        at = max(line.find(str(numbers[0]), line.find("=")), 0)
        fix = "write an index, such as {l}: a row stores all tensors of such names"
        raise NotationError(what, line, at, fix)


def _check_spread(row: Row, line: str) -> None:
    """Raise NotationError for two spread indices: only one stack of a row can be spread in its name."""
    # The words of an index before its name are axes, as in {ep e}.
    spread = [str(index) for index in row.native.indices if len(index.words) > 1]
    for other in spread:
        if other != spread[0]:
            what = f"the stored name spreads two indices over axes, {spread[0]} and {other}"
            at = max(line.find(other), 0)
            raise NotationError(
                what, line, at, "spread only one, and write the other without an axis, as {l}"
            )


def _check_components(row: Row, line: str) -> None:
    """Raise NotationError for a component that is twice in the logical name, or twice in one dimension."""
    components = row.logical.components
    written = {f"the logical name {row.logical}": [components]}
    # Several dimensions can have the same components: each then has its own part of every one, as in a block diagonal.
    written["a dimension"] = [
        tuple(str(word.name) for word in list_words([dim])) for dim in row.dims or ()
    ]
    for where, places in written.items():
        for listed in places:
            twice = next((name for name in components if listed.count(name) > 1), None)
            if twice is not None:
                at = max(line.rfind(twice), 0)
                what = f"component {twice!r} is twice in {where}"
                raise NotationError(what, line, at, "write each component once")


def _check(row: Row, line: str) -> None:
    """Raise NotationError if the names of the row do not fit each other."""
    _check_numbers(row, line)
    _check_components(row, line)
    _check_spread(row, line)
    logical = {index.name for index in row.logical.indices}
    for index in row.native.indices:
        if not logical.intersection(index.words):
            raise NotationError(
                f"index {index} is not in the logical name {row.logical}",
                line,
                max(line.find(str(index)), 0),
                "write the index in both names, or in neither",
            )
    _check_conditions(row, line)
    if row.native.starred != row.logical.starred:
        what = f"only one of {row.native} and {row.logical} has a *"
        raise NotationError(what, line, 0, "write * in both names, or in neither")
    if row.native.is_open != row.logical.is_open:
        what = f"only one of {row.native} and {row.logical} ends in ..."
        raise NotationError(what, line, 0, "end both names in ..., or neither")
    if row.native.components:
        raise NotationError(
            f"a choice [...] in the stored name {row.native}, which is one tensor",
            line,
            0,
            "write choices only in the logical name, after =",
        )
