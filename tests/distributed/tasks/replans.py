"""What workers do where engines leave, die, join, or hold other experts. Imported by workers, so no pytest here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.transforms import Cast
from shardmath_gloo.wire import GlooWire
from shardmath_torch.groups.agreement.gather import gather
from tests.distributed.tasks import refits
from tests.distributed.tasks.breaks import Said, ends
from tests.distributed.tasks.scenarios import group_of

TRAINERS = sm.Mesh(tp=2)
ENGINES = sm.Mesh(engine=3, tp=2, ranks=range(2, 8))
SHAPES = {"v": (6, 8), "w": (64, 48), "x": (12, 6)}
DIVIDED = {"v": "(tp n) h", "w": "(tp n) h", "x": "n h {sum: tp}"}
"""How trainers hold them; the last is reduced on the way."""


def plan_all(engines: sm.Mesh = ENGINES) -> sm.Plan:
    """From two trainers to engines of two ranks each."""
    src = {name: sm.Layout(shape, TRAINERS, DIVIDED[name]) for name, shape in SHAPES.items()}
    dst = {name: sm.Layout(shape, engines, "n (tp h)") for name, shape in SHAPES.items()}
    return sm.plan(src, dst)


def engine(number: int) -> tuple[int, ...]:
    """The ranks of an engine."""
    return ENGINES.select(engine=number).ranks


class Held:
    """What a rank holds on both sides of a plan: the same memory in every step, unless shapes change."""

    def __init__(self, rank: int, plan: sm.Plan) -> None:
        self.rank = rank
        self.src: dict[str, torch.Tensor] = {}
        self.out: dict[str, torch.Tensor] = {}
        self.follow(plan)

    def follow(self, plan: sm.Plan) -> None:
        """Hold what the plan says."""
        self.plan = plan
        for side, held in ((plan.src, self.src), (plan.dst, self.out)):
            wanted = {
                key: layout.local_shape(self.rank)
                for name, windows in side.items()
                for key, layout in windows.locals(name, self.rank)
            }
            for key in held.keys() - wanted.keys():
                del held[key]
            for key, shape in wanted.items():
                if key not in held or held[key].shape != shape:
                    held[key] = torch.zeros(shape)

    def move(self, mover: Any, step: int, **how: Any) -> Said:
        """A move of this step's values: how it ended, "WRONG" where what arrived is not what should have."""
        self._write(self.plan.src, self.src, step)
        for held in self.out.values():
            held.fill_(-1.0)
        said = ends(lambda: mover(self.src or None, out=self.out or None, **how))
        wanted = {key: torch.empty_like(held) for key, held in self.out.items()}
        self._write(self.plan.dst, wanted, step)
        if not said and any(not torch.equal(self.out[key], wanted[key]) for key in wanted):
            return "WRONG"
        return said

    def _write(self, side: Any, held: dict[str, torch.Tensor], step: int) -> None:
        for name, windows in side.items():
            shape = windows[0].shape
            numel = shape[0] * shape[1]
            whole = torch.arange(numel, dtype=torch.float32).view(shape) + 1000.0 * step
            for key, layout in windows.locals(name, self.rank):
                rows, columns = (torch.from_numpy(index) for index in layout.indices(self.rank))
                # One rank has all that is to be summed up.
                is_other = any(layout.mesh.coords(self.rank)[axis] for axis, _ in layout.partial)
                held[key].copy_(whole[rows][:, columns] * (not is_other))


def leave_and_come_back(rank: int, options: dict[str, Any]) -> list[Said]:
    """Engine 1 leaves, then engine 2 as well, then the first comes back; all ranks stay in the group."""
    p = plan_all()
    one, two = sm.without(p, engine(1)), sm.without(p, [*engine(1), *engine(2)])
    held = Held(rank, p)
    move = smt.compile(p, timeout=30.0, **options)
    said = [held.move(move, 0)]
    for step, plan in enumerate((one, two, sm.without(p, engine(2)), p), 1):
        said.append(ends(lambda plan=plan: move.replan(plan)))  # type: ignore[misc]
        assert move.plan == plan
        held.follow(plan)
        said += [held.move(move, step), held.move(move, step + 10, acknowledge=True)]
    return said


