"""A soak: many moves of random plans, of which processes are killed, stopped and interrupted, and then go on.

    python -m tests.soak.soak --moves 1000 --seed 0

It prints what was done, and ends with status 1 where anything was lost, torn in silence, or left behind.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.distributed.pool import PRELOADED
from tests.soak.draw import SIZE
from tests.soak.life import Held, Strike, Told, hold, join, leave, move

PATIENCE_S = 60.0
WAYS = ("kill", "kill", "stop", "Ctrl-C")
DEADLY = ("kill", "stop")
STEPS = 40
LATEST_S = 0.03
"""After the begin of a move a process is struck at most so late."""

SETTLED = 3
"""Generations after which a process holds all that it ever will, but for what leaks."""

MOST_MEMORY, MOST_FILES, MOST_THREADS = 64 << 20, 8, 4
"""By which a process may hold more at its end."""


def live(rank: int, channel: Connection) -> None:
    """A process: it does what it is told until nobody tells it anything."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            act, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        try:
            answer = act(*args)
        except BaseException:
            answer = traceback.format_exc()
        channel.send(answer)


class Being:
    """A process as its parent sees it."""

    def __init__(self, rank: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(rank, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.generations = 0
        self.settled: Held | None = None

    def tell(self, act: Callable[..., Any], *args: Any) -> None:
        self.channel.send_bytes(pickle.dumps((act, args)))

    def hear(self) -> Any:
        """Its answer; None where it is gone, or answers no more."""
        try:
            return self.channel.recv() if self.channel.poll(PATIENCE_S) else None
        except (EOFError, ConnectionResetError):
            return None

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.join()


@dataclass
class Summary:
    """What a soak did and found."""

    moves: int = 0
    generations: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    committed: int = 0
    faults: list[str] = field(default_factory=list)
    grown: list[Held] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        ways = ", ".join(f"{count} by {way}" for way, count in sorted(self.struck.items()))
        most = [max((one[k] for one in self.grown), default=0) for k in range(3)]
        lines = [
            f"{self.moves} moves of {SIZE} processes in {self.generations} groups, {self.seconds:.0f} s",
            f"processes struck: {ways or 'none'}",
            f"versions committed and compared: {self.committed}",
            f"most that a survivor holds more than after {SETTLED} groups: "
            f"{most[0] / 2**20:.1f} MiB, {most[1]} files, {most[2]} threads",
            f"faults: {len(self.faults)}",
        ]
        return "\n".join([*lines, *self.faults[:20]])


def run(moves: int, seed: int, steps: int = STEPS) -> Summary:
    """So many moves, in as many generations as it takes."""
    from torch.distributed import TCPStore

    rng = random.Random(seed)
    summary = Summary()
    began = time.monotonic()
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    beings = [Being(rank) for rank in range(SIZE)]
    try:
        while summary.moves < moves and not summary.faults:
            now = min(steps, moves - summary.moves)
            _live_one(beings, rng, summary, store.port, now)
    finally:
        for one in beings:
            one.end()
    summary.seconds = time.monotonic() - began
    return summary


def _live_one(
    beings: list[Being], rng: random.Random, summary: Summary, port: int, steps: int
) -> None:
    """One generation."""
    summary.generations += 1
    for rank, one in enumerate(beings):
        one.tell(join, rank, summary.generations, port)
    for rank, one in enumerate(beings):
        answer = one.hear()
        if isinstance(answer, str):
            summary.faults.append(f"rank {rank} could not join: {answer}")
            return
    strike = None
    if rng.random() < 0.6:
        way = rng.choice(WAYS)
        strike = Strike(rng.randrange(SIZE), way, rng.randrange(steps), rng.random() * LATEST_S)
        summary.struck[way] += 1
    seed = rng.randrange(1 << 30)
    for rank, one in enumerate(beings):
        one.tell(move, rank, seed, steps, strike)
    _judge(beings, strike, summary)
    _replace_dead(beings, strike)
    _look_for_leaks(beings, summary)


def _judge(beings: list[Being], strike: Strike | None, summary: Summary) -> None:
    """Hear what the survivors say of the generation."""
    gone = strike.rank if strike is not None and strike.way in DEADLY else None
    told: dict[int, Told] = {}
    for rank, one in enumerate(beings):
        if rank == gone:
            continue
        answer = one.hear()
        if not isinstance(answer, Told):
            summary.faults.append(f"rank {rank}, struck {strike}: {answer or 'no answer'}")
            continue
        told[rank] = answer
        summary.faults += [f"rank {rank}, struck {strike}: {fault}" for fault in answer.faults]
        if answer.ended and strike is None:
            summary.faults.append(f"rank {rank}, nobody struck: {answer.ended}")
    if told:
        summary.moves += min(one.steps for one in told.values())
    _compare_versions(told, strike, summary)


def _compare_versions(told: dict[int, Told], strike: Strike | None, summary: Summary) -> None:
    """Survivors have one version, where they are not in doubt."""
    lanes = {lane for one in told.values() for lane in one.versions}
    for lane in sorted(lanes):
        sure = {}
        for rank, one in told.items():
            version, in_doubt = one.versions.get(lane, (0, True))
            if not in_doubt:
                sure[rank] = version
        if len(set(sure.values())) > 1:
            summary.faults.append(f"{lane}, struck {strike}: versions {sure}")
        summary.committed += max(sure.values(), default=0)


def _replace_dead(beings: list[Being], strike: Strike | None) -> None:
    """A new process in the place of one that was killed or stopped."""
    if strike is not None and strike.way in DEADLY:
        beings[strike.rank].end()
        beings[strike.rank] = Being(strike.rank)


def _look_for_leaks(beings: list[Being], summary: Summary) -> None:
    """What each process holds without a group, beside what it held when it had settled."""
    for one in beings:
        one.tell(leave)
        one.hear()
        one.tell(hold)
        held = one.hear()
        one.generations += 1
        if not isinstance(held, Held):
            continue
        if one.generations == SETTLED:
            one.settled = held
        if one.settled is None:
            continue
        grown = Held(*(now - then for now, then in zip(held, one.settled, strict=True)))
        summary.grown.append(grown)
        if any(
            n > most for n, most in zip(grown, (MOST_MEMORY, MOST_FILES, MOST_THREADS), strict=True)
        ):
            summary.faults.append(f"left behind after {one.generations} groups: {grown}")


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # Ctrl-C of a terminal goes to all processes; those end with this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    summary = run(given.moves, given.seed)
    print(summary)
    return 1 if summary.faults else 0


if __name__ == "__main__":
    sys.exit(main())
