"""Verdicts: what was decided about all sizes, how, and the smallest size at which it is false.

>>> print(Verdict("the law", (Decided("n", "every", 42), Decided("h", "one", 12))))
proved for every n and h = 12: the law; 42 lengths of n decide
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardmath.base.public import public

__all__ = ["Counterexample", "Decided", "Verdict"]


class Decided(NamedTuple):
    """How one dimension was decided: `lengths` is the number of lengths 0, 1, 2, ... at which the law was checked, 0 if
    nothing had to be checked.

    `how` is "every" if these lengths decide for all; "definition" if the law follows from the definition of the cuts,
    and was checked at these lengths only; "tested" if it is not proved, for the reason `why`; and "one" if the length
    of the dimension can only be `lengths`. If `how` is "every" and `why` is not empty, the proof relies on it.
    """

    name: str
    how: str
    lengths: int
    why: str = ""


class Counterexample(NamedTuple):
    """The smallest length `size` of the dimension `name` at which a law does not hold, and what happens there. For a
    difference at every size, `name` is empty and `size` is None.

    `rank` is the rank that `text` is about, None if it is about all.
    """

    name: str
    size: int | None
    text: str
    rank: int | None = None


@public
@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of `prove` or `prove_equivalent`; it is true in an `if` only if the law is proved.

    `law` is the law in words, `dims` says by dimension how it was decided, and `counterexample` is None if no length
    was found at which the law does not hold.
    """

    law: str
    dims: tuple[Decided, ...]
    counterexample: Counterexample | None = None

    @property
    def proved(self) -> bool:
        """Whether the law holds for all sizes. If it is neither proved nor false, it was only tested."""
        return self.counterexample is None and all(dim.how != "tested" for dim in self.dims)

    def __bool__(self) -> bool:
        return self.proved

    def __str__(self) -> str:
        found = self.counterexample
        if found is not None:
            at = f"{found.name} = {found.size}" if found.name else "every size"
            return f"false at {at}: {found.text}"
        notes = [f"if {dim.why}" for dim in self.dims if dim.why and dim.how != "tested"]
        tested = self._list("tested", "{0.name} < {0.lengths}")
        if tested:
            words = "; ".join([*self._list_reasons(), *notes])
            return f"not proved, but tested for {tested}: {self.law}; {words}"
        run = self._list("definition", "{0.name} < {0.lengths}")
        if run:
            notes.insert(0, f"by the definition of its cuts; the code was run for {run}")
        deciding = self._list("every", "{0.lengths} lengths of {0.name}")
        if deciding:
            notes.insert(0, f"{deciding} decide")
        return "; ".join([f"proved for {self._word_scope()}: {self.law}", *notes])

    def _list_reasons(self) -> list[str]:
        """Why dimensions were only tested."""
        return [dim.why for dim in self.dims if dim.how == "tested"]

    def _word_scope(self) -> str:
        """All sizes for which the law is proved, in words."""
        scope = []
        if any(dim.how != "one" for dim in self.dims):
            names = [dim.name for dim in self.dims if dim.how != "one"]
            scope.append(f"every {_join_words(names)}")
        fixed = self._list("one", "{0.name} = {0.lengths}")
        if fixed:
            scope.append(fixed)
        return " and ".join(scope) or "a scalar"

    def _list(self, how: str, form: str) -> str:
        """The dimensions that were decided in this way, each in this form; those that nothing divides are left out."""
        chosen = [dim for dim in self.dims if dim.how == how and dim.lengths]
        return _join_words([form.format(dim) for dim in chosen])


def _join_words(words: list[str]) -> str:
    """The words as a list in a sentence: a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