def keep(rank: int) -> tuple[bool, bool, bool, int]:
    """What stays the same objects when engine 1 leaves: messages, where they lie in tensors, and staging."""
    p = plan_all()
    held = Held(rank, p)
    move = smt.compile(p, timeout=30.0)
    held.move(move, 0)
    messages = {id(m) for one in move.rounds for m in one.messages}
    before = move._carrier._engine
    bound = {id(end) for one in before._rounds for end in (*one.sends, *one.receives)}
    rest = sm.without(p, engine(1))
    move.replan(rest, timeout=20.0)
    held.follow(rest)
    after = move._carrier._engine
    now = {id(end) for one in after._rounds for end in (*one.sends, *one.receives)}
    same = {id(m) for one in move.rounds for m in one.messages} <= messages
    said = held.move(move, 1)
    assert not said, said
    patience = move._party.patience
    move.replan(p)
    # The time goes on to hold, as it was given last.
    assert move._party.patience == patience < 20.0
    return same, now <= bound, after._staging is before._staging, len(bound) - len(now)


def go_on_in_another_group(rank: int, commit: str) -> tuple[list[Said], list[int], list[bool]]:
    """Engine 1 leaves with its processes, and joins again; versions after each step."""
    p = plan_all()
    gone = engine(1)
    rest = sm.without(p, gone)
    staying = tuple(r for r in range(8) if r not in gone)
    held = Held(rank, p)
    move = smt.compile(p, timeout=30.0, commit=commit)
    said = [held.move(move, 0), held.move(move, 1)]
    versions = [move.version]
    alone = group_of(staying)
    again = dist.new_group(list(staying))
    if rank in staying:
        said.append(ends(lambda: move.replan(rest, group=alone)))
        held.follow(rest)
        # The first goes on beside, and the group is replaced meanwhile.
        handle = move(held.src or None, out=held.out or None, async_op=True)
        said.append(ends(lambda: move.replan(rest, group=again)))
        said.append(ends(handle.wait))
        said.append(held.move(move, 2))
        versions.append(move.version)
    # Those who join know nothing of what was, those who stay go on.
    if rank in gone:
        held = Held(rank, p)
        move = smt.compile(p, timeout=30.0, commit=commit)
    else:
        said.append(ends(lambda: move.replan(p, group=dist.group.WORLD)))
        held.follow(p)
    versions.append(move.version)
    said.append(held.move(move, 3))
    versions.append(move.version)
    return said, versions, [move.in_doubt, bool(move.torn)]


def join_with_another(rank: int) -> list[Said]:
    """Engine 1 joins with another plan, then with other settings, then rightly; the others' mover goes on between."""
    p = plan_all()
    gone = engine(1)
    staying = tuple(r for r in range(8) if r not in gone)
    rest = sm.without(p, gone)
    alone = group_of(staying)
    joins = rank in gone
    held = Held(rank, p if joins else rest)
    move = None if joins else smt.compile(rest, group=alone, timeout=30.0)
    other = plan_all(sm.Mesh(engine=3, tp=2, ranks=(2, 3, 5, 4, 6, 7)))
    said: list[Said] = []
    for plan, how in ((other, {}), (p, {"max_inflight_bytes": 1 << 20}), (p, {})):

        def call(plan: sm.Plan = plan, how: dict[str, Any] = how) -> None:
            nonlocal move
            if joins:
                move = smt.compile(plan, timeout=30.0, **how)
            else:
                assert move is not None
                move.replan(p, group=dist.group.WORLD)

        said.append(ends(call))
        if said[-1] and not joins:
            said.append(held.move(move, len(said)))
    held.follow(p)
    said.append(held.move(move, 7))
    return said


