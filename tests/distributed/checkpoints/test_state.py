"""What is saved of a module and its optimizer, and what is restored: every optimizer, ties, subsets, bytes, errors.

One process without a process group; `test_training` has the others.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from shardmath_torch.checkpoints import training
from shardmath_torch.checkpoints.checkpoint import save
from shardmath_torch.dtensors.modules import layout_of
from shardmath_torch.exports.export import export
from shardmath_torch.files.places import CheckpointError

Made = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads wait for each other longer than these sizes take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(seed: int = 0) -> nn.Module:
    """Matrices, vectors, buffers, and a parameter that is frozen."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    module[0].bias.requires_grad_(False)
    return module


def train(module: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 + step)
        module(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        module.zero_grad()


def values(
    module: nn.Module, optimizer: optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All that is to be the same, copied."""
    tensors, _ = training.state_of(module, optimizer)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {name: t.clone() for name, t in tensors.items()}, groups


def same(a: tuple[dict[str, Tensor], Any], b: tuple[dict[str, Tensor], Any]) -> None:
    assert a[0].keys() == b[0].keys() and a[1] == b[1]
    for name in a[0]:
        assert a[0][name].equal(b[0][name]) and a[0][name].dtype == b[0][name].dtype, name


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


def test_options_of_groups(tmp_path: Path) -> None:
    """All that JSON can say, and tuples; by parameter, where the groups are others."""
    module = small()
    odd = {
        "a": (1, (2.5, None)),
        "b": [float("inf"), {"c": True}],
        "d": "text",
        "e": torch.tensor([0.1, 2.0]),
    }
    groups = [
        {"params": [module[0].weight], "lr": 0.5, **odd},
        {"params": [module[2].weight, module[1].weight]},
    ]
    training.save_state(tmp_path, module, optim.SGD(groups, lr=0.25))
    split = [{"params": [module[i].weight]} for i in (1, 2, 0)]
    other = optim.SGD(split, lr=9.0)
    training.load_state(tmp_path, module, other)
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.25, 0.5]
    last = other.param_groups[2]
    assert {k: last[k] for k in "abd"} == {k: odd[k] for k in "abd"} and last["e"].equal(odd["e"])
    merged = optim.SGD([module[0].weight, module[1].weight, module[2].weight], lr=9.0)
    with pytest.raises(
        CheckpointError, match=r"0.weight and 1.weight are in one group .* differ in .*lr"
    ):
        training.load_state(tmp_path, module, merged)


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


# Shared parameters


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


def test_two_that_are_one_here(tmp_path: Path) -> None:
    training.save_state(tmp_path, Tied(False))
    with pytest.raises(
        CheckpointError,
        match=r"first.weight, last.weight are one parameter here, and 2 in the check",
    ):
        training.load_state(tmp_path, Tied(True))


# Extra states


class Scaled(nn.Module):
    """Has something besides tensors."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(
    "value", [b"", b"abc", bytearray(b"x"), None, io.BytesIO(b"file"), torch.arange(5).byte()]
)
def test_extra_states(tmp_path: Path, value: object) -> None:
    """They come back as what they were."""
    training.save_state(tmp_path, nn.Sequential(nn.Linear(1, 1), Scaled(value)))
    other = nn.Sequential(nn.Linear(1, 1), Scaled(b"other"))
    training.load_state(tmp_path, other)
    found = other[1].value
    plain = {
        io.BytesIO: lambda x: x.getvalue(),
        Tensor: lambda x: x.tolist(),
        bytearray: bytes,
    }.get(type(value), lambda x: x)
    assert isinstance(found, bytes if isinstance(value, bytearray) else type(value))
    assert plain(found) == plain(value)


# Names that do not meet


def test_other_names(tmp_path: Path) -> None:
    """Named, and nothing restored; or only what both have."""
    module, other = (
        small(),
        nn.Sequential(nn.Linear(5, 7), nn.Identity(), nn.Identity(), nn.Linear(2, 2)),
    )
    training.save_state(tmp_path, module, optim.Adam(module[2].parameters()))
    before, optimizer = other[0].weight.detach().clone(), optim.Adam(other.parameters())
    with pytest.raises(CheckpointError) as said:
        training.load_state(tmp_path, other, optimizer)
    for text in (
        "lacks model.3.weight, model.3.bias, optim.state.0.weight",
        "only the checkpoint has model.1.weight, model.1.bias, model.2.weight, model.1.run",
    ):
        assert text in str(said.value)
    assert "strict=False" in str(said.value) and other[0].weight.equal(before)
    found = training.load_state(tmp_path, other, optimizer, strict=False)
    assert other[0].weight.equal(module[0].weight) and not optimizer.state
    assert (
        found.missing[:2] == ("model.3.weight", "model.3.bias")
        and "model.2.weight" in found.unexpected
    )
    assert found.unexpected[-1] == "optim.state.2.weight"


def test_the_module_alone(tmp_path: Path) -> None:
    """Without an optimizer its state is not missed; with one that was not saved, it is."""
    module, other = small(), small(seed=1)
    training.save_state(tmp_path, module, optim.Adam(module.parameters()))
    assert training.load_state(tmp_path, other) == ((), ())
    assert other[0].weight.equal(module[0].weight)
    training.save_state(tmp_path, module)
    with pytest.raises(CheckpointError, match=r"lacks optim.state.0.weight"):
        training.load_state(tmp_path, other, optim.Adam(other.parameters()))


def test_names_of_wrappers(tmp_path: Path) -> None:
    """Those of torch.compile and activation checkpointing are left out."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module, other = small(), small(seed=1)
    other[0] = checkpoint_wrapper(other[0])
    training.save_state(tmp_path, module)
    training.load_state(tmp_path, torch.compile(other))
    assert other[0].weight.equal(module[0].weight)


# Errors


class Shaped(optim.SGD):
    """With a value in its state."""

    def __init__(self, module: nn.Module, value: object) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.state[module[0].weight]["odd"] = value


def hooked() -> nn.Module:
    """Its state dict has more than it should."""
    module = small()
    module.register_state_dict_post_hook(lambda module, state, *_: state.update(more=torch.ones(1)))
    return module


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "object": (
        lambda: training.state_of(nn.Sequential(Scaled({"a": 1}))),
        "'0._extra_state' is of type dict; return b",
    ),
    "floats": (
        lambda: training.state_of(nn.Sequential(Scaled(torch.ones(2)))),
        "return bytes, a BytesIO, or a 1-d",
    ),
    "hook": (
        lambda: training.state_of(hooked()),
        "'more' of the state dict is no parameter, buffer or extra state",
    ),
    "other": (
        lambda: training.state_of(small(), optim.SGD(small().parameters())),
        "none of the module's; make the opt",
    ),
    "value": (
        lambda: training.state_of(m := small(), Shaped(m, {1})),
        "'odd' of '0.weight' is {1}, which JSON cannot",
    ),
    "group": (
        lambda: training.state_of(m := small(), optim.SGD([{"params": m.parameters(), "x": len}])),
        "'x' of a par",
    ),
    "meta": (lambda: training.state_of(small().to("meta")), "'0.weight' is on the meta device"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    act, said = ERRORS[name]
    with pytest.raises(CheckpointError) as error:
        act()
    assert said in str(error.value)


def test_another_shape(tmp_path: Path) -> None:
    training.save_state(tmp_path, nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"model.weight.* is stored as float32\[2, 3\]"):
        training.load_state(tmp_path, nn.Linear(4, 2))


def test_another_checkpoint(tmp_path: Path) -> None:
    """One that is not of `save_state`, and one that only looks like it."""
    module, none = nn.Linear(3, 2), {"training": None}
    save(tmp_path, {"model.weight": module.weight}, {"model.weight": layout_of(module)["weight"]})
    with pytest.raises(
        CheckpointError,
        match="is nothing that save_state wrote; fill the module's weights with load_weights",
    ):
        training.load_state(tmp_path, module)
    for data in (b"{", b"[1]", b'{"names": {}}'):
        save(tmp_path, {"training": data}, none)
        with pytest.raises(CheckpointError, match="'training' is nothing that save_state wrote"):
            training.load_state(tmp_path, module)


class Looks(nn.Module):
    """Has names that look like those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.a_orig_mod, self.aweight = nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))


