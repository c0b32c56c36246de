"""What of a checkpoint is whose: names, and options of groups."""

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
from tests.distributed.states.test_restoring import Tied
from tests.distributed.tasks import training as work
from tests.distributed.tasks.states import same, small, values


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


def test_two_that_are_one_here(tmp_path: Path) -> None:
    training.save_state(tmp_path, Tied(False))
    with pytest.raises(
        CheckpointError,
        match=r"first.weight, last.weight are one parameter here, but 2 in the check",
    ):
        training.load_state(tmp_path, Tied(True))


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


def test_an_option_that_only_one_group_has(tmp_path: Path) -> None:
    """Is not given to parameters of the other."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    groups = [{"params": [module[0].weight], "initial_lr": 3.0}, {"params": [module[1].weight]}]
    training.save_state(tmp_path, module, optim.SGD(groups, lr=0.1))
    with pytest.raises(
        CheckpointError, match=r"0.weight and 1.weight are in one group .* differ in initial_lr"
    ):
        training.load_state(tmp_path, module, optim.SGD(module.parameters(), lr=0.1))


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


@pytest.mark.parametrize("kind", ["enum", "namedtuple"])
def test_options_of_a_class_on_meshes_apart(pool: Pool, tmp_path: Path, kind: str) -> None:
    """A rank has only its own stage's parameters, and no value of the class for the others'."""
    assert pool.run(work.share_on_stages, str(tmp_path), kind) == [(False, True)] * 8


def test_another_shape(tmp_path: Path) -> None:
    training.save_state(tmp_path, nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"model.weight.* is stored as float32\[2, 3\]"):
        training.load_state(tmp_path, nn.Linear(4, 2))


def test_a_number_that_no_tensor_holds(tmp_path: Path) -> None:
    """Said as of other numbers that the tensor here would change."""
    module = small()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = 10**30
    training.save_state(tmp_path, module, optimizer)
    optimizer.param_groups[0]["odd"] = torch.tensor(1)
    with pytest.raises(CheckpointError, match=r"'odd' of the group of 0.weight is 10{30} in the"):
        training.load_state(tmp_path, module, optimizer)


def test_groups_that_were_one_have_options_of_their_own(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    one = optim.SGD(module.parameters(), lr=0.1)
    one.param_groups[0]["rates"] = [torch.tensor(0.5)]
    training.save_state(tmp_path, module, one)
    two = optim.SGD([{"params": [p]} for p in module.parameters()], lr=0.1)
    training.load_state(tmp_path, module, two)
    first, second = (group["rates"] for group in two.param_groups)
    assert first == second and first is not second and first[0] is not second[0]


def test_options_that_are_dicts_in_another_order(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    groups = [
        {"params": [module.weight], "odd": {"a": 1, "b": {"c": 2, "d": 3}}},
        {"params": [module.bias], "odd": {"b": {"d": 3, "c": 2}, "a": 1}},
    ]
    training.save_state(tmp_path, module, optim.SGD(groups, lr=0.1))
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    training.load_state(tmp_path, module, optimizer)
    assert optimizer.param_groups[0]["odd"] == groups[0]["odd"]


@pytest.mark.parametrize("order", ["cba", "acb", "ab"])
def test_an_option_with_an_item_per_parameter_is_for_the_same_group(
    tmp_path: Path, order: str
) -> None:
    """As torch's load_state_dict keeps each item with the parameter in its place."""
    module = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
    one = optim.SGD([module[name] for name in "abc"], lr=0.1)
    one.param_groups[0]["names"] = ["a", "b", "c"]
    training.save_state(tmp_path, module, one)
    same_order = optim.SGD([module[name] for name in "abc"], lr=0.1)
    training.load_state(tmp_path, module, same_order)
    assert same_order.param_groups[0]["names"] == ["a", "b", "c"]
    other = optim.SGD([module[name] for name in order], lr=0.2)
    other.param_groups[0]["names"] = list(order)
    with pytest.raises(
        CheckpointError,
        match=r"'names' is \['a', 'b', 'c'\] in .* each of a, b, c, but the group has",
    ) as error:
        training.load_state(tmp_path, module, other, strict=False)
    assert f"the group has {', '.join(order)} here" in str(error.value)
    assert other.param_groups[0]["lr"] == 0.2
    other.param_groups[0]["names"] = ["a", "b", "c"]
    training.load_state(tmp_path, module, other, strict=False)
    assert other.param_groups[0]["lr"] == 0.1


