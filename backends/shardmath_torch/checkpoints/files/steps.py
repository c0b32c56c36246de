"""Steps: parts of a collective call, such as a load, each of which succeeds on every rank or raises on every rank.

1. A rank does its part of a step, and reports to the others how it went; no rank continues before all have reported.
2. An error on one rank raises CheckpointError on all, naming that rank. An interrupt is raised as itself on its rank,
   and as a CheckpointError on the others.
3. Ranks claim what must be the same on all of them, and compare claims: a difference raises, too.
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
"""What must be the same on all ranks: a text, or texts by what they describe; an error shows the first that differs."""


def is_alone() -> bool:
    """Whether this process runs without a process group."""
    return compat.is_alone()


def share_of(group: Group | None) -> tuple[int, int]:
    """Return this rank's number in `group`, and the group's size; (0, 1) without a process group. Raises ExchangeError
    for a rank outside the group, and for a JointGroup, which connects ranks of separately started jobs."""
    compat.check_registered(group, "save, load or export")
    if is_alone():
        return 0, 1
    process_group = compat.group_of(group)
    return dist.get_rank(process_group), dist.get_world_size(process_group)


SAME = "call it with the same arguments on all ranks, and not while it is saved"


class _StepReport(NamedTuple):
    """A rank's report to the others: its failure, if it failed, and its claim."""

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
    """Call `act` on every rank of `group`, and return this rank's result; if `act` fails on any rank, every rank raises
    CheckpointError, which names the `step`. It is also raised if `claim(result)`, a text or a dict of texts, differs
    between ranks; `fix`, advice for the user, then ends the message.

    `act` must not communicate. `fix`, or what it returns for what differs, ends the message about different claims. A
    rank that is interrupted in `act` raises the interrupt.
    """
    _, count = share_of(group)
    results: list[_T] = []
    raised: BaseException | None = None
    report = _StepReport(None, "")
    claimed: Claim = ""
    try:
        with in_step(group):
            results.append(act())
        if claim is not None:
            claimed = claim(results[0])
            report = _StepReport(None, _compress_claim(claimed))
    except BaseException as error:
        # raised only after the report is sent: a rank that does not report is a deadlock
        raised = error
        report = _StepReport(show_error(error), "")
    try:
        reports: list[_StepReport] = gather_all(step, report, count, group)
    except CheckpointError as lost:
        _raise_lost(lost, raised)
    if raised is not None and not isinstance(raised, Exception):
        # An interrupt, which all ranks know of from the reports: the group stays usable.
        mark_told(raised, group)
        raise raised
    _check_failures(step, reports, group, raised)
    claims = [each.claim for each in reports]
    difference = _compare_claims(step, claimed, claims, group)
    if difference is not None:
        differing, what = difference
        advice = fix if isinstance(fix, str) else fix(what)
        raise step_failed(step, {differing: f"{what}; {advice}"}, group)
    return results[0]


def _check_failures(
    step: str, reports: Sequence[_StepReport], group: Group | None, raised: BaseException | None
) -> None:
    """Raise CheckpointError if a rank reported a failure, with this rank's own error, `raised`, as its cause."""
    failures = {i: each.failure for i, each in enumerate(reports) if each.failure is not None}
    if failures:
        raise step_failed(step, failures, group) from raised


def _raise_lost(lost: CheckpointError, raised: BaseException | None) -> NoReturn:
    """Raise this rank's interrupt if it has one, else the error `lost` of ranks that lost each other."""
    if raised is None or isinstance(raised, Exception):
        raise lost from raised or lost.__cause__
    raise raised from lost


def _compress_claim(claim: Claim) -> str:
    """The text of a claim that ranks send to each other: a digest, if the claim has several parts."""
    return claim if isinstance(claim, str) else digest(sorted(claim.items()))


def _compare_claims(
    step: str, claimed: Claim, claims: Sequence[str], group: Group | None
) -> tuple[int, str] | None:
    """The first rank whose claim differs from the first rank's, and the difference in words; None if all agree."""
    differing = next((i for i, claim in enumerate(claims) if claim != claims[0]), None)
    if differing is None:
        return None
    what, here, there = "it", repr(claims[differing]), repr(claims[0])
    if not isinstance(claimed, str):
        # Only now are whole claims sent, and only by the two ranks that are compared.
        rank, count = share_of(group)
        compared = dict(claimed) if rank in (0, differing) else {}
        full = gather_all(step, compared, count, group)
        what, here, there = _find_difference(full[differing], full[0])
    return differing, f"{what} is {here} on this rank and {there} on the first rank of the group"


def _find_difference(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, str, str]:
    """The first item that differs between two claims, and its text on both sides."""
    what = next(item for item in (*here, *there) if here.get(item) != there.get(item))
    return what, here.get(what, "nothing"), there.get(what, "nothing")


def gather_all(step: str, mine: object, count: int, group: Group | None) -> list[Any]:
    """Gather the object `mine` of every rank into a list in the order of `group`, of `count` ranks; without a process
    group, the list has `mine` `count` times. Raises CheckpointError if a rank is lost, or calls this with another
    `step`, the operation's name."""
    if is_alone():
        return [mine] * count
    try:
        return gather(mine, group, step)
    except ExchangeError as error:
        raise step_lost(step, error) from error


def show_error(error: BaseException) -> str:
    """Return the message of `error`, after the name of its class unless it is a shardmath error; for an interrupt, say
    that it was one."""
    if not isinstance(error, Exception):
        return f"interrupted by {type(error).__name__}"
    return word_objection(error)


def step_lost(step: str, error: ExchangeError) -> CheckpointError:
    """Return a CheckpointError which says that ranks could not do the `step` together. Its message ends with `error`,
    the cause: a rank was lost, or ranks were in different steps."""
    return CheckpointError(f"ranks could not {step} together: {error}")


def step_failed(step: str, failures: Mapping[int, str], group: Group | None) -> CheckpointError:
    """Return the CheckpointError for a `step` that failed on some ranks; `failures` maps the number of each failed rank
    in `group` to its message. The error has the message and the global rank of only the first of these ranks in
    `group`, and counts the others."""
    first = min(failures)
    rank = first if group is None else dist.get_global_rank(group, first)
    others = ""
    if len(failures) > 1:
        others = f" (and {plural(len(failures) - 1, 'other')})"
    return CheckpointError(f"rank {rank}{others} could not {step}: {failures[first]}")
