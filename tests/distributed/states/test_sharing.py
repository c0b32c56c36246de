"""State and options that are one object in several places are one again, so that steps in place go on as they did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from tests.distributed.pool import Pool
from tests.distributed.tasks import training as work
from tests.distributed.tasks.states import small, train

Begun = Callable[[list[dict[str, Any]]], None]


def share_step(states: list[dict[str, Any]]) -> None:
    step = torch.zeros(())
    for state in states:
        state["step"] = step


def share_history(states: list[dict[str, Any]]) -> None:
    history = [0.0]
    for state in states:
        state["step"] = history


def share_dict(states: list[dict[str, Any]]) -> None:
    counts = {"step": 0.0, "steps": [torch.zeros(())]}
    for state in states:
        state["step"] = counts


def share_tuple(states: list[dict[str, Any]]) -> None:
    counts = ((torch.zeros(()), 1),)
    for state in states:
        state["step"] = counts


def share_twice(states: list[dict[str, Any]]) -> None:
    """Two keys of the first parameter, and of the others the one step."""
    share_step(states)
    states[0]["before"] = states[0]["step"].detach()


SHARED: dict[str, Begun] = {
    "a tensor": share_step,
    "a list": share_history,
    "a dict": share_dict,
    "a tuple": share_tuple,
    "a tensor and what detach gives": share_twice,
}


class Counting(optim.Optimizer):
    """Steps by the number of steps, which it counts in place in the state of its first parameter."""

    def __init__(self, params: Any, begin: Begun) -> None:
        super().__init__(params, {"lr": 0.1})
        self.begin = begin

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        parameters = [p for p in parameters if p.grad is not None]
        if not self.state:
            self.begin([self.state[p] for p in parameters])
        first = self.state[parameters[0]]["step"]
        if isinstance(first, Tensor):
            first += 1
        elif isinstance(first, list):
            first.append(first[-1] + 1)
        elif isinstance(first, tuple):
            first[0][0].add_(1)
        else:
            first["step"] += 1.0
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.grad / read(self.state[p]["step"])
                if "before" in self.state[p]:
                    p -= self.state[p]["before"]


def read(step: Any) -> Any:
    if isinstance(step, list):
        return step[-1]
    if isinstance(step, tuple):
        return step[0][0]
    return step["step"] if isinstance(step, dict) else step


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("used", [0, 2])
def test_state_of_several_parameters_is_one_again(tmp_path: Path, case: str, used: int) -> None:
    module = small()
    optimizer = Counting(module.parameters(), SHARED[case])
    train(module, optimizer, range(2))
    training.save_state(tmp_path, module, optimizer)
    train(module, optimizer, range(2, 4))
    other = small(seed=1)
    second = Counting(other.parameters(), SHARED[case])
    train(other, second, range(used))
    training.load_state(tmp_path, other, second)
    train(other, second, range(2, 4))
    for one, restored in zip(module.parameters(), other.parameters(), strict=True):
        assert one.equal(restored)


def test_state_of_one_parameter_is_one_again(tmp_path: Path) -> None:
    """Also of two parameters that were one: each has its own."""
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    module["b"] = module["a"]
    optimizer = optim.SGD([module["a"]], lr=0.1)
    moment = torch.ones(2)
    pair = ([1], 2)
    optimizer.state[module["a"]] = {"one": moment, "other": moment, "pair": pair, "same": pair}
    training.save_state(tmp_path, module, optimizer)
    other = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    fresh = optim.SGD(other.parameters(), lr=0.1)
    training.load_state(tmp_path, other, fresh)
    a, b = (fresh.state[other[name]] for name in "ab")
    assert a["one"] is a["other"] and b["one"] is b["other"]
    assert a["one"] is not b["one"] and a["one"].equal(moment)
    assert a["pair"] is a["same"] and b["pair"] is b["same"]
    assert a["pair"][0] is not b["pair"][0] and a["pair"] == pair


def test_state_on_meshes_apart_is_one_again(pool: Pool, tmp_path: Path) -> None:
    """Ranks report to each other which it is."""
    assert pool.run(work.share_on_stages, str(tmp_path), "state") == [(True, True)] * 8


@pytest.mark.parametrize("second", [slice(0, 4), slice(2, 6), slice(4, 8), slice(0, 8, 2)])
def test_state_that_shares_a_part_of_its_memory(tmp_path: Path, second: slice) -> None:
    """It would come back as separate tensors, of which the next step changes one; parts that are apart are fine."""
    module = nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(4)})
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    flat = torch.zeros(8)
    optimizer.state[module["a"]] = {"seen": flat[:4].view(2, 2)}
    optimizer.state[module["b"]] = {"moment": flat[second]}
    if second == slice(4, 8):
        training.save_state(tmp_path, module, optimizer)
        return
    said = "'seen' of 'a' and 'moment' of 'b' are views of the same memory, but .* separate tensors"
    with pytest.raises(CheckpointError, match=said):
        training.save_state(tmp_path, module, optimizer)


@pytest.mark.parametrize("view", [lambda p: p.detach(), lambda p: p.detach()[:1]])
def test_state_in_the_memory_of_a_parameter(tmp_path: Path, view: Callable[[Any], Any]) -> None:
    """A load would make a tensor of it that no longer follows the parameter."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight] = {"slow": view(module.weight)}
    with pytest.raises(CheckpointError, match=r"'weight'.* are views of the same memory"):
        training.save_state(tmp_path, module, optimizer)