def rows(values: list[float]) -> Tensor:
    """A row of two numbers for each value."""
    return torch.tensor(values)[:, None].repeat(1, 2)


@pytest.mark.parametrize("kind", [tuple, torch.tensor, rows])
def test_a_tuple_or_tensor_with_an_item_per_parameter_is_for_the_same_group(
    tmp_path: Path, kind: Callable[[list[float]], Any]
) -> None:
    def made(order: str, weights: list[float]) -> optim.Optimizer:
        group = {"params": [module[name] for name in order], "weights": kind(weights)}
        return optim.SGD([group], lr=0.1)

    module = nn.ParameterDict({name: torch.ones(2) for name in "ab"})
    wanted = torch.as_tensor(kind([1.0, 10.0]))
    training.save_state(tmp_path, module, made("ab", [1.0, 10.0]))
    for order, weights in (("ab", [0.0, 0.0]), ("ba", [1.0, 10.0])):
        into = made(order, weights)
        training.load_state(tmp_path, module, into)
        assert torch.equal(torch.as_tensor(into.param_groups[0]["weights"]), wanted)
    with pytest.raises(CheckpointError, match=r"'weights' is .* maybe an item for each of a, b"):
        training.load_state(tmp_path, module, made("ba", [10.0, 1.0]))


def test_a_pair_of_a_group_on_two_meshes_is_for_the_same_group(pool: Pool, tmp_path: Path) -> None:
    """It is saved as two groups, of two parameters each, which have not an item each."""
    assert pool.run(work.pairs_on_stages, str(tmp_path)) == [[True, True]] * 8


def test_items_of_a_group_on_two_meshes_are_for_the_same_group(pool: Pool, tmp_path: Path) -> None:
    """Of the whole group, as it was saved, not of the parts that are on one mesh."""
    for same_order, (kind, said), same_items in pool.run(work.items_on_stages, str(tmp_path)):
        assert same_order and same_items
        assert kind == "CheckpointError" and "maybe an item for each of" in said, said


def test_an_option_of_a_class_is_for_any_group(tmp_path: Path) -> None:
    """It has one item, and is stored as two: a class and a value."""
    module = nn.ParameterDict({name: torch.ones(2) for name in "ab"})
    groups = [{"params": [*module.values()], "kind": work.Kind.PLAIN}]
    training.save_state(tmp_path, module, optim.SGD(groups, lr=0.1))
    swapped = [{"params": [*module.values()][::-1], "kind": work.Kind.NESTEROV}]
    into = optim.SGD(swapped, lr=0.1)
    training.load_state(tmp_path, module, into)
    assert into.param_groups[0]["kind"] is work.Kind.PLAIN


def test_a_tuple_of_the_defaults_is_for_any_group(tmp_path: Path) -> None:
    """Two betas of two parameters are not one of each."""
    module = nn.ParameterDict({name: torch.ones(2) for name in "ab"})
    optimizer = optim.Adam([module["a"], module["b"]], betas=(0.5, 0.75))
    training.save_state(tmp_path, module, optimizer)
    for groups in ("ba", "a", "b"):
        into = optim.Adam([module[name] for name in groups])
        training.load_state(tmp_path, module, into, strict=False)
        assert into.param_groups[0]["betas"] == (0.5, 0.75)


def test_a_group_without_parameters_has_the_options_of_the_one_in_its_place(
    tmp_path: Path,
) -> None:
    """As in torch's load_state_dict; if groups are others, it keeps its options."""

    def made(rate: float, *, last: bool) -> optim.Optimizer:
        empty: dict[str, Any] = {"params": [], "lr": rate}
        groups = [{"params": list(module.parameters())}, empty]
        return optim.SGD(groups if last else groups[::-1], lr=0.1)

    module = nn.Linear(2, 2)
    saved = made(0.5, last=True)
    saved.param_groups[1]["initial_lr"] = 0.75
    training.save_state(tmp_path, module, saved)
    other = made(9.0, last=True)
    training.load_state(tmp_path, module, other)
    assert other.param_groups[1] == saved.param_groups[1]
    before = made(9.0, last=False)
    training.load_state(tmp_path, module, before)
    assert before.param_groups[0]["lr"] == 9.0


