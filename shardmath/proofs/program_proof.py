"""Delivery: proof that a program brings everybody what its plan promises, and that nobody waits for ever.

What is read is what `for_rank` expands: the lines, and the streams of each.

1. The lines are proved as the plan's own are (`proof`): every holder has what they ask for, every receiver wants it.
2. **Once**: laid end to end, the streams to each rank that asks for a block are its content, and none goes elsewhere.
3. **In hand**: a stream of the first leg leaves a holder. One that is passed on is a stream of an earlier leg that came
   to its sender, as it came: of one root and the same bytes, so cut alike, each slice a slot or more after it came. It
   is no addend on top of another.
4. Streams begin and end where pieces may be cut.
5. No rank has more under way in a round than the program's limits allow.

`walk` runs rounds given rank by rank, as ranks do. A round's messages are posted together, and it ends when all of them
are posted at their other ends too; between two ranks, one way, the first that is sent meets the first that is received.

>>> from shardmath.programs.program import Message
>>> one = Round((0, 0, 0), (Message(1, "send", 0, (), 1),))
>>> walk({0: [one], 1: []})
Traceback (most recent call last):
shardmath.PlanError: rank 0 sends 0 B in step (0, 0, 0), leg 1 to rank 1, which does not receive them; give \
both ends the same messages
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.plans.balance import grid, row_at, totals
from shardmath.plans.demands import Lines, wire
from shardmath.plans.template import legal
from shardmath.programs.loads import LEGS, messages, pairs, round_loads
from shardmath.programs.program import Message, Program, Round, Step
from shardmath.programs.scheduling import MOST_ROUNDS, MOST_SLOTS
from shardmath.programs.streams import Streams, streams
from shardmath.proofs.plan_proof import prove
from shardmath.proofs.tables import misfit_of_bands

__all__ = ["Walk", "prove_program", "walk"]


def prove_program(prog: Program) -> None:
    """Raise PlanError unless what the ranks of a program do brings what its plan promises, within its limits."""
    try:
        with np.errstate(
            all="ignore"
        ):  # numbers far away run over; what comes of them is looked at
            _prove(prog)
    except PlanError:
        raise
    except (
        Exception
    ) as error:  # wrong tables fail in any way at all, and what cannot be read is not proved
        raise PlanError(
            f"the program's tables cannot be read: {error!r}; schedule it anew"
        ) from error


def _prove(prog: Program) -> None:
    _check_numbers(prog)
    misfit = misfit_of_bands(prog.legs)
    _require(not misfit, prog, misfit)
    prove(replace(prog.plan, lines=_uncut(prog.legs.lines)))
    for line in range(len(prog.legs.lines.holders)):
        of, inbox = streams(prog.legs, line), _inbox(prog, line)
        _check_inside(prog, of)
        at, known = inbox.find(of.block, of.receiver)
        _refuse(prog, of, ~known, "go to a rank that does not ask for them")
        begin = inbox.base[at] + of.lo
        _check_once(prog, inbox, of, begin)
        _check_in_hand(prog, line, inbox, of, begin)
    _check_limits(prog)


def _uncut(on: Lines) -> Lines:
    """The lines all sent by their first holders: what they ask for is what has to be proved."""
    held = np.array([len(on.sets[i]) for i in on.holders.tolist()], np.int64)
    first = np.cumsum([0, *(held + 1).tolist()])
    cuts = np.repeat(totals(on), held + 1)
    cuts[first[:-1]] = 0
    return replace(on, cut_first=first, cuts=cuts)


def _require(holds: object, prog: Program, what: str) -> None:
    """Raise PlanError, which says `what` is wrong, unless it holds."""
    if not holds:
        raise PlanError(f"{prog!r}: {what}; schedule it anew")


def _check_numbers(prog: Program) -> None:
    """Counts are counts, and tables are of 64-bit integers: no float decides anything."""
    counts = (
        prog.slots,
        prog.turns,
        prog.legs.sharing,
        prog.max_inflight_bytes,
        prog.max_ops_per_group,
    )
    _require(
        all(type(n) is int and n > 0 for n in counts),
        prog,
        f"counts {counts} are not all positive integers",
    )
    turns = 4 * LEGS * max(1, len(prog.ranks))
    rounds = prog.slots * prog.turns * max(1, len(prog.ranks))
    few = prog.slots <= MOST_SLOTS and prog.turns <= turns and rounds <= MOST_ROUNDS
    _require(
        few,
        prog,
        f"{prog.slots} slots and {prog.turns} turns are more than {MOST_SLOTS} and {turns}",
    )
    for field in fields(prog.legs.bands):
        column = getattr(prog.legs.bands, field.name)
        whole = isinstance(column, np.ndarray) and column.dtype == np.int64
        _require(whole, prog, f"Bands.{field.name} is not of 64-bit integers")


# streams


class _Inbox(NamedTuple):
    """Who asks for what on a line, laid end to end: `rank[i]` asks for `block[i]`, from place `base[i]` on.

    The last `base` is the place where all end.
    """

    block: Ints
    rank: Ints
    base: Ints

    def find(self, block: Ints, rank: Ints) -> tuple[Ints, Bools]:
        """Which of them these are, and whether they are any."""
        most = 1 + int(max(self.rank.max(initial=0), rank.max(initial=0)))
        code = self.block * most + self.rank
        at = np.searchsorted(code, block * most + rank)
        known = at < len(code)
        known[known] = code[at[known]] == (block * most + rank)[known]
        return at, known


def _inbox(prog: Program, line: int) -> _Inbox:
    on = prog.legs.lines
    blocks = range(int(on.first[line]), int(on.first[line + 1]))
    asking = [(b, rank) for b in blocks for rank in wire(on, line, b)]
    block, rank = np.array(asking, np.int64).reshape(-1, 2).T
    return _Inbox(block, rank, np.concatenate((np.zeros(1, np.int64), np.cumsum(on.nbytes[block]))))


def _refuse(prog: Program, of: Streams, wrong: Bools, what: str) -> None:
    """Raise PlanError for the first of the streams that are wrong."""
    for i in np.flatnonzero(wrong)[:1].tolist():
        where = (
            f"bytes {of.lo[i]}:{of.hi[i]} of block {of.block[i]}, {_name(prog, int(of.block[i]))}"
        )
        _require(False, prog, f"{where}, from rank {of.sender[i]} to {of.receiver[i]} {what}")


def _name(prog: Program, block: int) -> str:
    """The first tensor of a block."""
    row = prog.legs.lines.row_first[block]
    return f"tensor {prog.plan.batches[int(prog.legs.lines.batch[row])].names[0]!r}"


def _check_inside(prog: Program, of: Streams) -> None:
    """Streams are some bytes of their blocks, from one place where pieces may be cut to another."""
    on = prog.legs.lines
    _refuse(
        prog,
        of,
        (of.lo < 0) | (of.lo >= of.hi) | (of.hi > on.nbytes[of.block]),
        "are no bytes of it",
    )
    for at in (of.lo, of.hi):
        inner = np.flatnonzero(at < on.nbytes[of.block])
        odd = inner[grid(on, prog.plan.batches).snapped(of.block[inner], at[inner]) != at[inner]]
        wrong = np.zeros(len(at), bool)
        wrong[odd] = [
            not _may_cut(prog, *place)
            for place in zip(of.block[odd].tolist(), at[odd].tolist(), strict=True)
        ]
        _refuse(prog, of, wrong, "begin or end inside a row")


def _may_cut(prog: Program, block: int, at: int) -> bool:
    """Whether a content may be cut at a byte, be it of a box that `schedule` leaves whole."""
    on = prog.legs.lines
    row = row_at(on, block, at)
    t = prog.plan.batches[int(on.batch[row])].template
    element, odd = divmod((at - int(on.at[row])) % int(on.each[row]), t.src.itemsize)
    return not odd and legal(t, int(on.unit[row]), int(on.lo[row]) + element)


def _check_once(prog: Program, inbox: _Inbox, of: Streams, begin: Ints) -> None:
    """All that is asked for comes, end to end; streams begin at these places."""
    order = np.argsort(begin, kind="stable")
    begins, ends = begin[order], np.append(0, (begin + of.hi - of.lo)[order])
    twice = np.zeros(len(order), bool)
    twice[order] = begins < ends[:-1]
    _refuse(prog, of, twice, "come twice")
    for place in ends[np.append(begins, inbox.base[-1]) > ends][:1].tolist():
        i = int(np.searchsorted(inbox.base, place, "right")) - 1
        block, rank = int(inbox.block[i]), int(inbox.rank[i])
        what = f"byte {place - inbox.base[i]} of block {block}, {_name(prog, block)}"
        _require(False, prog, f"rank {rank} never receives {what}")


def _check_in_hand(prog: Program, line: int, inbox: _Inbox, of: Streams, begin: Ints) -> None:
    """Every sender has what it sends: as a holder, or from a stream of an earlier leg that came to the same place."""
    on, straight = prog.legs.lines, of.leg == 1
    held = np.isin(of.sender, on.sets[on.holders[line]])
    _refuse(prog, of, straight & ~held, "leave a rank that does not hold them")
    _refuse(
        prog,
        of,
        ~straight & (on.addend[of.block] > 0),
        "are passed on where another addend is already",
    )
    at, known = inbox.find(of.block, of.sender)
    passed = np.flatnonzero(~straight & known)
    order = np.argsort(begin, kind="stable")
    came = order[np.searchsorted(begin[order], inbox.base[at[passed]] + of.lo[passed], "right") - 1]
    same = of.leg[came] < of.leg[passed]
    for column in (of.root, of.lo, of.hi):
        same &= column[came] == column[passed]
    wrong = ~straight
    wrong[passed[same]] = False
    _refuse(prog, of, wrong, "are passed on by a rank that does not have them yet")


def _check_limits(prog: Program) -> None:
    loads, counts = round_loads(prog), messages(pairs(prog), prog.turns, len(prog.ranks))
    for most, limit, word in (
        (int(loads.sum(axis=-1).max(initial=0)), prog.max_inflight_bytes, "bytes"),
        (int(counts.max(initial=0)), prog.max_ops_per_group, "messages"),
    ):
        _require(
            most <= limit,
            prog,
            f"a rank has {most} {word} under way in a round, {limit} are allowed",
        )


# rounds


Rounds: TypeAlias = Mapping[int, Sequence[Round]]
"""Every rank's rounds, in the order in which it walks them."""