def test_names_that_only_look_like_wrappers(tmp_path: Path) -> None:
    module = Looks()
    assert set(training.state_of(module)[0]) == {
        "model.a_orig_mod.weight",
        "model.a_orig_mod.bias",
        "model.aweight",
        "training",
    }
    wanted = {name: p.detach().clone() for name, p in module.named_parameters()}
    training.save_state(tmp_path, module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    training.load_state(tmp_path, module)
    assert all(p.equal(wanted[name]) for name, p in module.named_parameters())


class Bytes(nn.Module):
    """Has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.state = b"before"

    def get_extra_state(self) -> bytes:
        return self.state

    def set_extra_state(self, state: bytes) -> None:
        self.state = state


def test_extra_state_of_a_compiled_module(tmp_path: Path) -> None:
    module = nn.ModuleDict({"one": torch.compile(Bytes())})
    training.save_state(tmp_path, module)
    module["one"]._orig_mod.state = b"after"
    training.load_state(tmp_path, module)
    assert module["one"]._orig_mod.state == b"before"


def test_keys_of_state_that_are_no_text() -> None:
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight] = {0: torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="has the key 0; keys are text"):
        training.state_of(module, optimizer)


def test_an_option_that_only_one_group_has(tmp_path: Path) -> None:
    """Is not given to parameters of the other."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    groups = [{"params": [module[0].weight], "initial_lr": 3.0}, {"params": [module[1].weight]}]
    training.save_state(tmp_path, module, optim.SGD(groups, lr=0.1))
    with pytest.raises(
        CheckpointError, match=r"0.weight and 1.weight are in one group .* differ in initial_lr"
    ):
        training.load_state(tmp_path, module, optim.SGD(module.parameters(), lr=0.1))


# Options that are tensors, memory that cannot be written to


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


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (0.5, torch.tensor(1)),
        (0.1, torch.tensor(0.1, dtype=torch.float16)),
        (1e300, torch.tensor(0.1)),
        (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1)),
        (torch.tensor([0.1, 0.2]), torch.tensor(0.1)),
    ],
    ids=str,
)
def test_a_rate_that_its_tensor_cannot_hold(tmp_path: Path, saved: Any, here: Tensor) -> None:
    """Nothing is rounded in silence, and nothing was restored."""
    module = small()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = saved
    training.save_state(tmp_path, module, optimizer)
    other = small(seed=1)
    second = optim.SGD(other.parameters(), lr=here.clone())
    before = values(other, second)
    with pytest.raises(CheckpointError, match="which cannot hold it; make the optimizer with"):
        training.load_state(tmp_path, other, second)
    same(values(other, second), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_becomes_a_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    """As `torch.tensor` makes one of it, in the memory that is there."""
    module = small()
    training.save_state(tmp_path, module, optim.SGD(module.parameters(), lr=0.1))
    rate = torch.tensor(7.0, dtype=dtype)
    optimizer = optim.SGD(module.parameters(), lr=rate)
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.equal(torch.tensor(0.1, dtype=dtype))


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


class Odd(nn.Module):
    """A parameter before another that cannot be written to."""

    def __init__(self, odd: Tensor, value: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), value))
        self.odd = nn.Parameter(odd, requires_grad=False)


