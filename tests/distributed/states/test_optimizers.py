"""What is saved of optimizers, and what they may not have."""

from __future__ import annotations

import itertools
import weakref
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardmath as sm
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from tests.distributed.tasks.parts import say
from tests.distributed.tasks.states import small, train


def test_several_optimizers(tmp_path: Path) -> None:
    """One for matrices and one for the rest, restored into one, and into two."""

    def two(module: nn.Module) -> list[optim.Optimizer]:
        return [
            optim.SGD([module[0].weight], lr=0.1, momentum=0.9),
            optim.Adam(module[1].parameters()),
        ]

    module, other = small(), small(seed=1)
    pair, second = two(module), two(other)
    for one in pair:
        train(module, one, range(1))
    training.save_state(tmp_path, module, pair)
    training.load_state(tmp_path, other, second)
    a, b = (training.state_of(*x)[0] for x in ((module, pair), (other, second)))
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


class Shaped(optim.SGD):
    """With a value in its state."""

    def __init__(self, module: nn.Module, value: object) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.state[module[0].weight]["odd"] = value


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "other": (
        lambda: training.state_of(small(), optim.SGD(small().parameters())),
        "that is not the module's; make the opt",
    ),
    "value": (
        lambda: training.state_of(m := small(), Shaped(m, {1})),
        "'odd' of '0.weight' is {1}, which JSON cannot",
    ),
    "group": (
        lambda: training.state_of(m := small(), optim.SGD([{"params": m.parameters(), "x": len}])),
        "'x' of a par",
    ),
    "meta": (
        lambda: training.state_of(m := small(), Shaped(m, torch.ones(2, device="meta"))),
        "'0.weight.odd' is on the meta device",
    ),
    "nested": (
        lambda: training.state_of(m := small(), Shaped(m, nested())),
        "'0.weight.odd' is a nested tensor",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    act, said = ERRORS[name]
    with pytest.raises(CheckpointError) as error:
        act()
    assert said in str(error.value)


def test_keys_of_state_that_are_not_text() -> None:
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight] = {0: torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="has the key 0, of type int; use text as keys"):
        training.state_of(module, optimizer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((5,), "the module is 5, not a torch.nn.Module"),
        ((small(), 5), "the optimizer is 5, not a torch.optim.Optimizer"),
        ((small(), [5]), "one of the optimizers is 5, not a torch.optim.Optimizer"),
    ],
)
def test_what_is_not_a_module_or_optimizer(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        training.save_state(tmp_path, *given)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


LINE = sm.Layout((9, 4), sm.Mesh(), "(n)=<3:9 -2 0:3> h")
OTHER = sm.Layout((9, 4), sm.Mesh(), "(n)=<0:9 -2> h")
"""On one rank, in other orders around padding."""


def with_part(
    held: sm.Layout | None, says: sm.Layout | None, value: float = 1.0
) -> tuple[nn.Module, optim.Optimizer]:
    """A parameter and its moment, of which each says which part it is, or nothing."""
    module = nn.ParameterDict({"w": torch.full((11, 4), value)})
    moment = torch.full((11, 4), value)
    if held is not None:
        say(module["w"], held, 0)
    if says is not None:
        say(moment, says, 0)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module["w"]]["moment"] = moment
    return module, optimizer


WHOLE = sm.Layout((11, 4), sm.Mesh(), "n h")


@pytest.mark.parametrize(("held", "says"), [(None, LINE), (LINE, OTHER), (LINE, WHOLE)])
def test_state_that_says_it_is_another_part(
    tmp_path: Path, held: sm.Layout | None, says: sm.Layout
) -> None:
    """As of an optimizer that divides its state: each rank would load the first one's. A load makes it anew."""
    module, optimizer = with_part(held, says)
    with pytest.raises(CheckpointError, match=r"'moment' of 'w' (says by its attr|has shape)"):
        training.save_state(tmp_path, module, optimizer)
    training.save_state(tmp_path, *with_part(held, held))
    other, second = with_part(held, says, 2.0)
    before = second.state[other["w"]]["moment"]
    training.load_state(tmp_path, other, second)
    after = second.state[other["w"]]["moment"]
    assert before.eq(2).all() and after.sum() == (44 if held is None else 36)