class Walk(NamedTuple):
    """What a walk found: the number of steps, and of any rank the most rounds, the most messages of one, and the most
    bytes that are under way in one, both ways together."""

    steps: int
    rounds: int
    messages: int
    staged: int


class _End(NamedTuple):
    """One end of a message: the number of the round at that rank, and its step."""

    at: int
    step: Step
    message: Message


_Waits: TypeAlias = dict[tuple[int, int], dict[int, int]]
"""By rank and number of a round: the peers, and at which of their rounds each has to be for it to end."""


def walk(rounds: Rounds) -> Walk:
    """Run the rounds of all ranks to their ends.

    Raises PlanError for a message that says one thing and has other pieces, where the two ends of a message differ in
    step, leg, bytes or pieces, where one of them is missing, and where nobody can go on.
    """
    waits: _Waits = {}
    for (sender, receiver), both in sorted(_ends(rounds).items()):
        for sent, got in itertools.zip_longest(*both):
            here, there = _meeting(sender, receiver, sent, got)
            for wait, peer, at in (
                ((sender, here), receiver, there),
                ((receiver, there), sender, here),
            ):
                peers = waits.setdefault(wait, {})
                peers[peer] = max(at, peers.get(peer, 0))
    _run(rounds, waits)
    posted = [
        [m.nbytes for m in one.messages if m.direction != "keep"]
        for mine in rounds.values()
        for one in mine
    ]
    steps = {one.step for mine in rounds.values() for one in mine}
    most = max(map(len, rounds.values()), default=0)
    return Walk(
        len(steps), most, max(map(len, posted), default=0), max(map(sum, posted), default=0)
    )