def in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


def freed(count: int = 4) -> Tensor:
    out = torch.zeros(count)
    out.untyped_storage().resize_(0)
    return out


MEMORY = {
    "expanded": (lambda: torch.zeros(1).expand(4), r"'odd' has shape \(4,\) and strides \(0,\)"),
    "inference": (in_inference, "'odd' was made in inference mode"),
    "freed": (freed, "'odd' reaches 16 bytes into a storage of 0"),
}


@pytest.mark.parametrize("case", MEMORY)
@pytest.mark.parametrize("step", ["state", "weights"])
def test_memory_that_cannot_be_written_to(tmp_path: Path, case: str, step: str) -> None:
    """Said before anything is restored."""
    make, what = MEMORY[case]
    training.save_state(tmp_path / "state", Odd(torch.ones(4), 5.0))
    export(tmp_path / "weights", Odd(torch.ones(4), 5.0))
    module = Odd(make())
    load = training.load_state if step == "state" else training.load_weights
    with pytest.raises(CheckpointError, match=what):
        load(tmp_path / step, module)
    assert module.first.tolist() == [1.0] * 4


def test_memory_of_inference_mode_in_inference_mode(tmp_path: Path) -> None:
    """An engine's weights are made and loaded there."""
    export(tmp_path, Odd(torch.ones(4), 5.0))
    with torch.inference_mode():
        module = Odd(torch.zeros(4))
        training.load_weights(tmp_path, module)
    assert module.first.tolist() == [5.0] * 4


STRANGE: dict[str, Callable[[], Tensor]] = {
    "freed": lambda: freed(1),
    "inference": lambda: in_inference()[:1],
    "expanded": lambda: torch.ones(1).expand(3),
    "meta": lambda: torch.ones(1, device="meta"),
}


def stepped(kind: str | None = None, where: str = "") -> tuple[nn.Module, optim.Optimizer]:
    """A module and its optimizer after a step; of a strange tensor among its options or state."""
    module = Odd(torch.ones(4), 5.0)
    optimizer = optim.SGD([module.first], lr=0.5, momentum=0.5)
    module.first.sum().backward()
    optimizer.step()
    if kind is not None and where == "option":
        optimizer.param_groups[0]["lr"] = STRANGE[kind]()
    elif kind is not None:
        optimizer.state[module.first]["momentum_buffer"] = STRANGE[kind]()
    return module, optimizer


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((5,), "the module is 5; give a torch.nn.Module"),
        ((small(), 5), "the optimizer is 5; give one, several, or None"),
        ((small(), [5]), "an optimizer is 5, none of torch.optim; give"),
    ],
)
def test_what_is_no_module_or_optimizer(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        training.save_state(tmp_path, *given)


def test_nested_tensors(tmp_path: Path) -> None:
    """They have no shape."""
    module = nn.Module()
    module.register_buffer("w", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    for act in (training.save_state, export):
        with pytest.raises(CheckpointError, match="'w' is a nested tensor, of 2 parts"):
            act(tmp_path, module)
    with pytest.raises(CheckpointError, match="'w' is a nested tensor, of 2 parts"):
        export(tmp_path, {"w": module.w})
    with pytest.raises(CheckpointError, match="'w' is a nested tensor, which has no shape"):
        save(tmp_path, {"w": module.w}, {"w": layout_of(nn.Linear(1, 1))["weight"]})
