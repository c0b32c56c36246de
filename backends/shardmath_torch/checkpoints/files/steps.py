"""Steps of a call that all ranks make, as a load: each is done on every rank, or is an error on every rank.

1. A rank does its part of a step, and then tells the others how it went; nobody goes on before all have told.
2. What goes wrong on one rank is a CheckpointError on all, naming it. An interrupt is that for the others, and itself
   on its rank.
3. So is a step that ranks were asked to do otherwise: what has to be the same they claim, and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch.distributed as dist

from shardmath.base.digest import digest
from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather, in_step, mark_told
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.compat import Group

__all__ = [
    "SAME",
    "Claim",
    "gather_all",
    "is_alone",
    "on_all",
    "share_of",
    "show_error",
    "step_failed",
    "step_lost",
]

_T = TypeVar("_T")

Claim: TypeAlias = str | Mapping[str, str]
"""What has to be the same on all ranks: a text, or texts by what they are of, of which an error shows the first that
differs."""


def is_alone() -> bool:
    """Whether there are no processes to do this with."""
    return compat.is_alone()


def share_of(group: Group | None) -> tuple[int, int]:
    """This rank's number in the group, and how many there are. Raises ExchangeError for a rank outside."""
    compat.check_registered(group, "save, load or export")
    if is_alone():
        return 0, 1
    found = compat.group_of(group)
    return dist.get_rank(found), dist.get_world_size(found)


SAME = "call it with the same on all ranks, and not while it is saved"


class _Report(NamedTuple):
    """What a rank tells the others: what went wrong, if anything did, and what it claims."""

    failure: str | None
    claim: str


def on_all(
    step: str,
    act: Callable[[], _T],
    group: Group | None,
    *,
    claim: Callable[[_T], Claim] | None = None,
    fix: str | Callable[[str], str] = SAME,
) -> _T:
    """What `act`, which talks to nobody, returns. Raises CheckpointError on every rank where it raises on one, or where
    what ranks claim is not the same, with the `fix`, or what it gives for what differs; a rank that is interrupted in
    it goes on with that."""
    _, count = share_of(group)
    done: list[_T] = []
    raised: BaseException | None = None
    report = _Report(None, "")
    said: Claim = ""
    try:
        with in_step(group):
            done.append(act())
        if claim is not None:
            said = claim(done[0])
            report = _Report(None, _shorten(said))
    except BaseException as error:
        # raised only after all have heard of it: a rank that does not report is a deadlock
        raised = error
        report = _Report(show_error(error), "")
    try:
        reports: list[_Report] = gather_all(step, report, count, group)
    except CheckpointError as lost:
        _end_alone(lost, raised)
    if raised is not None and not isinstance(raised, Exception):
        mark_told(raised, group)
        raise raised
    _check_failures(step, reports, group, raised)
    claims = [each.claim for each in reports]
    differs = _compare_claims(step, said, claims, group)
    if differs is not None:
        odd, what = differs
        cure = fix if isinstance(fix, str) else fix(what)
        raise step_failed(step, {odd: f"{what}; {cure}"}, group)
    return done[0]


def _check_failures(
    step: str, reports: Sequence[_Report], group: Group | None, raised: BaseException | None
) -> None:
    """Raises CheckpointError where a rank failed, from what this one `raised`, if anything."""
    failures = {i: each.failure for i, each in enumerate(reports) if each.failure is not None}
    if failures:
        raise step_failed(step, failures, group) from raised


def _end_alone(lost: CheckpointError, raised: BaseException | None) -> NoReturn:
    """Ends the step of a rank that lost the others: by its interrupt, if it has one, and with nothing lost."""
    if raised is None or isinstance(raised, Exception):
        raise lost from raised or lost.__cause__
    raise raised from lost


def _shorten(claim: Claim) -> str:
    """What ranks tell each other of a claim."""
    return claim if isinstance(claim, str) else digest(sorted(claim.items()))


def _compare_claims(
    step: str, said: Claim, claims: Sequence[str], group: Group | None
) -> tuple[int, str] | None:
    """The first rank that claims something else than the first rank of the group, and what; None for none."""
    odd = next((i for i, claim in enumerate(claims) if claim != claims[0]), None)
    if odd is None:
        return None
    what, here, there = "it", repr(claims[odd]), repr(claims[0])
    if not isinstance(said, str):
        number, count = share_of(group)
        of_two = dict(said) if number in (0, odd) else {}
        told = gather_all(step, of_two, count, group)
        what, here, there = _find_difference(told[odd], told[0])
    return odd, f"{what} is {here} here and {there} on the first rank of the group"


def _find_difference(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, str, str]:
    """The first of what differs, and what it is on both sides."""
    what = next(one for one in (*here, *there) if here.get(one) != there.get(one))
    return what, here.get(what, "nothing"), there.get(what, "nothing")


def gather_all(step: str, mine: object, count: int, group: Group | None) -> list[Any]:
    """What each rank says, in order. Raises CheckpointError where one is gone, or does something else."""
    if is_alone():
        return [mine] * count
    try:
        return gather(mine, group, step)
    except ExchangeError as error:
        raise step_lost(step, error) from error


def show_error(error: BaseException) -> str:
    """An error's text; of those that are not ours, which may say little, the kind too."""
    if not isinstance(error, Exception):
        return f"interrupted by {type(error).__name__}"
    return word_objection(error)


def step_lost(step: str, error: ExchangeError) -> CheckpointError:
    """The error where ranks no longer hear of each other, or do not do the same."""
    return CheckpointError(f"ranks could not {step} together: {error}")


def step_failed(step: str, failures: Mapping[int, str], group: Group | None) -> CheckpointError:
    """The error of the first rank that has one, ranks of the group as global ones."""
    first = min(failures)
    rank = first if group is None else dist.get_global_rank(group, first)
    others = ""
    if len(failures) > 1:
        others = f" (and {plural(len(failures) - 1, 'other')})"
    return CheckpointError(f"rank {rank}{others} could not {step}: {failures[first]}")