def rebalance(rank: int, programs: bool) -> list[Said]:
    """Experts of a tensor are on other ranks in every step, at the trainers and at the engines."""
    experts, shape = 8, (8, 24)

    def place(seed: int, ranks: range) -> sm.Layout:
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
        parts = [from_ranges([(e, e + 1) for e in order[i : i + 2]]) for i in range(0, experts, 2)]
        return sm.Layout(shape, sm.Mesh(ep=4, ranks=ranks), {"ep": sm.Table(0, tuple(parts))})

    def make(seed: int) -> Any:
        p = sm.plan({"w": place(seed, range(4))}, {"w": place(seed + 7, range(4, 8))})
        return sm.schedule(p, topology=sm.Topology(ranks_per_node=4)) if programs else p

    move = smt.compile(make(0), timeout=30.0)
    held = Held(rank, move.plan)
    said = [held.move(move, 0)]
    for step in range(1, 4):
        said.append(ends(lambda step=step: move.replan(make(step))))  # type: ignore[misc]
        held.follow(move.plan)
        said += [held.move(move, step), held.move(move, step + 10)]
    return said


def refuse(rank: int, what: str) -> list[Said]:
    """A replan that one rank makes otherwise, or that nobody can; then a move by the plan that was."""
    p = plan_all()
    rest = sm.without(p, engine(1))
    held = Held(rank, p)
    move = smt.compile(p, timeout=30.0, commit="all")
    odd = rank == 5
    said = [held.move(move, 0)]

    def replan() -> None:
        if what == "another plan":
            move.replan(sm.without(p, engine(2)) if odd else rest)
        elif what == "no plan":
            move.replan(None if odd else rest)  # type: ignore[arg-type]
        elif what == "a time":
            move.replan(rest, timeout=-1.0 if odd else None)
        elif what == "a move":
            held.move(move, 1) if odd else move.replan(rest)
        elif what == "strangers":
            move.replan(plan_all(sm.Mesh(engine=3, tp=2, ranks=range(3, 9))))
        elif what == "a block":
            with smt.commit(move):
                move.replan(rest)

    said += [ends(replan), held.move(move, 2), str(move.version)]
    return said


def what_else_moves(rank: int, kind: str) -> list[Said]:
    """Engine 1 leaves and comes back where changes are moved, or transformed tensors."""
    p = plan_all()
    rest = sm.without(p, engine(1))
    held = Held(rank, p)
    move: Any
    if kind == "changes":
        # What changes of a sum is no change that could be sent.
        sides = [{name: side[name] for name in "vw"} for side in (p.src, p.dst)]
        p = sm.plan(*sides)
        rest = sm.without(p, engine(1))
        held = Held(rank, p)
        move = smt.compile_changes(p, timeout=30.0)
    else:
        sides = [{name: windows[0] for name, windows in side.items()} for side in (p.src, p.dst)]
        move = smt.compile_transformed(
            sm.transforms.transformed(*sides, {}), p, timeout=30.0, commit="all"
        )
    said = [held.move(move, 0), held.move(move, 1)]
    for step, plan in enumerate((rest, p), 1):
        said.append(ends(lambda plan=plan: move.replan(plan)))  # type: ignore[misc]
        held.follow(plan)
        if kind == "changes":
            # Whoever has come back has nothing yet: the first is a whole one.
            said.append(held.move(move, 2 * step))
        said.append(held.move(move, 2 * step + 1, **({"whole": True} if kind == "changes" else {})))
    wrong = plan_all(sm.Mesh(engine=3, tp=2, ranks=(3, 2, 4, 5, 6, 7)))
    if kind == "transforms":
        said.append(ends(lambda: move.replan(wrong)))
    return said


