"""What is restored is what was saved, into the memory that is there: every optimizer, ties, memory that several have.

One process without a process group; `test_training` has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn, optim

from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states import training
from shardmath_torch.checkpoints.states.values import list_tensors
from tests.distributed.tasks.states import STRANGE, same, small, stepped, train, values

Made = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads wait for each other longer than these sizes take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPTIMIZERS: dict[str, Made] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, betas=(0.7, 0.8), weight_decay=0.3),
    "AdamW, a tensor as rate": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_every_optimizer_goes_on(tmp_path: Path, name: str, steps: int) -> None:
    """A fresh one, and one that has done something else; restoring takes no step and leaves no gradients."""
    module = small()
    optimizer = OPTIMIZERS[name](module.parameters())
    train(module, optimizer, range(steps))
    training.save_state(tmp_path, module, optimizer)
    wanted = values(module, optimizer)
    train(module, optimizer, range(steps, 4))
    for used in (0, 3):
        other = small(seed=1)
        second = OPTIMIZERS[name](other.parameters())
        train(other, second, range(used))
        training.load_state(tmp_path, other, second)
        same(values(other, second), wanted)
        assert all(p.grad is None for p in other.parameters())
        train(other, second, range(steps, 4))
        same(values(other, second), values(module, optimizer))


@pytest.mark.parametrize("used", [0, 2])
def test_in_inference_mode(tmp_path: Path, used: int) -> None:
    """State is made for steps outside of that mode; what was made inside, to which no step writes, is made again."""
    made = OPTIMIZERS["AdamW, a tensor as rate"]
    module = small()
    optimizer = made(module.parameters())
    train(module, optimizer, range(2))
    training.save_state(tmp_path, module, optimizer)
    train(module, optimizer, range(2, 4))
    other = small(seed=1)
    second = made(other.parameters())
    train(other, second, range(used))
    with torch.inference_mode():
        second.param_groups[0]["lr"] = torch.tensor(0.5)
        for held in second.state.values():
            held["exp_avg"] = held["exp_avg"].clone()
        training.load_state(tmp_path, other, second)
    train(other, second, range(2, 4))
    same(values(other, second), values(module, optimizer))


@pytest.mark.parametrize("used", [0, 2])
def test_with_another_default_device(tmp_path: Path, used: int) -> None:
    """What is read goes through memory of the CPU, as in a script that makes its next module on the meta device."""
    module, other = small(), small(seed=1)
    optimizer, second = (optim.Adam(each.parameters()) for each in (module, other))
    train(module, optimizer, range(2))
    train(other, second, range(used))
    with torch.device("meta"):
        training.save_state(tmp_path, module, optimizer)
        training.load_state(tmp_path, other, second)
    same(values(other, second), values(module, optimizer))


@pytest.mark.parametrize("same_value", [True, False])
def test_a_rate_that_is_a_buffer(tmp_path: Path, same_value: bool) -> None:
    """Whoever writes to the buffer later still sets the rate; unless it was saved with another value."""

    def make(rate: float) -> tuple[nn.Module, optim.Optimizer, Tensor]:
        module = nn.Linear(2, 2)
        buffer = torch.tensor(rate)
        module.register_buffer("rate", buffer)
        return module, optim.SGD(module.parameters(), lr=buffer), buffer

    module, optimizer, buffer = make(0.5)
    if not same_value:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    training.save_state(tmp_path, module, optimizer)
    module, optimizer, buffer = make(3.0)
    training.load_state(tmp_path, module, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    assert buffer == 0.5 and rate == (0.5 if same_value else 0.25)
    assert (rate is buffer) == same_value


@pytest.mark.parametrize(
    "find", ["whole", "view", "in a tuple", "in a list", "in a dict", "strided"]
)
def test_an_option_in_the_memory_of_the_module(tmp_path: Path, find: str) -> None:
    """Whoever writes to the module's tensor later still sets the option, also of a view, and inside of a tuple."""

    def make(rate: float) -> tuple[nn.Module, optim.Optimizer]:
        module = nn.Linear(2, 2)
        buffer = torch.tensor([[0.0, rate], [1.0, 2.0]])
        if find == "strided":  # one element, with a stride that is not 1
            buffer = buffer[:1, 1]
        module.register_buffer("rates", buffer)
        option: Any = buffer
        if find not in ("whole", "strided"):
            option = buffer[0, 1]
        option = (0.9, option) if find == "in a tuple" else option
        option = [0.9, option] if find == "in a list" else option
        option = {"rate": option} if find == "in a dict" else option
        groups = [{"params": [each], "option": option} for each in module.parameters()]
        return module, optim.SGD(groups, lr=0.5)

    training.save_state(tmp_path, *make(0.5))
    module, optimizer = make(3.0)
    training.load_state(tmp_path, module, optimizer)
    cast(Tensor, module.rates).fill_(7.0)
    for group in optimizer.param_groups:
        assert all((tensor == 7.0).all() for tensor in list_tensors(group["option"]))