def _ends(rounds: Rounds) -> dict[tuple[int, int], tuple[list[_End], list[_End]]]:
    """By sender and receiver: what is sent and what is received, each in order."""
    out: dict[tuple[int, int], tuple[list[_End], list[_End]]] = {}
    for rank, mine in rounds.items():
        for at, one in enumerate(mine):
            for m in one.messages:
                sends = m.direction == "send"
                pair = (rank, m.peer) if sends else (m.peer, rank)
                _check_message(rank, one.step, m, pair)
                if m.direction != "keep":
                    out.setdefault(pair, ([], []))[0 if sends else 1].append(_End(at, one.step, m))
    return out


def _check_message(rank: int, step: Step, m: Message, pair: tuple[int, int]) -> None:
    """A message goes one of the three ways, and is its pieces."""
    where = f"rank {rank}, step {step}: the message to or from rank {m.peer}"
    if m.direction not in ("send", "receive", "keep") or (m.direction == "keep") != (
        m.peer == rank
    ):
        raise PlanError(
            f"{where} goes {m.direction!r}; it is to 'send' or 'receive', or to 'keep' what stays"
        )
    if m.nbytes != sum(t.nbytes for t in m.pieces):
        raise PlanError(
            f"{where} has {m.nbytes} B, its pieces {sum(t.nbytes for t in m.pieces)} B; count them anew"
        )
    for t in m.pieces:
        if (t.src_rank, t.dst_rank) != pair:
            raise PlanError(
                f"{where} has the piece {t}; put it where it goes from rank {pair[0]} to {pair[1]}"
            )