def refit_on(rank: int, changes: bool) -> list[Any]:
    """One of two engines leaves a refit and comes back; whether all that the engines store is right in each step.

    Those who stay prepare nothing again; those who are back, everything.
    """
    names = {"a": range(4, 6), "b": range(6, 8)}
    engines = {name: refits.engine(ranks) for name, ranks in names.items()}
    planned = sm.refit(refits.trainer(range(4)), engines, refits.shapes())
    mine = {name: planned.engines[name] for name, ranks in names.items() if rank in ranks}
    refit = smt.Refit(planned, timeout=30.0, changes=changes)
    src = refits.make(planned.trainer, refits.draw(0), rank) if rank < 4 else None
    zeros = {name: array * 0 for name, array in refits.draw(0).items()}
    dst = {name: refits.make(bound, zeros, rank)[0] for name, bound in mine.items()}
    refit.prepare(src, dst)
    found: list[Any] = []

    def step(number: int, engines: dict[str, Any]) -> None:
        arrays = refits.draw(number)
        if src is not None:
            refits.overwrite(src, refits.make(planned.trainer, arrays, rank))
        found.append(ends(lambda: refit(acknowledge=True)))
        for name, bound in engines.items():
            wanted = refits.make(bound, arrays, rank, functions=True)[0]
            found.extend(refits._compare(dst[name], wanted))

    step(0, mine)
    rest = planned.without("b")
    refit.replan(rest)
    stays = {name: bound for name, bound in mine.items() if name in rest.engines}
    for number in (1, 2):
        step(number, stays)
    # Who has left holds what it held.
    if "b" in mine:
        wanted = refits.make(mine["b"], refits.draw(0), rank, functions=True)[0]
        found.extend(refits._compare(dst["b"], wanted))
    refit.replan(planned)
    early = ends(refit)
    found.append("" if "has not prepared the refit" in early else early or "WELL")
    if "b" in mine:
        refit.prepare(dst=dst)
    else:
        refit.prepare()
    for number in (3, 4):
        step(number, mine)
    found.append(ends(lambda: refit.replan(None if rank == 2 else rest)))  # type: ignore[arg-type]
    step(5, mine)
    return found


RENUMBERED = (1, 0, 3, 2, 4, 5, 7, 6)
"""The ranks that processes have in a second group: some have another rank's, some their own."""


def renumbered(rank: int, where: str, kind: str) -> list[Said]:
    """All processes meet in another group, most by other ranks, and replan the same plan; then back again."""
    sides: list[dict[str, sm.Layout]] = [{}, {}]
    # What changes of a sum is no change that could be sent.
    for name in "vw" if kind == "changes" else "vwx":
        shape = SHAPES[name]
        half, most = shape[1] // 2, shape[1]
        # The two ranks of an engine have parts of one size that begin in other orders.
        parts = [(0, 1), (2, half + 1)], [(half + 1, most), (1, 2)]
        table = sm.Table(1, tuple(map(from_ranges, parts)))
        sides[0][name] = sm.Layout(shape, TRAINERS, DIVIDED[name])
        sides[1][name] = sm.Layout(shape, ENGINES, {"tp": table})
    p = sm.plan(*sides)
    commit = "all" if kind == "all" else "direct"
    options: dict[str, Any] = {"timeout": 10.0, "commit": commit}
    if kind == "transforms":
        made = sm.transforms.transformed(*sides, {})
        move: Any = smt.compile_transformed(made, p, **options)
    else:
        move = (smt.compile_changes if kind == "changes" else smt.compile)(p, **options)
    held = Held(rank, p)
    said = [held.move(move, 0), held.move(move, 1)]
    place = RENUMBERED[rank]
    group = smt.connect(where, place, 8, timeout=20.0)
    said.append(ends(lambda: move.replan(p, group=group)))
    if said[-1]:
        place = rank
    held = Held(place, p)
    said += [held.move(move, step) for step in (2, 3)]
    said.append(ends(lambda: move.replan(sm.without(p, engine(1)), group=dist.group.WORLD)))
    said.append(ends(lambda: move.replan(p)))
    said.append(Held(rank, p).move(move, 4))
    gather("", group, "end")
    smt.disconnect(group)
    return said


