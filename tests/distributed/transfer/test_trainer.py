"""A trainer's rank and an engine in one process: what is sent is what is trained, or an error."""

from __future__ import annotations

import _thread
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardmath as sm
import shardmath_torch as smt
import shardmath_vllm as sv
from shardmath import ExchangeError
from shardmath_torch.groups import compat
from shardmath_vllm.calls import GRACE_S, Calls
from shardmath_vllm.meeting import _check_alike
from shardmath_vllm.source import Told
from shardmath_vllm.trainer import _check_ranks
from tests.distributed.pool import Pool, free_port
from tests.distributed.tasks import gathered_sources, transfers
from tests.distributed.transfer.plain_engine import PlainEngine

TIMEOUT_S = 20.0


def make_module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def tell() -> sv.TrainerInfo:
    return sv.TrainerInfo(
        f"127.0.0.1:{free_port()}", 1, workers=1, rank=0, timeout=transfers.TIMEOUT_S
    )


class Pair:
    """A module that is trained, and one that an engine runs."""

    def __init__(self) -> None:
        self.trained = make_module()
        self.engine = PlainEngine(make_module())
        self.sender = sv.Trainer.trainer_init(tell(), client=self.engine, source=self.trained)

    def is_equal(self) -> bool:
        one, other = self.trained.state_dict(), self.engine.module.state_dict()
        return all(torch.equal(one[name], other[name]) for name in one)

    def close(self) -> None:
        self.sender.shutdown()
        assert self.engine.link is not None
        self.engine.link.leave()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_what_vllm_s_own_trainers_say_of_themselves(pair: Pair) -> None:
    """Other people's code asks for it, whatever the backend."""
    assert pair.sender.is_sender
    assert pair.sender.client is pair.engine


def test_an_engine_in_this_process(pair: Pair) -> None:
    """Takes what is trained, also where a parameter's memory is another by then."""
    pair.sender.send_weights()
    assert pair.is_equal()
    pair.trained.get_parameter("0.weight").data = torch.full((6, 4), 3.0)
    pair.sender.send_weights()
    assert pair.is_equal()