def put_in_buffer(module: nn.Module, optimizer: optim.Optimizer, step: Tensor) -> None:
    module.register_buffer("steps", step)


def put_in_frozen(module: nn.Module, optimizer: optim.Optimizer, step: Tensor) -> None:
    module.register_parameter("frozen", nn.Parameter(step, requires_grad=False))


def put_in_option(module: nn.Module, optimizer: optim.Optimizer, step: Tensor) -> None:
    optimizer.param_groups[0]["steps"] = {"all": [step]}


def put_in_list(module: nn.Module, optimizer: optim.Optimizer, step: Tensor) -> None:
    first, _ = optimizer.state.values()
    first["steps"] = [1, {"all": step[None]}]


def put_in_two_lists(module: nn.Module, optimizer: optim.Optimizer, step: Tensor) -> None:
    for state in optimizer.state.values():
        state["step"] = [step]


@pytest.mark.parametrize(
    "put", [put_in_buffer, put_in_frozen, put_in_option, put_in_list, put_in_two_lists]
)
def test_state_in_memory_that_is_saved_elsewhere(tmp_path: Path, put: Callable[..., None]) -> None:
    """Also a tensor inside a list or dict; a load would make separate tensors, of which the next step changes one."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    step = torch.zeros(())
    optimizer.state |= {p: {"step": step} for p in module.parameters()}
    training.save_state(tmp_path, module, optimizer)
    put(module, optimizer, step)
    with pytest.raises(CheckpointError, match=r"'step' of '.* are views of the same memory"):
        training.save_state(tmp_path, module, optimizer)


def test_state_that_is_equal_stays_separate(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    for p in module.parameters():
        optimizer.state[p] = {"step": torch.ones(()), "seen": [], "view": torch.ones(3)[1:]}
    training.save_state(tmp_path, module, optimizer)
    training.load_state(tmp_path, module, optimizer)
    one, other = (optimizer.state[p] for p in module.parameters())
    assert all(one[key] is not other[key] for key in one)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("value", [[1], {"steps": 1}])
def test_options_of_several_groups_are_one_still(tmp_path: Path, same: bool, value: Any) -> None:
    """As the default of all groups is one object: if all get the same value."""

    def two(default: Any) -> tuple[nn.Module, optim.Optimizer]:
        module = nn.Linear(2, 2)
        groups = [{"params": [p]} for p in module.parameters()]
        return module, optim.Optimizer(groups, {"lr": 0.1, "counts": default})

    module, optimizer = two(value)
    if not same:
        optimizer.param_groups[1]["counts"] = type(value)()
    training.save_state(tmp_path, module, optimizer)
    other, fresh = two(type(value)())
    training.load_state(tmp_path, other, fresh)
    first, second = (group["counts"] for group in fresh.param_groups)
    assert first == value and (first is second) == same
    assert not fresh.defaults["counts"]


class Lazy(optim.Optimizer):
    """Counts steps in an object that all groups come to share in the first step."""

    def __init__(self, groups: Any, make: Callable[[], Any]) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "seen" not in self.param_groups[0]:
            seen = self.make()
            for group in self.param_groups:
                group["seen"] = seen
        seen = self.param_groups[0]["seen"]
        if isinstance(seen, Tensor):
            seen += 1
        elif isinstance(seen, tuple):
            seen[0].add_(1)
        elif isinstance(seen, dict):
            seen[f"step {len(seen)}"] = 1
        else:
            seen.append(1)
        for group in self.param_groups:
            seen = group["seen"]
            held = seen[0] if isinstance(seen, tuple) else seen
            count = held if isinstance(held, Tensor) else len(held)
            for parameter in group["params"]:
                parameter -= group["lr"] * count


MADE: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "0-d": lambda: torch.zeros(()),
    "tuple": lambda: (torch.zeros(()), 1, 2, 3),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_options_that_groups_come_to_share_are_one_again(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """As in torch's load_state_dict; also in groups that are grouped otherwise."""

    def made(*groups: str) -> tuple[nn.Module, optim.Optimizer]:
        module = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
        return module, Lazy([{"params": [module[n] for n in names]} for names in groups], make)

    module, optimizer = made("ab", "c")
    for _ in range(3):  # not as many as a group has parameters
        optimizer.step()
    training.save_state(tmp_path, module, optimizer)
    for _ in range(2):
        optimizer.step()
    for groups in (("ab", "c"), ("c", "a", "b"), ("abc",)):
        other, into = made(*groups)
        training.load_state(tmp_path, other, into)
        for _ in range(2):
            into.step()
        for name in "abc":
            assert module[name].equal(other[name]), (groups, name)