@pytest.mark.parametrize(
    ("held", "says"), [(LINE, LINE), (LINE, None), (None, WHOLE), (WHOLE, WHOLE)]
)
def test_state_that_says_it_is_the_same_part(
    tmp_path: Path, held: sm.Layout | None, says: sm.Layout | None
) -> None:
    training.save_state(tmp_path, *with_part(held, says))
    other, second = with_part(held, says, 2.0)
    before = second.state[other["w"]]["moment"]
    training.load_state(tmp_path, other, second)
    after = second.state[other["w"]]["moment"]
    assert after is before and after[:6].eq(1).all()


@pytest.mark.parametrize("where", ["list", "option"])
def test_values_that_say_they_are_a_part(tmp_path: Path, where: str) -> None:
    """JSON holds one rank's part."""
    module, optimizer = with_part(None, None)
    part = say(torch.ones(11, 4), LINE, 0)
    if where == "list":
        optimizer.state[module["w"]]["odd"] = [{"part": part}]
    else:
        optimizer.param_groups[0]["odd"] = (part,)
    with pytest.raises(CheckpointError, match=r"'odd' .* with global_shape=.* without the attrib"):
        training.save_state(tmp_path, module, optimizer)


@pytest.mark.parametrize("step", ["state_of", "save_state", "load_state"])
def test_a_parameter_of_two_optimizers(tmp_path: Path, step: str) -> None:
    """Of two states one would be lost, or both would get one."""
    module = nn.Linear(2, 2)
    training.save_state(tmp_path, module, optim.SGD(module.parameters(), lr=0.1))
    pair = [optim.SGD(module.parameters(), lr=0.1), optim.Adam([module.bias])]
    calls: dict[str, Callable[[], object]] = {
        "state_of": lambda: training.state_of(module, pair),
        "save_state": lambda: training.save_state(tmp_path, module, pair),
        "load_state": lambda: training.load_state(tmp_path, module, pair),
    }
    said = "'bias' is in two parameter groups of the optimizers; put each parameter into one group"
    with pytest.raises(CheckpointError, match=said):
        calls[step]()


def test_a_parameter_of_two_groups() -> None:
    """torch looks for it only where a group is added."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(module.weight)
    with pytest.raises(CheckpointError, match="'weight' is in two parameter groups"):
        training.state_of(module, optimizer)


def _count(optimizer: optim.Optimizer, module: nn.Module) -> None:
    optimizer.state["global"] = 3  # type: ignore[index]


def _keep_for_stranger(optimizer: optim.Optimizer, module: nn.Module) -> None:
    optimizer.state[torch.zeros(7)] = {"momentum_buffer": torch.ones(7)}


def _take_out(optimizer: optim.Optimizer, module: nn.Module) -> None:
    optimizer.param_groups[0]["params"].pop()


def _hold_number(optimizer: optim.Optimizer, module: nn.Module) -> None:
    optimizer.state[module.weight] = 5  # type: ignore[assignment]


STRAYS: dict[str, tuple[Callable[[optim.Optimizer, nn.Module], None], str]] = {
    "text": (
        _count,
        "has the key 'global', which is not a parameter of its groups; keep it in a "
        "parameter's state, or as an option of a group",
    ),
    "stranger": (
        _keep_for_stranger,
        r"has state of a tensor of shape \(7,\) that is in none of its groups; delete it from",
    ),
    "out of its group": (
        _take_out,
        "has state of a tensor 'bias' that is in none of its groups; delete it from",
    ),
    "number": (
        _hold_number,
        "the optimizer's state of 'weight' is 5, not a dict; keep its values in a dict",
    ),
}


@pytest.mark.parametrize("step", ["state_of", "save_state", "load_state"])
@pytest.mark.parametrize("stray", STRAYS)
def test_state_that_is_not_a_parameters(tmp_path: Path, step: str, stray: str) -> None:
    """It would be lost in a save, and stay as it was in a load. Nothing is written or restored."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = tmp_path / "saved"
    training.save_state(saved, module, optimizer)
    spoil, said = STRAYS[stray]
    spoil(optimizer, module)
    calls: dict[str, Callable[[], object]] = {
        "state_of": lambda: training.state_of(module, optimizer),
        "save_state": lambda: training.save_state(tmp_path / "new", module, optimizer),
        "load_state": lambda: training.load_state(saved, module, optimizer, strict=False),
    }
    nn.init.zeros_(module.weight)
    with pytest.raises(CheckpointError, match=said):
        calls[step]()
    assert not (tmp_path / "new").exists() and not module.weight.any()