def test_names_and_memory(tmp_path: Path) -> None:
    """By name; the very memory, which restoring keeps."""
    module = small()
    optimizer = optim.AdamW(module.parameters())
    train(module, optimizer, range(1))
    tensors, layouts = training.state_of(module, optimizer)
    keys = ("exp_avg", "exp_avg_sq", "step")
    learned = [name for name, p in module.named_parameters() if p.requires_grad]
    kept = {f"model.{name}" for name in module.state_dict()}
    assert tensors.keys() == layouts.keys()
    assert tensors.keys() == kept | {f"optim.state.{n}.{k}" for n in learned for k in keys} | {
        "training"
    }
    held = [
        *module.parameters(),
        *module.buffers(),
        *(t for s in optimizer.state.values() for t in s.values()),
    ]
    before = {t.data_ptr() for t in held}
    assert before == {t.data_ptr() for name, t in tensors.items() if name != "training"}
    training.save_state(tmp_path, module, optimizer)
    training.load_state(tmp_path, module, optimizer)
    assert before == {
        t.data_ptr()
        for name, t in training.state_of(module, optimizer)[0].items()
        if name != "training"
    }


class Tied(nn.Module):
    """Two names, one parameter, or two."""

    def __init__(self, tied: bool, value: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(value)
            self.last.weight.fill_(value + 1)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def fitted(module: nn.Module) -> optim.Optimizer:
    optimizer = optim.Adam(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("tied", [True, False])
def test_shared_parameters(tmp_path: Path, tied: bool) -> None:
    """Saved once; restored into one parameter, or into two, each with the moments."""
    module = Tied(True, 0.5)
    optimizer = fitted(module)
    training.save_state(tmp_path, module, optimizer)
    assert [n for n in training.state_of(module)[0] if n.startswith("model")] == [
        "model.first.weight"
    ]
    other = Tied(tied, 7.0)
    second = optim.Adam(other.parameters())
    training.load_state(tmp_path, other, second)
    assert (other.first.weight is other.last.weight) == tied
    for p in (other.first.weight, other.last.weight):
        assert p.equal(module.first.weight)
        assert second.state[p]["exp_avg"].equal(optimizer.state[module.first.weight]["exp_avg"])


def two_groups(rate: Tensor) -> tuple[nn.Module, optim.Optimizer]:
    """Two groups and the defaults have one tensor as their rate."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": each.parameters()} for each in module]
    return module, optim.AdamW(groups, lr=rate)


@pytest.mark.parametrize("second", [0.5, 0.25])
def test_groups_that_share_a_rate(tmp_path: Path, second: float) -> None:
    """Each gets its own, as by torch's load_state_dict; where all are to have one value, the memory stays."""
    module, optimizer = two_groups(torch.tensor(0.5))
    for group, rate in zip(optimizer.param_groups, (0.25, second), strict=True):
        group["lr"] = torch.tensor(rate)
    training.save_state(tmp_path, module, optimizer)
    shared = torch.tensor(0.5)
    other, fresh = two_groups(shared)
    training.load_state(tmp_path, other, fresh)
    assert [float(group["lr"]) for group in fresh.param_groups] == [0.25, second]
    assert all((group["lr"] is shared) == (second == 0.25) for group in fresh.param_groups)
    assert float(fresh.defaults["lr"]) == 0.5


def test_parameters_that_share_state(tmp_path: Path) -> None:
    """Each gets what it had."""
    module = nn.Linear(2, 2, bias=True)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    for i, p in enumerate(module.parameters()):
        optimizer.state[p]["step"] = torch.tensor(float(i))
    training.save_state(tmp_path, module, optimizer)
    one = torch.tensor(5.0)
    for p in module.parameters():
        optimizer.state[p]["step"] = one
    training.load_state(tmp_path, module, optimizer)
    assert [float(optimizer.state[p]["step"]) for p in module.parameters()] == [0.0, 1.0]


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("where", ["option", "state"])
def test_strange_tensors_of_an_optimizer_are_made_anew(
    tmp_path: Path, kind: str, where: str
) -> None:
    """Nothing can be put into them, and nobody counts on their memory."""
    training.save_state(tmp_path, *stepped())
    module, optimizer = stepped(kind, where)
    training.load_state(tmp_path, module, optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    assert optimizer.state[module.first]["momentum_buffer"].tolist() == [1.0] * 4


def test_sparse_state_is_made_anew(tmp_path: Path) -> None:
    training.save_state(tmp_path, *stepped())
    module, optimizer = stepped()
    buffer = optimizer.state[module.first]["momentum_buffer"]
    optimizer.state[module.first]["momentum_buffer"] = buffer.to_sparse()
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.state[module.first]["momentum_buffer"].tolist() == [1.0] * 4


# Memory that several have


def two_parameters() -> tuple[nn.Module, optim.Optimizer]:
    """A module and an optimizer with moments that count."""
    module = nn.Linear(4, 1)
    optimizer = optim.SGD(module.parameters(), lr=torch.tensor(0.5), momentum=0.5, foreach=False)
    for i, parameter in enumerate(module.parameters()):
        moment = torch.arange(1.0, 1 + parameter.numel()).reshape(parameter.shape)
        optimizer.state[parameter]["momentum_buffer"] = moment * 10**i
    return module, optimizer


def overlap_states(module: Any, optimizer: Any) -> None:
    flat = torch.zeros(4)
    optimizer.state[module.weight]["momentum_buffer"] = flat.view(1, 4)
    optimizer.state[module.bias]["momentum_buffer"] = flat[2:3]


def lie_in_a_parameter(module: Any, optimizer: Any) -> None:
    state = optimizer.state[module.bias]
    state["momentum_buffer"] = module.weight.detach()[0, 1:2]


def lie_in_a_buffer(module: Any, optimizer: Any) -> None:
    module.register_buffer("more", torch.zeros(3))
    optimizer.state[module.bias]["momentum_buffer"] = module.more[1:2]


def lie_in_the_rate(module: Any, optimizer: Any) -> None:
    rate = optimizer.param_groups[0]["lr"]
    optimizer.state[module.bias]["momentum_buffer"] = rate.view(1)


def have_a_rate_in_a_parameter(module: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = module.weight.detach()[0, 3]


def have_a_rate_of_another_type(module: Any, optimizer: Any) -> None:
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["odd"] = rate.view(torch.int32)


def have_state_like_another_parameter(module: Any, optimizer: Any) -> None:
    optimizer.state[module.weight]["momentum_buffer"] = module.weight.detach()


MEETINGS = [
    overlap_states,
    lie_in_a_parameter,
    lie_in_a_buffer,
    lie_in_the_rate,
    have_a_rate_in_a_parameter,
    have_a_rate_of_another_type,
    have_state_like_another_parameter,
]


@pytest.mark.parametrize("arrange", MEETINGS)
def test_memory_that_meets(tmp_path: Path, arrange: Callable[[Any, Any], None]) -> None:
    """Nothing is restored over another: the module keeps its memory, the optimizer's is made anew."""
    source, first = two_parameters()
    if arrange is lie_in_a_buffer:
        source.register_buffer("more", torch.arange(3.0))
    if arrange is have_a_rate_of_another_type:
        first.param_groups[0]["odd"] = torch.tensor(7, dtype=torch.int32)
    training.save_state(tmp_path, source, first)
    wanted = values(source, first)
    module, optimizer = two_parameters()
    with torch.no_grad():
        module.weight.zero_()
    arrange(module, optimizer)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    training.load_state(tmp_path, module, optimizer)
    same(values(module, optimizer), wanted)
    assert before == {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("where", ["state", "option"])
def test_a_gradient_stays(tmp_path: Path, where: str) -> None:
    """Also one that the optimizer keeps as the last one it has seen."""
    module = nn.ParameterDict({"a": torch.ones(3)})
    optimizer = optim.SGD(module.parameters(), lr=0.1)

    def keep(value: float) -> None:
        module["a"].grad = torch.full((3,), value)
        kept: Any = optimizer.state[module["a"]] if where == "state" else optimizer.param_groups[0]
        kept["last"] = module["a"].grad

    keep(7.0)
    training.save_state(tmp_path, module, optimizer)
    keep(2.0)
    training.load_state(tmp_path, module, optimizer)
    kept = optimizer.state[module["a"]] if where == "state" else optimizer.param_groups[0]
    assert kept["last"].eq(7).all() and module["a"].grad.eq(2).all()


def test_memory_of_one_buffer_stays(tmp_path: Path) -> None:
    """Moments that are parts of one buffer, also interleaved, do not meet."""
    source, first = two_parameters()
    training.save_state(tmp_path, source, first)
    module, optimizer = two_parameters()
    flat = torch.zeros(8)
    held = [flat[::2].view(1, 4), flat[1:2]]
    for parameter, moment in zip(module.parameters(), held, strict=True):
        optimizer.state[parameter]["momentum_buffer"] = moment
    training.load_state(tmp_path, module, optimizer)
    for parameter, moment in zip(module.parameters(), held, strict=True):
        assert optimizer.state[parameter]["momentum_buffer"] is moment
    assert flat.tolist() == [1.0, 10.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0]


def test_groups_that_share_a_rate_in_two_types(tmp_path: Path) -> None:
    """Two tensors, which differ in what torch.equal can compare."""
    module, optimizer = two_groups(torch.tensor(0.5))
    training.save_state(tmp_path, module, optimizer)
    shared = torch.tensor([0.5])
    optimizer.param_groups[0]["lr"] = shared
    optimizer.param_groups[1]["lr"] = shared.view(torch.float16)[:1]
    training.load_state(tmp_path, module, optimizer)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]


def test_defaults_in_a_rate_stay(tmp_path: Path) -> None:
    """A part of what is filled is copied, too."""
    module = nn.Linear(2, 2)
    rates = torch.tensor([0.5, 0.25])
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["rates"] = rates.clone()
    training.save_state(tmp_path, module, optimizer)
    rates.zero_()
    optimizer.param_groups[0]["rates"] = rates
    optimizer.defaults["rate"] = rates[1]
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.param_groups[0]["rates"] is rates and rates.tolist() == [0.5, 0.25]
    assert float(optimizer.defaults["rate"]) == 0.0


def test_options_in_options_keep_their_memory(tmp_path: Path) -> None:
    """Tensors in a tuple, as those that stand alone; defaults stay as they are."""

    def made(*betas: float) -> tuple[nn.Module, optim.Optimizer]:
        module = small()
        tensors = tuple(torch.tensor(one) for one in betas)
        return module, optim.Adam(module.parameters(), lr=0.1, betas=tensors, capturable=True)

    training.save_state(tmp_path, *made(0.5, 0.75))
    module, optimizer = made(0.25, 0.125)
    held = optimizer.param_groups[0]["betas"]
    training.load_state(tmp_path, module, optimizer)
    found = optimizer.param_groups[0]["betas"]
    assert [one is other for one, other in zip(found, held, strict=True)] == [True, True]
    assert [one.item() for one in found] == [0.5, 0.75]
    assert [one.item() for one in optimizer.defaults["betas"]] == [0.25, 0.125]


class Betas(NamedTuple):
    first: Any
    second: float


class Pair(tuple[Any, ...]):
    """A tuple that takes its items one by one, and so is not made anew as tuples are."""

    def __new__(cls, first: Any, second: float) -> Pair:
        return super().__new__(cls, (first, second))


def with_option(value: object) -> tuple[nn.Sequential, optim.Optimizer]:
    """A module and an optimizer of torch, whose groups and defaults have one more option."""
    module = nn.Sequential(nn.Linear(5, 3))
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.defaults["betas"] = value
    optimizer.param_groups[0]["betas"] = value
    return module, optimizer


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("saved", [float, tensor])
@pytest.mark.parametrize("here", [float, tensor])
def test_options_that_are_named_tuples(
    tmp_path: Path, saved: Callable[[float], Any], here: Callable[[float], Any]
) -> None:
    """Stay named; what is a tensor here keeps its memory, and the defaults their values."""
    held = here(0.25)
    module, optimizer = with_option(Betas(saved(0.5), 0.75))
    train(module, optimizer, range(1))
    training.save_state(tmp_path, module, optimizer)
    other, restored = with_option(Betas(held, 0.125))
    training.load_state(tmp_path, other, restored)
    assert other[0].weight.equal(module[0].weight) and len(restored.state) == len(optimizer.state)
    found = restored.param_groups[0]["betas"]
    assert type(found) is Betas and (float(found.first), found.second) == (0.5, 0.75)
    assert (found.first is held) == isinstance(held, Tensor)
    default = restored.defaults["betas"]
    assert type(default) is Betas and (float(default.first), default.second) == (0.25, 0.125)


def test_an_option_that_cannot_be_restored(tmp_path: Path) -> None:
    """Is found before anything is."""
    module, optimizer = with_option((tensor(0.5), 0.75))
    train(module, optimizer, range(1))
    training.save_state(tmp_path, module, optimizer)
    other, restored = with_option(Pair(tensor(0.25), 0.125))
    before = other[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"could not match its state: TypeError: Pair\.__new"):
        training.load_state(tmp_path, other, restored)
    assert other[0].weight.equal(before) and not restored.state
    kept = restored.param_groups[0]["betas"]
    assert type(kept) is Pair and (float(kept[0]), kept[1]) == (0.25, 0.125)


def test_state_in_a_plain_dict(tmp_path: Path) -> None:
    """As some wrappers have it: nothing is there by asking."""
    training.save_state(tmp_path, *stepped())
    module, optimizer = stepped()
    optimizer.state = {}  # type: ignore[assignment]
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.state[module.first]["momentum_buffer"].tolist() == [1.0] * 4


@pytest.mark.parametrize("inside", [False, True])
def test_state_that_takes_no_values(tmp_path: Path, inside: bool) -> None:
    """Is found before anything is restored."""
    training.save_state(tmp_path, *stepped())
    module, optimizer = stepped()
    if inside:
        optimizer.state[module.first] = MappingProxyType(optimizer.state[module.first])
    else:
        optimizer.state = MappingProxyType(optimizer.state)  # type: ignore[assignment]
    with torch.no_grad():
        module.first.zero_()
    with pytest.raises(CheckpointError, match="SGD has state in a mappingproxy, not in a mutable"):
        training.load_state(tmp_path, module, optimizer)
    assert not module.first.any()