def renumbered_refit(rank: int, where: str, casts: bool) -> list[Said]:
    """As `renumbered`, of a refit: those who keep their rank prepare nothing again."""
    shape = (16, 8)
    src = sm.Layout(shape, sm.Mesh(tp=4), "(tp n) h")
    dtype = "bfloat16" if casts else "float32"
    dst = sm.Layout(shape, sm.Mesh(tp=4, ranks=range(4, 8)), "n (tp h)", dtype=dtype)
    by_rule: Any = {"served": {"w": (shape, dtype)}, "rules": {"w": Cast(dtype)}} if casts else {}
    planned = sm.refit({"w": src}, {"w": dst}, {"w": (shape, "float32")}, **by_rule)
    refit = smt.Refit(planned, timeout=10.0)
    whole = torch.arange(128.0).view(shape)

    def hold(place: int) -> tuple[Any, Any]:
        rows, columns = (src if place < 4 else dst).indices(place)
        part = whole[rows][:, columns].to(torch.float32 if place < 4 else getattr(torch, dtype))
        return ({"w": part}, None) if place < 4 else (None, {"w": torch.zeros_like(part)})

    def step(place: int) -> Said:
        if out is not None:
            out["w"].fill_(-1.0)
        said = ends(refit)
        _, columns = dst.indices(place) if out is not None else (None, None)
        right = out is None or torch.equal(out["w"], whole[:, columns].to(out["w"].dtype))
        return said or ("" if right else "WRONG")

    given, out = hold(rank)
    refit.prepare(given, out)
    said = [step(rank)]
    place = RENUMBERED[rank]
    group = smt.connect(where, place, 8, timeout=20.0)
    said.append(ends(lambda: refit.replan(planned, group=group)))
    if said[-1]:
        place = rank
    said.append(step(place))
    if place == rank and not casts:
        said.append(ends(refit.prepare))
    else:
        given, out = hold(place)
        said.append(ends(lambda: refit.prepare(given, out)))
    said.append(step(place))
    gather("", group, "end")
    smt.disconnect(group)
    return said


def refit_bound_in_part(rank: int) -> list[Said]:
    """An engine is back in a refit, and rank 0 binds a source, but cannot bind a destination: the errors of moves of
    the tensors bound before, if they are asked for, or if the engine leaves again."""
    held = sm.Layout((4,), sm.Mesh(), "n")
    engine = sm.Layout((4,), sm.Mesh(ranks=[1]), "n")
    planned = sm.refit(
        {"w": held}, {"a": {"w": held}, "b": {"w": engine}}, {"w": ((4,), "float32")}
    )
    rest = planned.without("b")
    refit = smt.Refit(planned, timeout=30.0)
    out = {"w": torch.zeros(4)}
    dst = {0: {"a": out}, 1: {"b": out}}.get(rank, {})
    refit.prepare(src={"w": torch.ones(4)} if rank == 0 else None, dst=dst)
    refit.replan(rest)
    refit.replan(planned)
    other = {"src": {"w": torch.full((4,), 9.0)}, "dst": {"a": {"w": torch.zeros(3)}}}
    # Who has come back gives all again.
    again = {"dst": dst} if rank == 1 else {}
    said = [ends(lambda: refit.prepare(**(other if rank == 0 else again)))]
    said.append(ends(lambda: refit.prepare(**again)))
    refit.replan(rest)
    said.append(ends(refit))
    return said


# Deaths