def test_empty_state_of_other_keys(tmp_path: Path) -> None:
    """The state is a defaultdict: to look for a key leaves an empty dict under it."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    assert optimizer.state["global"] == {}  # type: ignore[index]
    training.save_state(tmp_path, module, optimizer)
    training.load_state(tmp_path, module, optimizer)


class Wrapper(optim.SGD):
    """Has other optimizers, and some state of its own."""

    def __init__(self, module: nn.Module, held: object) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.held = held

    @classmethod
    def sharing(cls, module: nn.Module, held: optim.Optimizer) -> Wrapper:
        """With the state and the groups of the other."""
        made = cls(module, held)
        made.state, made.param_groups = held.state, held.param_groups
        return made


@dataclass
class Fields:
    one: object
    empty: int = field(init=False)

    @property
    def asked(self) -> object:
        raise AssertionError


@dataclass(slots=True)
class Slots:
    one: object
    empty: int = field(init=False)


class Box:
    """An object as any other."""

    def __init__(self, held: object) -> None:
        self.held = held

    @property
    def asked(self) -> object:
        raise AssertionError


class Endless(Mapping[str, Any]):
    """Makes another one whenever it is asked."""

    def __getitem__(self, key: str) -> Endless:
        return Endless()

    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __len__(self) -> int:
        return 1


def test_containers_that_end_nowhere() -> None:
    """Nothing in them is lost: they are passed over."""
    module = nn.Linear(2, 2)
    circle: list[object] = [Endless()]
    circle += [Fields(circle), SimpleNamespace(a=circle)]
    for _ in range(3000):
        circle = [circle]
    training.state_of(module, Wrapper(module, circle))


def refer_by_a_trainer(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    """As of a GAN, whose trainer has the optimizers of both."""
    optimizer.monitors = [Box({"optimizers": [Wrapper(nn.Linear(2, 2), other), optimizer]})]  # type: ignore[attr-defined]


def refer_by_a_schedule(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    schedulers = optim.lr_scheduler.ConstantLR
    optimizer.schedules = [schedulers(optimizer), schedulers(other)]  # type: ignore[attr-defined]


def refer_by_a_hook(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    class Hook(Box):
        def __call__(self, *given: object) -> None:
            pass

    optimizer.register_step_post_hook(Hook(other))


def refer_by_what_is_gone(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    """A proxy raises where it is asked for its class."""
    box = Box(other)
    optimizer.seen = [weakref.proxy(box)]  # type: ignore[attr-defined]


REFERRING = [
    refer_by_a_trainer,
    refer_by_a_schedule,
    refer_by_a_hook,
    refer_by_what_is_gone,
    lambda optimizer, other: setattr(optimizer, "held", Box(other)),
    lambda optimizer, other: setattr(optimizer, "held", [partial(print, other)]),
    lambda optimizer, other: setattr(optimizer, "held", [type("Kind", (), {"held": other})]),
]


@pytest.mark.parametrize("refer", REFERRING)
def test_what_knows_other_optimizers(
    refer: Callable[[optim.Optimizer, optim.Optimizer], None],
) -> None:
    """Those are not the optimizer's own."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters())
    refer(optimizer, optim.Adam(module.parameters()))
    training.state_of(module, optimizer)