def _meeting(sender: int, receiver: int, sent: _End | None, got: _End | None) -> tuple[int, int]:
    """In which rounds of theirs the two ends of a message are. Raises PlanError unless they are of one message."""
    if got is None:
        what = f"rank {sender} sends {_told(sent)} to rank {receiver}"
        raise PlanError(f"{what}, which does not receive them; give both ends the same messages")
    if sent is None:
        what = f"rank {receiver} receives {_told(got)} from rank {sender}"
        raise PlanError(f"{what}, which does not send them; give both ends the same messages")
    if (sent.step, sent.message.leg, sent.message.nbytes) != (
        got.step,
        got.message.leg,
        got.message.nbytes,
    ):
        what = f"rank {sender} sends {_told(sent)} to rank {receiver}, which receives {_told(got)}"
        raise PlanError(f"{what}; give both ends the same messages in the same order")
    for one, other in itertools.zip_longest(sent.message.pieces, got.message.pieces):
        if one != other:
            what = f"rank {sender} sends {_told(sent)} to rank {receiver}"
            what += f": the piece {one}, which is received as {other}"
            raise PlanError(f"{what}; give both ends the same pieces in the same order")
    return sent.at, got.at


def _told(end: _End | None) -> str:
    return f"{end.message.nbytes} B in step {end.step}, leg {end.message.leg}" if end else "nothing"


def _run(rounds: Rounds, waits: _Waits) -> None:
    """Let every rank go on while it can."""
    at = dict.fromkeys(rounds, 0)
    moving = list(rounds)
    while moving:
        rank = moving.pop()
        ready = all(at[peer] >= n for peer, n in waits.get((rank, at[rank]), {}).items())
        if ready and at[rank] < len(rounds[rank]):
            at[rank] += 1
            moving += [rank, *waits.get((rank, at[rank]), {})]
    stuck = [rank for rank, mine in rounds.items() if at[rank] < len(mine)]
    if stuck:
        _stuck(rounds, waits, at, min(stuck))


def _stuck(rounds: Rounds, waits: _Waits, at: Mapping[int, int], rank: int) -> NoReturn:
    """Raise PlanError for ranks that wait for each other, round in a circle from somewhere behind this one."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = next(peer for peer, n in waits[rank, at[rank]].items() if at[peer] < n)
    circle = [*path[path.index(rank) :], rank]
    told = (
        f"rank {a} waits in step {rounds[a][at[a]].step} for rank {b}"
        for a, b in itertools.pairwise(circle)
    )
    raise PlanError(f"{', '.join(told)}: nobody goes on; give all ranks one order of steps")