def interrupted(rank: int) -> list[Said]:
    """Ctrl-C on rank 0 as it takes what all have agreed on; then a move, and one in another group."""
    src = {"w": sm.Layout((8, 8), sm.Mesh(tp=1), "n h")}
    p, other = (
        sm.plan(src, {"w": sm.Layout((8, 8), sm.Mesh(ranks=[1]), d)}) for d in ("n h", "(n)=9 h")
    )
    held = Held(rank, p)
    group = dist.new_group()
    move = smt.compile(p, group=group, timeout=8.0)
    said = [held.move(move, 0)]
    plain = smt.Mover._take

    def stop(self: Any, ready: Any) -> None:
        self.plan = ready.part.plan
        raise KeyboardInterrupt

    if rank == 0:
        smt.Mover._take = stop  # type: ignore[method-assign]
    said.append(ends(lambda: move.replan(other)))
    smt.Mover._take = plain  # type: ignore[method-assign]
    said.append(held.move(move, 1))
    said.append(ends(lambda: move.replan(p, group=dist.group.WORLD)))
    held.follow(p)
    said.append(held.move(move, 2))
    return said


TIMEOUT_S = 10.0
DEADLY = sm.Mesh(engine=3, ranks=[1, 2, 3])


def plan_deadly() -> sm.Plan:
    """From rank 0 to three engines of a rank each."""
    src = {"w": sm.Layout((64, 64), sm.Mesh(tp=1), "n h")}
    return sm.plan(src, {"w": sm.Layout((64, 64), DEADLY, "n h")})


def survive(rank: int, when: str, replaced: bool) -> tuple[list[Said], list[int]]:
    """Rank 3, an engine, is killed; the others go on in a group of their own, and then with one in its place."""
    p = plan_deadly()
    held = Held(rank, p)
    move = smt.compile(p, timeout=TIMEOUT_S, commit="all")
    said = [held.move(move, 0)]
    if rank == 3:
        if when == "in a move":
            _strike_while_receiving()
            held.move(move, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "in a move":
        failed = held.move(move, 1)
        said.append("rank 3 failed" if "rank 3 failed" in failed else failed)
    # Nobody but the survivors is asked: the one that is gone could not answer.
    alone = dist.new_group([0, 1, 2], use_local_synchronization=True)
    rest = sm.without(p, [3])
    said.append(ends(lambda: move.replan(rest, group=alone)))
    held.follow(rest)
    said += [held.move(move, step) for step in (2, 3)]
    versions = [move.version]
    if replaced:
        said += _go_on_with_another(rank, move, held)
        versions.append(move.version)
    return said, versions


def _strike_while_receiving() -> None:
    """The next receive kills this process."""
    plain = GlooWire.receive

    def strike(self: Any, memory: torch.Tensor, peer: int) -> Any:
        plain(self, memory, peer)
        os.kill(os.getpid(), signal.SIGKILL)

    GlooWire.receive = strike  # type: ignore[method-assign]


def _begin_again(store: Any, rank: int) -> None:
    """A process group of all ranks, in the place of any that is there, over the store that outlived it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=4)


def _go_on_with_another(rank: int, move: Any, held: Held) -> list[Said]:
    """A new process takes the place of rank 3, without a restart of the others."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    started = None
    if rank == 0:
        code = "import sys; from tests.distributed.tasks.replans import replace; replace(int(sys.argv[1]))"
        started = subprocess.Popen([sys.executable, "-c", code, str(store.port)])
    _begin_again(store, rank)
    p = plan_deadly()
    said = [ends(lambda: move.replan(p, group=dist.group.WORLD))]
    held.follow(p)
    said += [held.move(move, step, acknowledge=True) for step in (4, 5)]
    if started is not None:
        said.append("" if started.wait(TIMEOUT_S) == 0 else "the one that joined has failed")
    return said


def replace(port: int) -> None:
    """The life of the process in the place of rank 3: exits with 1 where a move goes wrong."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    _begin_again(store, 3)
    p = plan_deadly()
    held = Held(3, p)
    move = smt.compile(p, timeout=TIMEOUT_S, commit="all")
    said = [held.move(move, step, acknowledge=True) for step in (4, 5)]
    if any(said) or move.version != 5:
        print(said, move.version)
        sys.exit(1)