class Lookahead(optim.Optimizer):
    """Has slow weights as its state, and another optimizer of the same parameters."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state = defaultdict(dict)
        self.more: dict[str, Any] = {}

    def state_dict(self) -> Any:
        return self.inner.state_dict() | self.more

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


def test_a_wrapper_with_state_beside_that_of_what_it_wraps(tmp_path: Path) -> None:
    """What the error says to do keeps both."""

    def made(seed: int) -> tuple[nn.Module, Lookahead]:
        module = small(seed)
        return module, Lookahead(optim.Adam(module.parameters(), lr=0.1))

    def tell(optimizer: Lookahead) -> str:
        with pytest.raises(CheckpointError) as error:
            training.state_of(module, optimizer)
        return str(error.value)

    def follow(optimizer: Lookahead) -> Iterator[tuple[Path, Any]]:
        spelled = said.partition("its own state too: ")[2].partition(", if every rank")[0]
        first, _, second = spelled.partition(" of it under one path, and under another ")
        make, _, of = second.partition(" with plain.state = ")
        yield tmp_path / "first", eval(first, {"optimizer": optimizer})
        plain = eval(make.removeprefix("plain = "), {"optimizer": optimizer, "torch": torch})
        plain.state = eval(of, {"optimizer": optimizer})
        yield tmp_path / "second", plain

    module, optimizer = made(0)
    assert "give [optimizer.inner] of it, as long as Lookahead has nothing in its own" in tell(
        optimizer
    )
    train(module, optimizer, range(3))
    said = tell(optimizer)
    assert "save twice, and load twice, as Lookahead has its own state too: " in said
    other, fresh = made(1)
    for path, given in follow(optimizer):
        training.save_state(path, module, given)
    for path, given in follow(fresh):
        training.load_state(path, other, given)
    assert len(fresh.state) == len(optimizer.state) == len(list(module.parameters()))
    for one, its in ((module, optimizer), (other, fresh)):
        train(one, its, range(3, 6))
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    optimizer.more = {"count": 5}
    optimizer.state.clear()
    assert "save twice" in tell(optimizer) and "keep 'count' as an option of a group" in tell(
        optimizer
    )


def test_a_wrapper_with_parameters_of_its_own(tmp_path: Path) -> None:
    """It is given beside the other."""

    def made(seed: int) -> tuple[nn.Module, Wrapper]:
        module = small(seed)
        wrapper = Wrapper(module[0], optim.Adam(module[1].parameters()))
        wrapper.param_groups[0]["momentum"] = 0.9
        return module, wrapper

    module, optimizer = made(0)
    with pytest.raises(CheckpointError, match=r"give \[optimizer, optimizer.held\], if every rank"):
        training.state_of(module, optimizer)
    other, fresh = made(1)
    train(module, optimizer, range(2))
    training.save_state(tmp_path, module, [optimizer, optimizer.held])  # type: ignore[list-item]
    training.load_state(tmp_path, other, [fresh, fresh.held])  # type: ignore[list-item]
    assert len(fresh.state) == len(optimizer.state) > 0


class Made(optim.SGD):
    """Has its state in a dict of its own, and makes another of it whenever it is asked."""

    @property
    def state(self) -> Any:
        return dict(vars(self).setdefault("own", {}))

    @state.setter
    def state(self, state: object) -> None:
        pass


@pytest.mark.parametrize("step", [training.save_state, training.load_state])
def test_state_that_is_made_when_it_is_asked_for(
    tmp_path: Path, step: Callable[..., object]
) -> None:
    """Nothing that is loaded would stay in it: that is said before anything is."""
    module = nn.Linear(2, 2)
    training.save_state(tmp_path, module, optim.SGD(module.parameters(), lr=0.1))
    with torch.no_grad():
        module.weight.fill_(3.0)
    said = "the attribute state of Made is another object at each access, .*; give the same dict"
    with pytest.raises(CheckpointError, match=said):
        step(tmp_path, module, Made(module.parameters(), lr=0.1))
    assert module.weight.eq(3.0).all()


@pytest.mark.parametrize("step", ["state_of", "save_state", "load_state"])
@pytest.mark.parametrize(
    "pack", [lambda x: x, lambda x: [x], lambda x: {"a": x}, lambda x: {"a": {2: [x]}}]
)
def test_state_in_another_optimizer(
    tmp_path: Path, step: str, pack: Callable[[object], object]
) -> None:
    """It would be lost in a save, and stay as it was in a load, also where there is none yet."""
    module = nn.Linear(2, 2)
    inner = optim.Adam(module.parameters())
    training.save_state(tmp_path, module, inner)
    optimizer = Wrapper(module, pack(inner))
    calls: dict[str, Callable[[], object]] = {
        "state_of": lambda: training.state_of(module, optimizer),
        "save_state": lambda: training.save_state(tmp_path / "new", module, optimizer),
        "load_state": lambda: training.load_state(tmp_path, module, optimizer),
    }
    said = "Wrapper keeps state in its own optimizer, the Adam in its attribute 'held'"
    with pytest.raises(CheckpointError, match=said):
        calls[step]()


@pytest.mark.parametrize(
    ("pack", "said"),
    [
        (lambda one, other: one, "[optimizer.held]"),
        (lambda one, other: [one, 5, other], "[optimizer.held[0], optimizer.held[2]]"),
        (lambda one, other: (one, other), "[optimizer.held[0], optimizer.held[1]]"),
        (lambda one, other: {"a": one, 1: other}, "[optimizer.held['a'], optimizer.held[1]]"),
        (
            lambda one, other: {"a": {2: [one]}, "b": ([other],)},
            "[optimizer.held['a'][2][0], optimizer.held['b'][0][0]]",
        ),
        (
            lambda one, other: deque([MappingProxyType({1: one}), SimpleNamespace(a=other)]),
            "[optimizer.held[0][1], optimizer.held[1].a]",
        ),
        (
            lambda one, other: ({one}, {other: 1}),
            "[[*optimizer.held[0]][0], [*optimizer.held[1]][0]]",
        ),
        (
            lambda one, other: [Fields(one), Slots(frozenset({other}))],
            "[optimizer.held[0].one, [*optimizer.held[1].one][0]]",
        ),
        (
            lambda one, other: [UserDict(a=one), ChainMap({}, {"b": other})],
            "[optimizer.held[0].data['a'], optimizer.held[1].maps[1]['b']]",
        ),
        (
            lambda one, other: UserList([one, {"a": other}]),
            "[optimizer.held.data[0], optimizer.held.data[1]['a']]",
        ),
    ],
)
def test_what_is_said_to_give_of_a_wrapper_is_saved(
    tmp_path: Path, pack: Callable[[Any, Any], object], said: str
) -> None:
    def made() -> tuple[nn.Module, optim.Optimizer]:
        module = small()
        inner = optim.Adam(module[0].parameters()), optim.SGD(module[1].parameters(), momentum=0.5)
        return module, Wrapper(module, pack(*inner))

    def give(optimizer: optim.Optimizer) -> Any:
        with pytest.raises(CheckpointError) as error:
            training.state_of(module, optimizer)
        assert f"give {said} of it" in str(error.value)
        return eval(said, {"optimizer": optimizer})

    module, optimizer = made()
    given = give(optimizer)
    for each in given:
        train(module, each, range(1))
    training.save_state(tmp_path, module, given)
    other, fresh = made()
    restored = give(fresh)
    training.load_state(tmp_path, other, restored)
    a, b = (training.state_of(*x)[0] for x in ((module, given), (other, restored)))
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


class Bare(optim.Optimizer):
    """Shares groups and state with what it wraps, and is otherwise not set up; its state dict may have more."""

    def __init__(self, wrapped: optim.Optimizer, **more: object) -> None:
        self.wrapped, self.more = wrapped, more
        self.param_groups = wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.wrapped.state

    def state_dict(self) -> Any:
        return self.wrapped.state_dict() | self.more


def test_a_wrapper_that_has_nothing_of_its_own(tmp_path: Path) -> None:
    """As it is saved it is restored, and the defaults of what it wraps stay as they are."""
    module = small()
    rate = torch.tensor(0.5)
    wrapped = optim.Adam(module.parameters(), lr=rate.clone())
    train(module, wrapped, range(2))
    training.save_state(tmp_path, module, Bare(wrapped))
    other = small(seed=1)
    fresh = optim.Adam(other.parameters(), lr=torch.tensor(0.25))
    training.load_state(tmp_path, other, Bare(fresh))
    assert fresh.param_groups[0]["lr"] == 0.5 and fresh.defaults["lr"] == 0.25
    a, b = (training.state_of(*x)[0] for x in ((module, wrapped), (other, fresh)))
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_a_wrapper_that_keeps_more_than_it_wraps(tmp_path: Path) -> None:
    """Refused by save and load alike; what the error says to do keeps all of it."""
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    class Averager(ModelAverager):
        def __init__(self) -> None:
            self.step = 0

        def average_parameters(self, params: Any) -> None:
            self.step += 1

    def made(seed: int) -> tuple[nn.Module, Any]:
        module = small(seed)
        return module, PostLocalSGDOptimizer(optim.Adam(module.parameters()), Averager())

    module, optimizer = made(0)
    train(module, optimizer, range(3))
    said = (
        "PostLocalSGDOptimizer keeps 'step' besides the state of its 'optim', which would be lost; "
        "give optimizer.optim, and keep the rest as an option of a group in its param_groups"
    )
    for act in (training.save_state, training.load_state):
        path = tmp_path / "c"
        training.save_state(path, module, optimizer.optim)
        with pytest.raises(CheckpointError, match=said):
            act(path, module, optimizer)
    optimizer.optim.param_groups[0]["averager_step"] = optimizer.averager.step
    training.save_state(tmp_path, module, optimizer.optim)
    other, fresh = made(1)
    training.load_state(tmp_path, other, fresh.optim)
    assert fresh.optim.param_groups[0]["averager_step"] == 3
    a, b = (training.state_of(*x)[0] for x in ((module, optimizer.optim), (other, fresh.optim)))
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


class Adding(optim.SGD):
    """Has a number in its state dict."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1, momentum=0.9)
        self.count = 0

    def state_dict(self) -> Any:
        return super().state_dict() | {"count": self.count}