def test_tensors_that_groups_hold_apart_keep_their_memory(tmp_path: Path) -> None:
    """What a captured graph reads; a group that holds no tensor gets one that another keeps."""

    def made(*rates: Any) -> optim.Optimizer:
        pairs = zip(module.values(), rates, strict=True)
        return optim.SGD([{"params": [weight], "lr": rate} for weight, rate in pairs])

    module = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
    rate = torch.tensor(0.5)
    training.save_state(tmp_path, module, made(rate, rate, rate))
    first, last = torch.tensor(0.25), torch.tensor(0.25)
    into = made(0.25, first, last)
    training.load_state(tmp_path, module, into)
    held = [group["lr"] for group in into.param_groups]
    assert held[0] is held[1] is first and held[2] is last
    assert first.eq(0.5) and last.eq(0.5)


def test_an_option_that_one_group_has_twice_is_one_again(tmp_path: Path) -> None:
    """In each of the groups that are made of it."""
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    seen = [1.0]
    group = {"params": [*module.values()], "seen": seen, "again": seen}
    training.save_state(tmp_path, module, optim.SGD([group], lr=0.1))
    into = optim.SGD([{"params": [weight]} for weight in module.values()], lr=0.1)
    training.load_state(tmp_path, module, into)
    one, other = into.param_groups
    assert one["seen"] is one["again"] and other["seen"] is other["again"]
    assert one["seen"] is not other["seen"] and one["seen"] == other["seen"] == seen


@pytest.mark.parametrize("seen", [[1], ([1],)])
def test_a_list_that_is_state_and_an_option(tmp_path: Path, seen: Any) -> None:
    """A step would change one of the two."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["seen"] = optimizer.state[module.weight]["seen"] = seen
    with pytest.raises(CheckpointError, match=r"'seen' of 'weight' and the option 'seen' are one"):
        training.save_state(tmp_path, module, optimizer)


def test_options_that_groups_on_two_meshes_share_are_one_again(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(work.shares_options_on_stages, str(tmp_path)) == [True] * 8


def put_twice_in_one(first: dict[str, Any], second: dict[str, Any], tensor: Tensor) -> None:
    first["seen"] = [tensor, {"again": tensor.detach()}]


def put_in_each_group(first: dict[str, Any], second: dict[str, Any], tensor: Tensor) -> None:
    first["seen"], second["seen"] = {"one": tensor}, {"one": tensor}


def put_beside_itself(first: dict[str, Any], second: dict[str, Any], tensor: Tensor) -> None:
    first["beta"], first["seen"] = tensor, (tensor, 0.5)


@pytest.mark.parametrize("put", [put_twice_in_one, put_in_each_group, put_beside_itself])
def test_a_tensor_inside_options_that_is_in_two_places(
    tmp_path: Path, put: Callable[..., None]
) -> None:
    """It would come back as separate tensors, of which the next step changes one."""
    module = nn.Linear(2, 2)
    optimizer = optim.SGD([{"params": [weight]} for weight in module.parameters()], lr=0.1)
    put(*optimizer.param_groups, torch.zeros(()))
    with pytest.raises(CheckpointError, match=r"option 'seen'.* are views of the same memory"):
        training.save_state(tmp_path, module, optimizer)


def test_a_tuple_of_the_defaults_is_one_still(tmp_path: Path) -> None:
    """Tensors in it keep their memory; and what has been loaded can be saved."""
    module = nn.Linear(2, 2)

    def made(*betas: float) -> optim.Optimizer:
        groups = [{"params": [weight]} for weight in module.parameters()]
        return optim.Adam(groups, betas=tuple(map(torch.tensor, betas)), capturable=True)

    training.save_state(tmp_path, module, made(0.5, 0.75))
    into = made(0.9, 0.99)
    tensors = into.param_groups[0]["betas"]
    for _ in range(2):
        training.load_state(tmp_path, module, into)
        first, second = (group["betas"] for group in into.param_groups)
        assert first is second and all(a is b for a, b in zip(first, tensors, strict=True))
        assert list(first) == [0.5, 0.75]
        training.save_state(tmp_path, module, into)


def test_a_tensor_of_the_module_is_in_several_options(tmp_path: Path) -> None:
    """It is there still after a load, as the module's."""
    module = nn.Linear(2, 2)
    group = {"params": [module.weight], "slow": [module.bias.data], "pair": (module.bias.data,)}
    optimizer = optim.SGD([group], lr=0.1)
    training.save_state(tmp_path, module, optimizer)
    training.load_state(tmp_path, module, optimizer)
    (group,) = optimizer.param_groups
    for key in ("slow", "pair"):
        assert group[key][0].data_ptr() == module.bias.data_ptr()