class Shared(optim.SGD):
    """Keeps some state under the first parameter that has a gradient, or under each."""

    def __init__(self, parameters: Any, make: Callable[[list[Tensor]], object], each: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.make, self.each = make, each

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        parameters = self.param_groups[0]["params"]
        for i, parameter in enumerate(parameters):
            if self.each or i == 0:
                self.state[parameter]["odd"] = self.make(parameters[i:])


OF_GROUP: dict[str, tuple[Callable[[list[Tensor]], object], str]] = {
    "flat": (lambda p: torch.cat([one.flatten() for one in p]), r"'odd' has shape \(32,\)"),
    "flat, in a list": (lambda p: [(torch.cat([one.flatten() for one in p]),)], r"shape \(32,\)"),
    "one of each": (lambda p: torch.stack([one.norm() for one in p] * 2), r"shape \(6,\)"),
    "number": (lambda p: 3, "its 'odd' is a number, and no other parameter of the group"),
    "scalar": (lambda p: torch.tensor(3), "'odd' is a number"),
}
OWN: dict[str, Callable[[list[Tensor]], object]] = {
    "rows": lambda p: p[0].flatten(1).sum(1) if p[0].ndim > 1 else p[0].clone(),
    "preconditioners": lambda p: [torch.eye(size) for size in p[0].shape],
    "flat": lambda p: p[0].detach().clone().flatten(),
    "number": lambda p: 3,
}


def grouped(order: str, make: Any, each: bool) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.ParameterDict({"a": torch.ones(3, 5), "b": torch.ones(5), "c": torch.ones(3, 4)})
    return module, Shared([module[name] for name in order], make, each)


def stepped_group(order: str, make: Any, each: bool) -> tuple[nn.Module, optim.Optimizer]:
    module, optimizer = grouped(order, make, each)
    sum(parameter.square().sum() for parameter in module.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("case", OF_GROUP)
def test_state_of_a_group_is_for_a_group_in_the_same_order(tmp_path: Path, case: str) -> None:
    """As LBFGS has one history of all parameters under the first: read by others, it is another history."""
    make, said = OF_GROUP[case]
    module, optimizer = stepped_group("abc", make, False)
    training.save_state(tmp_path, module, optimizer)
    same_order = grouped("abc", make, False)
    training.load_state(tmp_path, *same_order)
    same(values(*same_order), values(module, optimizer))
    for order in ("cba", "acb", "ab"):
        other, second = grouped(order, make, False)
        with pytest.raises(CheckpointError, match=said) as error:
            training.load_state(tmp_path, other, second, strict=False)
        assert f"a, b, c in the checkpoint, but {', '.join(order)} here" in str(error.value)
        assert not second.state and other["a"].eq(1).all()


@pytest.mark.parametrize("case", OWN)
def test_state_of_a_parameter_is_for_any_group(tmp_path: Path, case: str) -> None:
    """Vectors and matrices of its own sizes, as Adafactor and Shampoo have, are the parameter's."""
    module, optimizer = stepped_group("abc", OWN[case], True)
    training.save_state(tmp_path, module, optimizer)
    other, second = grouped("cab", OWN[case], True)
    training.load_state(tmp_path, other, second)
    for name in "abc":
        assert str(second.state[other[name]]) == str(optimizer.state[module[name]])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)])
def test_lbfgs(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Goes on as without a break, or is an error."""

    def made(order: tuple[int, ...]) -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        parameters = list(module.parameters())
        return module, optim.LBFGS([parameters[i] for i in order], lr=0.2, max_iter=2)

    def go_on(module: nn.Module, optimizer: optim.Optimizer) -> list[float]:
        def closure() -> float:
            optimizer.zero_grad()
            loss = (module(inputs) - torch.sin(3 * inputs)).square().mean()
            loss.backward()
            return loss.item()

        return [optimizer.step(closure) for _ in range(4)]  # type: ignore[arg-type, misc]

    inputs = torch.arange(12.0).view(3, 4) / 7
    module, optimizer = made((0, 1, 2, 3))
    go_on(module, optimizer)
    training.save_state(tmp_path, module, optimizer)
    other = made(order)
    if order == (0, 1, 2, 3):
        training.load_state(tmp_path, *other)
        assert go_on(*other) == go_on(module, optimizer)
    else:
        with pytest.raises(CheckpointError, match=r"the group has 0.weight, 0.bias, 2.weight, 2.b"):
            training.load_state(tmp_path, *other)