def add_by_a_hook(module: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_state_dict_post_hook(lambda optimizer, found: found | {"count": 7})
    return optimizer


class Inside(optim.SGD):
    """Has a number in its state dict, inside the state or the groups."""

    part = ""

    def state_dict(self) -> Any:
        found = super().state_dict()
        if self.part == "group":
            found["param_groups"][0]["count"] = 7
        else:
            found["state"] = {0: {"count": 7}}
        return found


def add_inside(module: nn.Module, part: str) -> optim.Optimizer:
    optimizer = Inside(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.part = part
    return optimizer


class Untold(optim.SGD):
    """Has no state dict."""

    def state_dict(self) -> Any:
        raise NotImplementedError("see the other method")


class Nothing(optim.SGD):
    """Has a state dict that is none."""

    def state_dict(self) -> Any:
        return None


MORE: dict[str, tuple[Callable[[nn.Module], optim.Optimizer], str]] = {
    "its own": (
        Adding,
        "Adding keeps 'count' in its state dict besides what its state and param_groups hold",
    ),
    "by a hook": (add_by_a_hook, "SGD keeps 'count' in its state dict besides what its"),
    "in a group": (
        lambda module: add_inside(module, "group"),
        "Inside keeps 'count' in its state dict besides what its state and param_groups hold",
    ),
    "in the state": (
        lambda module: add_inside(module, "state"),
        "Inside keeps 'count' in its state dict besides what its state and param_groups hold",
    ),
    "in what is wrapped": (
        lambda module: Wrapper.sharing(module, Adding(module)),
        "Adding keeps 'count' in its state dict besides what its state and param_groups hold",
    ),
    "none": (
        lambda module: Nothing(module.parameters(), lr=0.1, momentum=0.9),
        "Nothing.state_dict() gives NoneType, not a dict, so the state that it keeps is not",
    ),
    "not said": (
        lambda module: Untold(module.parameters(), lr=0.1, momentum=0.9),
        "Untold.state_dict() raises NotImplementedError: see the other method, so the state",
    ),
}


@pytest.mark.parametrize("how", MORE)
def test_an_optimizer_whose_state_dict_has_more(tmp_path: Path, how: str) -> None:
    """Refused by save and load alike; what the error says to do keeps all of it."""
    make, said = MORE[how]

    def give(module: nn.Module, optimizer: optim.Optimizer) -> Any:
        path = tmp_path / "c"
        training.save_state(path, module, optim.SGD(module.parameters(), lr=0.1))
        for act in (training.save_state, training.load_state):
            with pytest.raises(CheckpointError) as error:
                act(path, module, optimizer)
            assert said in str(error.value)
        spelled = str(error.value).partition("plain = ")[2]
        made, _, of = spelled.partition(" with plain.state = ")
        plain = eval(made, {"optimizer": optimizer, "torch": torch})
        plain.state = eval(of, {"optimizer": optimizer})
        return plain

    module, other = small(), small(seed=1)
    optimizer, fresh = make(module), make(other)
    train(module, optimizer, range(2))
    given, restored = give(module, optimizer), give(other, fresh)
    given.param_groups[0]["count"] = 5
    training.save_state(tmp_path, module, given)
    training.load_state(tmp_path, other, restored)
    assert fresh.param_groups[0]["count"] == 5
    for optimizers in ((optimizer, fresh), (given, restored)):
        for weight, into in zip(module.parameters(), other.parameters(), strict=True):
            held = optimizers[0].state.get(weight, {})
            found = optimizers[1].state.get(into, {})
            assert held.keys() == found.keys()
            assert all(found[key].equal(held[key]) for key in held)


def test_hooks_of_a_state_dict(tmp_path: Path) -> None:
    """What a hook writes to the state before a save is saved, and a hook finds it after a load."""

    def make(count: int) -> tuple[nn.Module, Any]:
        module = nn.Linear(2, 2)
        optimizer: Any = optim.SGD(module.parameters(), lr=0.1)
        optimizer.count = count

        def tell(optimizer: Any) -> None:
            optimizer.state[module.weight]["count"] = optimizer.count

        def take(optimizer: Any) -> None:
            optimizer.count = optimizer.state[module.weight]["count"]

        optimizer.register_state_dict_pre_hook(tell)
        optimizer.register_load_state_dict_post_hook(take)
        return module, optimizer

    training.save_state(tmp_path, *make(5))
    module, optimizer = make(0)
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.count == 5


@pytest.mark.parametrize("step", [training.save_state, training.load_state])
def test_a_wrapper_of_one_that_keeps_its_state_in_another(
    tmp_path: Path, step: Callable[..., object]
) -> None:
    """What the wrapper has as its state is not where the state is."""
    module = nn.Linear(2, 2)
    inner = optim.Adam(module.parameters())
    training.save_state(tmp_path, module, inner)
    said = r"the Adam in its attribute 'held'.*; give \[optimizer.wrapped.held\] of it"
    with pytest.raises(CheckpointError, match=said):
        step(tmp_path, module, Bare(Wrapper(module, inner)))


def test_optimizers_that_know_each_other_or_have_one_state() -> None:
    """Of these nothing is lost."""
    module = nn.Linear(2, 2)
    inner = optim.Adam([module.weight])
    knowing = Wrapper(module, inner)
    knowing.param_groups[0]["params"] = [module.bias]
    training.state_of(module, [knowing, inner])
    whole = optim.Adam(module.parameters())
    sharing = Wrapper(module, whole)
    sharing.state = whole.state
    training.state_of(module, sharing)
    sharing.held = sharing
    training.state_of(module, sharing)