@pytest.mark.parametrize("lost", ["update_weights", "finish_weight_update"])
def test_engines_that_have_new_weights_end_the_update_all_the_same(
    pair: Pair, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an answer is lost: what they have cached of prompts is of the old weights."""
    ended = []
    act = getattr(pair.engine, lost)

    def act_and_lose(*given: object) -> None:
        act(*given)
        ended.append("lost")
        raise ConnectionError("no answer")

    monkeypatch.setattr(pair.engine, lost, act_and_lose)
    told: list[str] = []
    pair.sender._clients.append(Other(told))
    with pytest.raises(ExchangeError, match="engine 0: ConnectionError: no answer"):
        pair.sender.send_weights()
    assert pair.is_equal()
    assert ended == ["lost"]
    assert told == ["start_weight_update", "update_weights", "finish_weight_update"]


class Other(PlainEngine):
    """Another engine, of no ranks, that is told in its turn, and hangs where it is asked for one thing."""

    def __init__(self, told: list[str], hangs_in: str = "") -> None:
        super().__init__(make_module())
        self._told = told
        self._hangs_in = hangs_in
        self.goes_on = threading.Event()

    def _take(self, name: str) -> None:
        self._told.append(name)
        if name == self._hangs_in:
            self.goes_on.wait(TIMEOUT_S)

    def start_weight_update(self) -> None:
        self._take("start_weight_update")

    def update_weights(self, update_info: object) -> None:
        self._take("update_weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._take("finish_weight_update")


SHORT_S = 1.0
LONGER_S = 4.0
"""Two ranks of one process meet in this time even on a busy machine."""
EARLIER_S = 8.0


@pytest.mark.parametrize(
    "hangs_in", ["start_weight_update", "update_weights", "finish_weight_update"]
)
def test_an_engine_that_hangs_is_not_waited_for_without_an_end(hangs_in: str) -> None:
    """Nor asked anything before it has answered; then all goes on."""
    engine = PlainEngine(make_module())
    sender = sv.Trainer.trainer_init(tell(), client=engine, source=make_module())
    # To meet may take longer.
    sender.link = dataclasses.replace(sender.link, timeout=SHORT_S)
    told: list[str] = []
    other = Other(told, hangs_in)
    sender._clients.append(other)
    start = time.monotonic()
    with pytest.raises(ExchangeError, match="engine 1 has not answered in 1 s; start it again"):
        sender.send_weights()
    assert time.monotonic() - start < SHORT_S + GRACE_S + 1
    # The other one has ended its update all the same, and this one is asked nothing while it hangs.
    assert told[-1] == hangs_in
    with pytest.raises(ExchangeError, match="engine 1 has not answered the previous call"):
        sender.send_weights()
    assert told[-1] == hangs_in
    other.goes_on.set()
    sender._calls.answer(TIMEOUT_S)
    sender.send_weights()
    assert told[-3:] == ["start_weight_update", "update_weights", "finish_weight_update"]
    sender.shutdown()
    assert engine.link is not None
    engine.link.leave()


class Busy:
    """An LLM that says how many calls it was in at once."""

    def __init__(self) -> None:
        self.most = 0
        self._calls: list[str] = []
        self.goes_on = threading.Event()

    def _take(self, name: str) -> None:
        self._calls.append(name)
        self.most = max(self.most, len(self._calls))
        self.goes_on.wait(TIMEOUT_S)
        self._calls.remove(name)

    def start_weight_update(self) -> None:
        self._take("start_weight_update")

    def init_weight_transfer_engine(self, request: object) -> None:
        self._take("init_weight_transfer_engine")


def test_an_engine_is_asked_one_thing_at_a_time_after_a_ctrl_c_too() -> None:
    """CPython 3.11 takes a thread for ended whose join was interrupted; an LLM is of one thread."""
    llm = Busy()
    calls = Calls()
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        calls.tell([sv.LLMClient(llm).start_weight_update], TIMEOUT_S)
    with pytest.raises(ExchangeError, match="engine 0 has not answered the previous call"):
        calls.ask([sv.LLMClient(llm).start_weight_update])
    # As trainer_init asks, which knows of no calls before.
    later = Calls()
    later.ask([partial(sv.LLMClient(llm).init_weight_transfer_engine, {})])
    with pytest.raises(ExchangeError, match="engine 0 has not answered in 0"):
        later.answer(0.1)
    llm.goes_on.set()
    calls.answer(TIMEOUT_S)
    later.answer(TIMEOUT_S)
    assert llm.most == 1


def test_a_call_that_fails_as_its_time_is_over_has_not_gone_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between a look at what has failed and one at what is open."""
    calls = Calls()
    goes_on = threading.Event()

    def fail() -> None:
        goes_on.wait(TIMEOUT_S)
        raise ConnectionError("no answer")

    look = Calls.fault.fget
    assert look is not None
    looks: list[str] = []

    def look_and_go_on(self: Calls) -> str:
        looks.append(look(self))
        # The first is whether to wait on.
        if len(looks) > 1:
            goes_on.set()
            self._calls[0].join(TIMEOUT_S)
        return looks[-1]

    calls.ask([fail])
    monkeypatch.setattr(Calls, "fault", property(look_and_go_on))
    with pytest.raises(ExchangeError, match="engine 0"):
        calls.answer(0.0)


def test_an_error_while_weights_move_says_what_to_do(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, nothing has moved, and nothing has to be done for the engines."""

    def fail(trainer: sv.Trainer) -> None:
        raise ArithmeticError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(sv.Trainer, "_check", fail)
        with pytest.raises(ExchangeError, match="in the middle") as kept:
            pair.sender.send_weights()
    assert "partly new" not in str(kept.value)
    monkeypatch.setattr(sv.Trainer, "_move", fail)
    with pytest.raises((ExchangeError, ArithmeticError)) as torn:
        pair.sender.send_weights()
    assert "engines may have partly new weights" in str(torn.value)


def test_ranks_that_were_told_otherwise() -> None:
    """Would wait for different times, or engines be asked for what the others do not know of."""
    info = dataclasses.replace(tell(), trainers=2)
    for name, other in {"timeout": 7.0, "own": ("*.scale",), "workers": 2}.items():
        odd = dataclasses.replace(info, rank=1, **{name: other})
        with pytest.raises(ExchangeError, match=f"rank 0 has {name}=.*, but rank 1 has {name}="):
            _check_alike([info, odd])
    _check_alike([info, dataclasses.replace(info, rank=1, address="localhost:1")])


def test_an_engine_hears_of_a_ctrl_c_between_two_steps(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to receive, and would wait; nothing has moved, and all go on."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair.sender._calls, "explain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.sender.send_weights()
    start = time.monotonic()
    with pytest.raises(
        ExchangeError, match="trainer rank 0 could not begin update 1: KeyboardInterrupt"
    ):
        pair.sender._calls.answer(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S / 4
    pair.sender.send_weights()
    assert pair.is_equal()


def test_a_forked_process_tells_engines_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would begin to receive what that process cannot send."""
    told: list[str] = []
    pair.sender._clients[:] = [Other(told)]
    with monkeypatch.context() as patch:
        patch.setattr(compat, "inherited", {pair.sender.link.group})
        with pytest.raises(ExchangeError, match="this process was forked from a rank"):
            pair.sender.send_weights()
    assert not told


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


ODD = [ValueError("\ud800"), Unprintable(), Exiting(), SystemExit(3)]


@pytest.mark.parametrize("error", ODD)
@pytest.mark.parametrize("where", ["start_weight_update", "update_weights", "_receive"])
def test_what_an_engine_says_does_not_stop_who_tells_the_others(
    pair: Pair, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that torch's store does not take, or that cannot be printed."""

    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(pair.engine, where, fail)
    start = time.monotonic()
    said = r"ValueError: \\ud800|its message cannot be printed|SystemExit: 3"
    with pytest.raises(ExchangeError, match=said):
        pair.sender.send_weights()
    assert time.monotonic() - start < TIMEOUT_S / 2


@pytest.mark.parametrize("error", ODD)
def test_an_engine_that_cannot_join_may_say_anything(error: Exception) -> None:
    engine = PlainEngine(make_module())

    def fail(*given: object) -> None:
        raise error

    vars(engine)["init_weight_transfer_engine"] = fail
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"ud800|cannot be printed|SystemExit: 3"):
        sv.Trainer.trainer_init(tell(), client=engine, source=make_module())
    assert time.monotonic() - start < TIMEOUT_S / 2


def test_an_error_without_a_message_is_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the update would go on, as where nothing is wrong."""

    def check() -> None:
        raise sm.StoreError("")

    monkeypatch.setattr(pair.sender, "_check", check)
    with pytest.raises(ExchangeError, match="trainer rank 0 could not begin update 1: StoreError"):
        pair.sender.send_weights()


def test_any_thread_may_send() -> None:
    """Engines know nothing of a trainer's threads."""
    equal: list[bool] = []

    def send() -> None:
        made = Pair()
        made.sender.send_weights()
        equal.append(made.is_equal())
        made.close()

    thread = threading.Thread(target=send, name="learner")
    thread.start()
    thread.join(2 * TIMEOUT_S)
    assert equal == [True]


def assign(module: nn.Module) -> None:
    fresh = {name: torch.ones_like(one) for name, one in module.state_dict().items()}
    module.load_state_dict(fresh, assign=True)


def delete(module: nn.Module) -> None:
    del module[1]  # type: ignore[operator]
    module.add_module("1", nn.Linear(6, 2))
    del module.get_submodule("0").weight


def replace_module(module: nn.Module) -> None:
    """The one before has its parameters as they were, and nobody trains them."""
    vars(module)["kept"] = [module.get_submodule("0")]
    module.add_module("0", nn.Linear(4, 6))


def halve(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.half()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (assign, "no longer the tensor that its module has"),
        (delete, "no longer"),
        (replace_module, "'0.weight' is no longer the tensor that its module has"),
        (halve, "is float16"),
    ],
)
def test_other_parameters_than_were_met_with(
    pair: Pair, change: Callable[[nn.Module], None], said: str
) -> None:
    """Are refused before anything has moved: the weights of before would be sent, and nobody know."""
    pair.sender.send_weights()
    before = {name: one.clone() for name, one in pair.engine.module.state_dict().items()}
    change(pair.trained)
    with pytest.raises(ExchangeError, match=f"(?s)could not begin update 2.*{said}.*trainer_init"):
        pair.sender.send_weights()
    for name, one in pair.engine.module.state_dict().items():
        assert torch.equal(one, before[name])


def test_arguments_that_are_none(pair: Pair) -> None:
    with pytest.raises(
        ValueError, match="client= has 2 clients, but TrainerInfo's workers= names 1 engine"
    ):
        sv.Trainer.trainer_init(tell(), client=[pair.engine, pair.engine], source=pair.trained)
    with pytest.raises(ValueError, match="client= has Sequential, which lacks a client's methods"):
        sv.Trainer.trainer_init(tell(), client=pair.trained, source=pair.trained)
    with pytest.raises(TypeError, match="source= is int"):
        sv.Trainer.trainer_init(tell(), client=pair.engine, source=3)


def test_more_workers_than_the_engine_has() -> None:
    """The error says which ranks did not come, and that `workers` counts them."""
    info = dataclasses.replace(tell(), workers=3, timeout=LONGER_S)
    engine = PlainEngine(make_module())
    missing = r"ranks 2-3 of 4 ranks did not call smt\.connect in time"
    fix = "by TrainerInfo's workers=, ranks 1-3 of the group are workers of engines"
    with pytest.raises(ExchangeError, match=f"(?s){missing}.*{fix}"):
        sv.Trainer.trainer_init(info, client=engine, source=make_module())


def test_a_rank_that_was_started_anew_meets() -> None:
    """The others have met before, and it has not: nobody counts."""
    info = sv.TrainerInfo(
        f"127.0.0.1:{free_port()}", 2, workers=1, rank=0, timeout=transfers.TIMEOUT_S
    )
    port = int(info.address.rpartition(":")[2])
    engine = PlainEngine(nn.Linear(2, 4, bias=False))
    met = []
    for value in (1.0, 3.0):
        other = Pool(1)
        said: list[str] = []
        thread = threading.Thread(target=lambda: said.extend(other.run(transfers.second, port)))  # noqa: B023
        thread.start()
        source = transfers.halves(torch.full((2, 2), value))
        # The one before is kept, as where nobody knows yet that the other rank has died.
        met.append(sv.Trainer.trainer_init(info, client=engine, source=source))
        met[-1].send_weights()
        thread.join()
        other.close()
        assert said == [""]
        assert engine.module.get_parameter("weight").tolist() == [[value] * 2] * 2 + [[2.0] * 2] * 2
    for one in met:
        one.shutdown()
    assert engine.link is not None
    engine.link.leave()


def test_an_error_of_ranks_that_do_not_come_names_the_run() -> None:
    """Their launches may have drawn other ids."""
    info = dataclasses.replace(tell(), trainers=2, run="one", timeout=SHORT_S)
    with pytest.raises(
        ExchangeError, match=r"rank 1 .*did not call[\s\S]*of run 'one': if several launch"
    ):
        sv.Trainer.trainer_init(info, client=PlainEngine(make_module()), source=make_module())


def test_a_rank_of_an_earlier_run_does_not_meet() -> None:
    """It comes first, as it tries again, and would send what it has of that run."""
    info = dataclasses.replace(tell(), trainers=2, run="this")
    port = int(info.address.rpartition(":")[2])
    engine = PlainEngine(nn.Linear(2, 4, bias=False))
    stale, other = Pool(1), Pool(1)
    said: dict[str, str] = {}

    def join(pool: Pool, run: str, value: float) -> None:
        (said[run],) = pool.run(transfers.second, port, run, value, EARLIER_S)

    threads = [
        threading.Thread(target=join, args=(stale, "earlier", 7.0)),
        threading.Thread(target=join, args=(other, "this", 2.0)),
    ]
    threads[0].start()
    timer = threading.Timer(SHORT_S, threads[1].start)
    timer.start()
    met = sv.Trainer.trainer_init(
        dataclasses.replace(info, timeout=EARLIER_S),
        client=engine,
        source=transfers.halves(torch.full((2, 2), 1.0)),
    )
    met.send_weights()
    timer.join()
    for thread in threads:
        thread.join()
    for pool in (stale, other):
        pool.close()
    assert engine.module.get_parameter("weight").tolist() == [[1.0] * 2] * 2 + [[2.0] * 2] * 2
    assert said["this"] == ""
    assert "rank 0 is of run 'this', and rank 1 of run 'earlier'" in said["earlier"]
    met.shutdown()
    assert engine.link is not None
    engine.link.leave()


def test_another_trainer_has_met_the_engine_since(pair: Pair) -> None:
    """The one before hears so at once, and the engine goes on with the other."""
    other = sv.Trainer.trainer_init(tell(), client=pair.engine, source=make_module())
    other.send_weights()
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"engine 0: .*joined another trainer since"):
        pair.sender.send_weights()
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert not pair.is_equal()
    other.send_weights()
    other.shutdown()


class Unheard(PlainEngine):
    """It joins, and its answer is lost."""

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        super().init_weight_transfer_engine(init_info)
        raise ConnectionError("answer lost")


def test_all_hear_of_an_engine_that_fails_once_all_have_met() -> None:
    """The other rank had a trainer, and waited in its next call."""
    info = sv.TrainerInfo(
        f"127.0.0.1:{free_port()}", 2, workers=1, rank=0, timeout=transfers.TIMEOUT_S
    )
    port = int(info.address.rpartition(":")[2])
    other = Pool(1)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend(other.run(transfers.second, port)))
    thread.start()
    engine = Unheard(nn.Linear(2, 4, bias=False))
    source = transfers.halves(torch.ones(2, 2))
    with pytest.raises(ExchangeError, match="ConnectionError: answer lost"):
        sv.Trainer.trainer_init(info, client=engine, source=source)
    thread.join()
    other.close()
    assert "could not join its engines: engine 0: ConnectionError: answer lost" in said[0]


def test_what_fsdp_has_gathered(pool: Pool) -> None:
    """Is no source, since another is trained."""
    for said, then in pool.run(gathered_sources.read):
        assert "is a copy that FSDP2 gathered" in said and "call reshard()" in said
        assert then


def test_ranks_that_sources_name() -> None:
    """Have to be the trainer's."""
    layouts = {"w": sm.Layout((8,), sm.Mesh(dp=2, ranks=[3, 4]), "(dp n)")}
    shapes = {"w": ((8,), "float32")}
    source = sv.Source({"w": torch.zeros(4)}, layouts, shapes)
    said = r"tensors on rank 4, but TrainerInfo has trainers=1, .* if ranks 0 to 4 all train"
    with pytest.raises(ValueError, match=said):
        sv.Trainer.trainer_init(tell(), client=PlainEngine(make_module()), source=source)
    info = sv.TrainerInfo("127.0.0.1:1", 2, workers=1, rank=0)
    # No TrainerInfo of two ranks could have the rank of this process.
    with pytest.raises(ValueError, match=r"tensors on rank 4, .* otherwise pass a Source, whose"):
        _check_ranks(dataclasses.replace(source, rank=3), info)
    layouts = {"w": sm.Layout((8,), sm.Mesh(dp=2), "(dp n)")}
    with pytest.raises(
        ValueError, match="TrainerInfo has rank=0, but this process is rank 1 of the ranks"
    ):
        _check_ranks(sv.Source({}, layouts, shapes, rank=1), info)


class Skipping(PlainEngine):
    """As vLLM's loaders, which skip a tensor that their model does not use."""

    def _record(self, told: Told) -> sm.storage.Recorded:
        used = dict(self.module.named_parameters())
        served = {name: entry for name, entry in told.served.items() if name in used}
        return super()._record(dataclasses.replace(told, served=served))


def test_a_tensor_that_an_engine_skips() -> None:
    """Is refused, and what is said to help does."""
    tied, engine = make_module(), Skipping(make_module())
    tied.head = nn.Linear(2, 2, bias=False)
    with pytest.raises(
        ExchangeError, match=r"loader skips 'head.weight'\n.*Source whose tensors= and"
    ):
        sv.Trainer.trainer_init(tell(), client=engine, source=tied)
    tensors = dict(tied.named_parameters())
    del tensors["head.weight"]
    side = smt.layout_of(tied)
    shapes = {name: (side[name].shape, side[name].dtype) for name in tensors}
    source = sv.Source(tensors, side, shapes)
    sender = sv.Trainer.trainer_init(tell(), client=engine, source=source)
    sender.send_weights()
    assert torch.equal(engine.module.get_parameter("0.weight"), tensors["0.weight"])
    sender.shutdown()
    assert engine.link is not None
    engine.link.leave()
