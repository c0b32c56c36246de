"""A loader is run several times: its runs write the same, are seen in every thread, and leave all as it was."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.tensors.refits.before import _TensorBefore
from shardmath_torch.tensors.refits.reads import Reads
from shardmath_torch.tensors.refits.threads import Followed

Given = dict[str, Tensor]
SHAPES = dict.fromkeys("qk", ((4, 3), "float32"))
BOTH = "views", "numbers"


def record(load: Callable[[Given], object], into: Any, **more: Any) -> sm.storage.Recorded:
    return smt.record(load, SHAPES, into, **more)


def make(device: str, *names: str) -> Given:
    return {name: torch.ones(4, 3, device=device) for name in names}


def mix(given: Given) -> Tensor:
    """What views do not explain."""
    return torch.cat([given["k"][:2], given["q"][2:]])


# Runs that differ


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_a_loader_that_loads_once(ways: Any) -> None:
    into = make("meta", "a")
    calls: list[int] = []

    def load(given: Given) -> None:
        calls.append(1)
        if len(calls) == 1:
            into["a"].copy_(mix(given))

    with pytest.raises(
        sm.StoreError, match="'a' is written in one run of the loader and not in another; record"
    ):
        record(load, into, ways=ways)


def test_a_part_that_is_loaded_once() -> None:
    into = make("meta", "a")
    calls: list[int] = []

    def load(given: Given) -> None:
        calls.append(1)
        if len(calls) == 1:
            into["a"][:1].copy_(given["q"][:1])
        into["a"][1:].copy_(mix(given)[1:])

    with pytest.raises(
        sm.StoreError, match="'a' is written in one run of the loader and not in another"
    ):
        record(load, into)


@pytest.mark.parametrize(
    ("first", "later", "fault"),
    [
        (lambda a, given: a.copy_(given["q"]), lambda a, given: None, "position 0 holds"),
        (
            lambda a, given: a.copy_(given["q"]),
            lambda a, given: a.copy_(given["k"]),
            "position 0 holds .*, where element 0 of 'q'",
        ),
        (
            lambda a, given: a[:2].copy_(given["q"][:2]),
            lambda a, given: a.copy_(given["q"]),
            "position 6 is written only if there are data",
        ),
        (
            lambda a, given: None,
            lambda a, given: a.copy_(given["q"]),
            "position 0 is written only if there are data",
        ),
    ],
)
def test_a_target_that_views_explain_and_numbers_do_not(
    first: Callable[[Tensor, Given], object], later: Callable[[Tensor, Given], object], fault: str
) -> None:
    """Another target is read from numbers, and then this one is looked at, too."""
    into = make("meta", "a", "b")
    calls: list[int] = []

    def load(given: Given) -> None:
        (later if calls else first)(into["a"], given)
        calls.append(1)
        into["b"].copy_(mix(given))

    with pytest.raises(
        sm.StoreError, match=f"'a' is loaded differently in two runs of the loader: {fault}"
    ):
        record(load, into)


def test_a_function_that_is_stored_once() -> None:
    into = make("meta", "a", "b")
    calls: list[int] = []

    def load(given: Given) -> None:
        if not calls:
            into["a"].copy_(-given["q"].exp())
        calls.append(1)
        into["b"].copy_(mix(given))

    with pytest.raises(
        sm.StoreError,
        match=r"'a' is loaded differently .*: it is written only if there are no data",
    ):
        record(load, into, functions={"a": "neg_exp"})


def test_constants_in_cells_that_nothing_else_writes_are_no_difference() -> None:
    into = make("meta", "a", "b")

    def load(given: Given) -> None:
        into["a"].normal_()
        into["a"][:2].copy_(given["q"][:2])
        into["b"].copy_(mix(given))

    assert record(load, into).unwritten == {"a": 6}


def test_a_loader_that_fails_without_data_and_loads_nothing_later() -> None:
    into = make("meta", "a")
    calls: list[int] = []

    def load(given: Given) -> None:
        calls.append(1)
        if len(calls) == 1:
            into["a"].copy_(given["q"] * given["q"].max().item())

    with pytest.raises(
        sm.StoreError, match=r"the loader raised Runtime.* on tensors without data, and wrote"
    ):
        record(load, into)


def test_a_loader_that_fails_and_has_a_function() -> None:
    into = make("meta", "a")

    def load(given: Given) -> None:
        into["a"].copy_(-torch.exp(given["v"]))

    said = r"functions= says .* 'neg_exp', but the loader raised KeyError: 'v' on tensors without"
    with pytest.raises(sm.StoreError, match=said) as caught:
        record(load, into, functions={"a": "neg_exp"})
    assert isinstance(caught.value.__cause__, KeyError)


def falls_back(a: Tensor, given: Given) -> None:
    try:
        assert given["q"].sum().item() is not None
        a.copy_(given["q"])
    except RuntimeError:
        a.copy_(given["k"])


def takes_arrays(a: Tensor, given: Given) -> None:
    try:
        a.copy_(torch.from_numpy(given["q"].numpy().copy()))
    except TypeError:
        a.copy_(given["k"])


def asks(a: Tensor, given: Given) -> None:
    a.copy_(given["k"] if given["q"].is_meta else given["q"])


@pytest.mark.parametrize("load", [falls_back, takes_arrays, asks])
def test_a_loader_that_does_otherwise_where_there_is_no_data(
    load: Callable[[Tensor, Given], object],
) -> None:
    into = make("meta", "a")
    found = record(lambda given: load(into["a"], given), into)
    assert {piece.tensor for piece in found.natives[0].pieces} == {"q"}


@pytest.mark.parametrize("form", ["mapping", "pairs"])
@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_a_loader_that_yields_what_it_has_loaded(form: Any, ways: Any) -> None:
    into = make("meta", "a", "b")

    def load(given: Any) -> Iterator[str]:
        named = given.items() if form == "mapping" else given
        for name, tensor in named:
            own = "a" if name == "q" else "b"
            into[own].copy_(tensor)
            yield own

    found = smt.record(load, SHAPES, into, form=form, ways=ways)
    assert not found.unwritten


def test_a_loader_that_is_not_waited_for() -> None:
    into = make("meta", "a")

    async def load(given: Given) -> None:
        into["a"].copy_(given["q"])

    made = load({})
    with pytest.raises(sm.StoreError, match=r"the loader returned a .* before it had loaded; pass"):
        record(lambda given: made, into)
    made.close()

    async def load_each(given: Given) -> AsyncIterator[str]:
        into["a"].copy_(given["q"])
        yield "q"

    with pytest.raises(sm.StoreError, match=r"the loader returned a .* before it had loaded; pass"):
        record(load_each, into)


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_targets_without_memory_for_a_run_are_put_back(ways: Any) -> None:
    """Of some targets there may be memory when there is none for the next."""
    into = {**make("meta", "a"), **make("cpu", "k"), "b": torch.empty(1 << 46, device="meta")}
    before = dict(into)
    with pytest.raises(RuntimeError, match="allocate"):
        record(lambda given: into["a"].copy_(mix(given)), into, ways=ways)
    assert all(into[name] is before[name] for name in before)
    assert (into["k"] == 1).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_targets_of_one_memory_without_data(device: str) -> None:
    """Cells of both are written by both."""
    flat = torch.ones(5, 3, device=device)
    into = {"a": flat[:4], "b": flat[1:].T}

    def load(given: Given) -> None:
        into["a"].copy_(given["q"])
        into["b"][:, 1:].copy_(given["k"][1:].T)

    found = record(load, into)
    arrays = {name: np.arange(12).reshape(4, 3) + 12 * (name == "k") for name in SHAPES}
    filled = found.fill(arrays)
    np.testing.assert_array_equal(filled["a"][:2], arrays["q"][:2])
    np.testing.assert_array_equal(filled["a"][2:], arrays["k"][1:3])
    np.testing.assert_array_equal(filled["b"][:, 1:], arrays["k"][1:].T)
    np.testing.assert_array_equal(filled["b"][:, 0], arrays["q"][1])


# Threads


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that were there before."""
    with ThreadPoolExecutor(2) as made:
        list(made.map(str, range(4)))
        yield made


Copy = Callable[[ThreadPoolExecutor, Tensor, Given], object]


def by_rows(pool: ThreadPoolExecutor, a: Tensor, given: Given) -> None:
    list(pool.map(lambda row: a.data[row].copy_(given["q"][row]), range(4)))


def of_views(pool: ThreadPoolExecutor, a: Tensor, given: Given) -> None:
    turned = given["q"].T
    list(pool.map(lambda column: a.data[:, column].copy_(turned[column]), range(3)))


def by_buffers(pool: ThreadPoolExecutor, a: Tensor, given: Given) -> None:
    def carry_out() -> None:
        buffer = torch.empty(4, 3, device=a.device)
        buffer[2:].copy_(given["q"][2:])
        buffer[:2] = given["k"][:2]
        a.data.copy_(buffer)

    pool.submit(carry_out).result()


def of_buffers(pool: ThreadPoolExecutor, a: Tensor, given: Given) -> None:
    buffer = torch.empty(4, 3, device=a.device)
    torch.cat([given["q"][:2], given["k"][2:]], out=buffer)
    pool.submit(lambda: a.data.copy_(buffer)).result()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("load", "way"),
    [(by_rows, "views"), (of_views, "views"), (by_buffers, "numbers"), (of_buffers, "numbers")],
)
def test_copies_by_threads_that_were_there_before(
    pool: ThreadPoolExecutor, load: Copy, way: str, device: str
) -> None:
    into = make(device, "a")
    found = record(lambda given: load(pool, into["a"], given), into)
    assert not found.unwritten
    assert found.natives[0].way == way
    numbers = record(lambda given: load(pool, into["a"], given), into, ways=("numbers",))
    arrays = {name: np.arange(12).reshape(4, 3) + 12 * (name == "k") for name in SHAPES}
    np.testing.assert_array_equal(found.fill(arrays)["a"], numbers.fill(arrays)["a"])


def test_copies_by_new_threads() -> None:
    into = make("meta", "a")

    def load(given: Given) -> None:
        with ThreadPoolExecutor(2) as made:
            by_rows(made, into["a"], given)

    assert record(load, into).natives[0].way == "views"


def test_copies_by_another_thread_that_nothing_says_before() -> None:
    """The buffer was filled before the loader ran, and torch counts the copy."""
    into = make("meta", "a")
    with ThreadPoolExecutor(1) as made:
        # Its thread is there before the recording, which follows only threads that the loader starts.
        made.submit(int).result()
        with pytest.raises(sm.StoreError, match="by another thread"):
            record(
                lambda _: made.submit(into["a"].copy_, torch.ones(4, 3, device="meta")).result(),
                into,
                ways=("views",),
            )


def test_threads_that_the_rest_of_the_program_starts() -> None:
    """They are not watched: without data, an operation between ranks would raise there."""
    into = make("cpu", "a")
    found: list[object] = []
    loads, looks = threading.Event(), threading.Event()

    def look() -> None:
        found.append(_get_current_dispatch_mode_stack())

    def start_another() -> None:
        loads.wait(30)
        other = threading.Thread(target=look)
        other.start()
        other.join(30)
        looks.set()

    def load(given: Given) -> None:
        loads.set()
        looks.wait(30)
        into["a"].copy_(given["q"])
        own = threading.Thread(target=look)
        own.start()
        own.join(30)

    beside = threading.Thread(target=start_another)
    beside.start()
    record(load, into)
    beside.join(30)
    others, *own = found
    assert others == [] and all(own)


def test_recordings_in_several_threads_end_in_any_order() -> None:
    start, profile = threading.Thread.start, threading.getprofile()
    second_began, first_ended = threading.Event(), threading.Event()

    first_into, second_into = make("meta", "a"), make("meta", "a")

    def load_first(given: Given) -> None:
        second_began.wait(30)
        first_into["a"].copy_(given["q"])

    def load_second(given: Given) -> None:
        second_began.set()
        first_ended.wait(30)
        second_into["a"].copy_(given["q"])

    def record_first() -> None:
        record(load_first, first_into)
        first_ended.set()

    threads = [threading.Thread(target=record_first)]
    threads.append(threading.Thread(target=record, args=(load_second, second_into)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert threading.Thread.start is start and threading.getprofile() is profile


def test_a_thread_that_stays_keeps_no_memory() -> None:
    """The loader's thread, such as one of a library's pool, still has its modes."""
    into = make("meta", "a")
    with ThreadPoolExecutor(1) as made:

        def load(given: Given) -> None:
            made.submit(into["a"].copy_, given["q"]).result()

        record(load, into, ways=("views",))
        *_, mode = made.submit(_get_current_dispatch_mode_stack).result()
        assert not mode.mode._alive and not mode.mode._contents


# Classes of logical tensors


def in_parts(into: Given, given: Given) -> None:
    largest, places = given["q"].max(0)
    assert largest.shape == places.shape == (3,)
    for own, part in zip(into["a"].split([1, 3]), given["q"].split([1, 3]), strict=True):
        own.copy_(part)


@pytest.mark.parametrize(
    "load",
    [
        in_parts,
        lambda into, given: into["a"].copy_(copy.deepcopy(given["q"])),
        lambda into, given: into.update(a=nn.Parameter(given["q"])),
    ],
)
def test_logical_tensors_go_through_what_plain_ones_do(
    load: Callable[[Given, Given], object],
) -> None:
    into = make("meta", "a")
    before = into["a"]
    assert not record(lambda given: load(into, given), into, ways=("views",)).unwritten
    assert into["a"] is before
    assert type(before) is Tensor


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_a_tensor_without_data_that_the_loader_has_kept(ways: Any) -> None:
    """What is written there in a run on numbers goes nowhere."""
    into = make("meta", "a", "b")
    kept = into["b"]

    def load(given: Given) -> None:
        assert torch.isfinite(given["q"]).any()
        into["a"].copy_(given["q"])
        kept[2:].copy_(given["k"][2:])

    with pytest.raises(sm.StoreError, match="'b' is written in a tensor that the loader has kept"):
        record(load, into, ways=ways)


def _gather_into_target(into: Given, given: Given) -> None:
    dist.all_gather([into["a"]], given["q"])


def _gather_into_blank(into: Given, given: Given) -> None:
    staged = torch.empty_like(into["a"]).zero_()
    dist.all_gather([staged], given["q"])
    into["a"].copy_(staged)


@pytest.mark.parametrize("gather", [_gather_into_target, _gather_into_blank])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_loader_receives(gather: Callable[[Given, Given], None], device: str) -> None:
    """torch's collectives do nothing without data, and do not say into what they write."""
    into = make(device, "a", "b")

    def load(given: Given) -> None:
        into["b"].copy_(given["k"])
        gather(into, given)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recorded = record(load, into)
    finally:
        dist.destroy_process_group()
    assert not recorded.unwritten
    assert [native.way for native in recorded.natives] == ["numbers", "numbers"]


# What is left


class Model(nn.Module):
    """A module that a loader may do anything to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.inner = nn.Linear(3, 3)
        self.register_buffer("hidden", torch.ones(4, 3), persistent=False)
        self.loaded: set[str] = set()


CHANGES: dict[str, Callable[[Model, Given], object]] = {
    "flags": lambda m, given: [setattr(m, "done", 1), m.loaded.add("q"), setattr(m.weight, "x", 1)],
    "a new parameter": lambda m, given: m.register_parameter("x", nn.Parameter(torch.ones(1))),
    "a new module": lambda m, given: m.add_module("x", nn.Linear(1, 1)),
    "another order": lambda m, given: m._parameters.setdefault(  # type: ignore[func-returns-value]
        "weight", m._parameters.pop("weight")
    ),
    "a frozen parameter": lambda m, given: m.weight.requires_grad_(False),
    "a gradient": lambda m, given: setattr(m.weight, "grad", torch.ones(4, 3)),
    "a hidden buffer": lambda m, given: m.hidden.copy_(torch.zeros(4, 3)),  # type: ignore[operator]
    "other memory": lambda m, given: setattr(m.weight, "data", torch.zeros(4, 3)),
    "a write past torch": lambda m, given: m.weight.detach().numpy().fill(3),
    "a hook": lambda m, given: m.register_forward_pre_hook(lambda *given: None),
    "another class": lambda m, given: setattr(
        m.weight, "__class__", type("X", (nn.Parameter,), {})
    ),
    "another class of the module": lambda m, given: setattr(
        m, "__class__", type("Y", (Model,), {})
    ),
}


def describe(model: Model) -> tuple[Any, ...]:
    own = {key: str(value) for key, value in vars(model).items()} | {"class": type(model)}
    tensors: list[Any] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        what = type(tensor), tensor.requires_grad, tensor.grad, tensor.stride(), vars(tensor).copy()
        tensors.append((name, id(tensor), tensor.data_ptr(), tensor.tolist(), what))
    return own, tensors


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_is_as_before(change: str, fails: bool, ways: Any) -> None:
    model = Model()
    before = describe(model)

    def load(given: Given) -> None:
        CHANGES[change](model, given)
        model.weight.copy_(mix(given))
        if fails:
            raise KeyError("no such layer")

    if fails:
        with pytest.raises(sm.StoreError, match=r"the loader raised KeyError: .*no such layer"):
            record(load, model, ways=ways)
    else:
        assert set(record(load, model, ways=ways).unwritten) == {"inner.weight", "inner.bias"}
    assert describe(model) == before


SWAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda loaded: loaded.to_sparse(),
    "wrapper": lambda loaded: TwoTensor(loaded, loaded),
}


def _swap(weight: Tensor, given: Given, kind: str) -> None:
    loaded = given["q"].as_subclass(Tensor).clone()
    torch.utils.swap_tensors(weight, nn.Parameter(SWAPPED[kind](loaded)))


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
@pytest.mark.parametrize("kind", SWAPPED)
def test_a_tensor_of_another_kind_is_swapped_back(kind: str, ways: Any) -> None:
    model = Model()
    before = describe(model)
    with pytest.raises(sm.StoreError, match=r"made 'weight' a .*, where a plain tensor is needed"):
        record(lambda given: _swap(model.weight, given, kind), model, ways=ways)
    assert describe(model) == before


def test_all_is_restored_but_what_cannot_be() -> None:
    """A tensor with a weak reference to it is not swapped."""
    model = Model()
    held: list[Any] = []

    def load(given: Given) -> None:
        model.inner.weight.data.zero_()
        model.loaded.add("q")
        _swap(model.weight, given, "sparse")
        held.append(weakref.ref(model.weight))

    before = model.inner.weight.detach().clone()
    what = r"what the loader did to 'weight' \(RuntimeError: .*weakref.*\) cannot be undone; build"
    with pytest.raises(sm.StoreError, match=what):
        record(load, model)
    assert torch.equal(model.inner.weight, before) and not model.loaded


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
def test_an_interrupt_while_all_is_restored(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = describe(model)
    put_back = _TensorBefore.put_back
    calls = 0

    def interrupted(tensor: _TensorBefore) -> None:
        nonlocal calls
        calls += 1
        # Twice, as by a user who has no patience.
        if calls in (2, 3):
            raise KeyboardInterrupt
        put_back(tensor)

    monkeypatch.setattr(_TensorBefore, "put_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(lambda given: model.weight.data.zero_(), model, ways=ways)
    assert describe(model) == before


def test_flags_of_targets_and_modules_are_taken_back_before_the_next_run() -> None:
    model = Model()

    def load(given: Given) -> None:
        if not hasattr(model.weight, "loaded") and "weight" not in model.loaded:
            model.weight.loaded = True  # type: ignore[attr-defined]
            model.loaded.add("weight")
            model.weight.copy_(mix(given))

    assert record(load, model).natives[0].way == "numbers"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mapping_is_as_before(device: str) -> None:
    into = make(device, "a", "b")
    kept = dict(into)

    def load(given: Given) -> None:
        into["c"] = given["q"]
        into["b"] = into.pop("b")
        into["a"] = mix(given)

    assert record(load, into).unwritten == {"b": 12}
    assert list(into) == ["a", "b"]
    assert all(into[name] is kept[name] for name in into)


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_that_a_loader_changes_in_place(device: str, ways: Any) -> None:
    into = {"a": torch.ones(3, 4, device=device)}

    def load(given: Given) -> None:
        into["a"].t_()
        into["a"].copy_(given["q"])

    with pytest.raises(sm.StoreError, match="the loader changed the shape of 'a'"):
        record(load, into, ways=ways)
    assert (into["a"].shape, into["a"].stride()) == ((3, 4), (4, 1))


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_memory_of_another_shape(ways: Any) -> None:
    into = make("cpu", "a")

    def load(given: Given) -> None:
        into["a"].data = given["q"][:2].clone()

    with pytest.raises(sm.StoreError, match=r"the shape of 'a' from \[4, 3\] to \[2, 3\]; put"):
        record(load, into, ways=ways)
    assert into["a"].tolist() == torch.ones(4, 3).tolist()


def test_bytes_around_targets() -> None:
    """Memory that no target has, of which a target is a view."""
    flat = torch.ones(20)
    into = {"a": flat[:12].view(4, 3)}

    def load(given: Given) -> None:
        flat[12:].fill_(3)
        into["a"].copy_(mix(given))

    record(load, into)
    assert flat.tolist() == [1] * 20


def test_what_is_written_past_torch_is_read_from_numbers() -> None:
    into = make("cpu", "a")
    array = into["a"].numpy()

    def load(given: Given) -> None:
        into["a"].copy_(given["q"])
        array[2:] = 0

    assert record(load, into).unwritten == {"a": 6}
    with pytest.raises(
        sm.StoreError, match="copies into 'a' could not be followed: it is computed by a write past"
    ):
        record(load, into, ways=("views",))


# Arguments


@pytest.mark.parametrize("function", ["", None, "a b", torch.exp, 3])
def test_a_function_is_a_name(function: Any) -> None:
    """No name would say that what is computed is a copy."""
    into = make("meta", "a")
    with pytest.raises(
        sm.StoreError, match=r"for 'a', where the name of a function is needed; write 'neg_exp', or"
    ):
        record(lambda given: into["a"].copy_(given["q"].exp()), into, functions={"a": function})


def test_a_function_of_what_is_not_a_target() -> None:
    into = make("meta", *"abcdefghij")
    into["tied"] = into["b"]
    with pytest.raises(
        sm.StoreError, match=r"'x', but the tensors of into= are a, .*, h and 2 more; use"
    ):
        record(lambda given: None, into, functions={"x": "neg_exp"})
    with pytest.raises(
        sm.StoreError, match="'tied', but that is another name for the memory of 'b'; name 'b'"
    ):
        record(lambda given: None, into, functions={"tied": "neg_exp"})


@pytest.mark.parametrize(
    "more", [{"form": "dict"}, {"ways": ("view",)}, {"ways": "number"}, {"ways": ()}]
)
def test_words_that_are_not_known(more: dict[str, Any]) -> None:
    (what,) = more
    into = make("meta", "a")
    with pytest.raises(sm.StoreError, match=rf"{what}=.* is unknown; pass '\w+' or '\w+'"):
        record(lambda given: into["a"].copy_(given["q"]), into, **more)


def _read_list(into: dict[str, Tensor], given: Given) -> None:
    into["map"].copy_(given["map"])
    for i, expert in enumerate(into["map"].tolist()):
        into["x"][i].copy_(given["a"][expert])


def _read_memory(into: dict[str, Tensor], given: Given) -> None:
    into["s"].copy_(given["s"])
    into["y"].numpy()[:] = into["s"].numpy()


def _fill_by_item(into: dict[str, Tensor], given: Given) -> None:
    into["x"].copy_(given["a"])
    into["y"].fill_(into["x"].max().item())


def _go_by_any(into: dict[str, Tensor], given: Given) -> None:
    into["x"].copy_(given["a"])
    if into["x"].any():
        into["y"].copy_(given["s"])


def _fill_by_choice(into: dict[str, Tensor], given: Given) -> None:
    into["x"].copy_(given["a"])
    into["y"].fill_(1.0 if into["x"].max() == 0 else 2.0)


@pytest.mark.parametrize(
    "act", [_read_list, _read_memory, _fill_by_item, _go_by_any, _fill_by_choice]
)
def test_a_loader_that_reads_what_it_has_loaded(act: Callable[..., None]) -> None:
    """Is not taken at its word without data, where nothing is written: it is right by numbers, or an error."""
    shapes = {"s": ((4,), "float32"), "map": ((4,), "int64"), "a": ((4, 4), "float32")}

    def make() -> dict[str, Tensor]:
        zeros = {"s": torch.zeros(4), "y": torch.zeros(4), "x": torch.zeros(4, 4)}
        return {**zeros, "map": torch.arange(4)}

    into = make()
    data = {
        "s": torch.full((4,), 3.0),
        "map": torch.tensor([3, 2, 1, 0]),
        "a": torch.arange(16.0).view(4, 4),
    }
    try:
        recorded = smt.record(lambda given: act(into, given), shapes, into)
    except (sm.StoreError, IndexError):
        recorded = None
    before = make()
    assert all(torch.equal(into[name], before[name]) for name in into)
    if recorded is not None:
        act(before, data)
        filled = recorded.fill({name: tensor.numpy() for name, tensor in data.items()})
        for native in recorded.natives:
            if not torch.equal(before[native.name], make()[native.name]):
                assert filled[native.name].tolist() == before[native.name].tolist()


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda s: s.item() > 0.001,
    "bool": lambda s: (s > 0.001).all(),
    "nonzero": lambda s: len((s > 0.001).nonzero()),
    "mask": lambda s: len(s[s > 0.001]),
    "list": lambda s: s.tolist()[0] > 0.001,
    "numpy": lambda s: s.clone().numpy()[0] > 0.001,
    "array": lambda s: np.asarray(s)[0] > 0.001,
    "dlpack": lambda s: np.from_dlpack(s)[0] > 0.001,
}


@pytest.mark.parametrize("of", ["loaded", "filled"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_loader_that_compares_what_it_has_loaded(
    read: Callable[[Tensor], object], of: str
) -> None:
    """Without data a comparison would come out as for the value before, however that is changed a little."""
    into = {"s": torch.zeros(1), "a": torch.zeros(4, 3)}
    shapes = SHAPES | {"s": ((1,), "float32")}

    def load(given: Given) -> None:
        if of == "loaded":
            into["s"].copy_(given["s"])
        else:
            into["s"].fill_(0.5)
        into["a"].copy_(given["k"] if read(into["s"]) else given["q"])

    with pytest.raises(sm.StoreError, match="is computed"):
        smt.record(load, shapes, into)
    assert not any(target.any() for target in into.values())


FOUND: dict[str, tuple[Tensor, Callable[[Tensor], object]]] = {
    "flag": (torch.tensor([1]), lambda own: own.item() == 1),
    "unset": (torch.tensor([0.0]), lambda own: own.item() == 0),
    "truth": (torch.tensor([True, False]), lambda own: own.tolist() == [True, False]),
    "sign": (torch.tensor([-1.0]), lambda own: own.item() < 0),
    "nan": (torch.tensor([float("nan")]), lambda own: own.isnan().all()),
    "map": (torch.tensor([-1, 0, -1]), lambda own: own.tolist().count(-1) == 2),
    "order": (torch.tensor([2.0, 0.0, 1.0]), lambda own: own.argsort().tolist() == [1, 2, 0]),
    "map_": (torch.tensor([5.0]), lambda own: own.new_zeros(1).map_(own, max).item() == 5),
    "part of memory": (torch.tensor([7, 1])[1:], lambda own: own.item() == 1),
}


def load_by(own: Callable[[], Tensor], found: Callable[[Tensor], object], a: Tensor) -> Any:
    """A loader that goes by what it finds in a target, after a look at what it loads."""

    def load(given: Given) -> None:
        assert given["q"].sum().item() != 0.125
        a.copy_(given["q"] if found(own()) else given["k"])

    return load


@pytest.mark.parametrize("case", FOUND)
def test_a_loader_reads_a_target_that_it_does_not_write(case: str) -> None:
    """It has the value that it had before, in every run."""
    own, found = FOUND[case]
    into = {"own": own.clone(), "a": torch.zeros(4, 3)}
    recorded = record(load_by(lambda: into["own"], found, into["a"]), into)
    assert recorded.unwritten == {"own": own.numel()}
    assert [piece.tensor for piece in recorded.natives[1].pieces] == ["q"]


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_a_loader_reads_a_target_that_has_no_data(case: str, ways: Any) -> None:
    """What it would find there is no value of the engine's."""
    own, found = FOUND[case]
    into = {"own": torch.empty_like(own, device="meta"), "a": torch.zeros(4, 3)}
    load = load_by(lambda: into["own"], found, into["a"])
    with pytest.raises(sm.StoreError, match="'own' is read by the loader, and has no data"):
        record(load, into, ways=ways)


@pytest.mark.parametrize("before", [0.0, 1.0, float("nan"), -5.0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_a_loader_loads_only_what_is_not_loaded(before: float, device: str, ways: Any) -> None:
    """As for a weight that several names of a checkpoint may bring: what is loaded once is never loaded again."""
    into = {"a": torch.full((4, 3), before, device=device), "b": torch.zeros(4, 3, device=device)}

    def load(given: Given) -> None:
        into["b"].copy_(given["k"])
        is_new = into["a"].isnan() if before != before else into["a"] == before
        if is_new.all():
            into["a"].copy_(given["q"])

    what = "'a' is written in one run of the loader and not in another|'a' is read by the loader, and has no data"
    with pytest.raises(sm.StoreError, match=what):
        record(load, into, ways=ways)


def test_a_map_without_data_is_named_if_a_loader_fails_on_it() -> None:
    into = {"places": torch.empty(4, dtype=torch.int64, device="meta"), "a": torch.zeros(4, 3)}

    def load(given: Given) -> None:
        into["a"][into["places"]] = given["q"]

    with pytest.raises(sm.StoreError, match=r"IndexError.*; 'places' is read by the loader"):
        record(load, into)


def test_a_target_without_data_that_a_new_thread_reads() -> None:
    into = {"flag": torch.zeros(1, device="meta"), "a": torch.empty(4, 3, device="meta")}

    def load(given: Given) -> None:
        with ThreadPoolExecutor(2) as made:
            if made.submit(lambda: into["flag"].view(1, 1).numpy().any()).result():
                return
            made.submit(lambda: into["a"].copy_(mix(given))).result()

    with pytest.raises(sm.StoreError, match="'flag' is read by the loader, and has no data"):
        record(load, into, ways=("numbers",))


def test_memory_that_a_target_gives_up_is_not_taken_for_it() -> None:
    into = {"flag": torch.ones(4)}
    with Reads(into) as reads:
        into["flag"].data = torch.ones(8)
        # As there are many, new tensors would lie where the target lay.
        for tensor in [torch.ones(4) for _ in range(100)]:
            tensor.max()
    assert reads.names == set()


def test_a_target_of_which_only_the_shape_is_read() -> None:
    into = {"own": torch.empty(4, 3, device="meta"), "a": torch.zeros(4, 3)}

    def load(given: Given) -> None:
        staged = torch.empty_like(into["own"].view(4, 3), device="cpu")
        staged.copy_(mix(given).cpu())
        into["a"].copy_(staged)

    assert record(load, into).unwritten == {"own": 12}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float8_e4m3fn", "float32", "complex64"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_value_that_a_target_had_is_loaded_again(dtype: str, device: str) -> None:
    """In some runs an element of few values is what the target had; it is written all the same."""
    shapes: Any = {"q": ((1,), dtype)}
    for value in (0, 1):
        into = {"a": torch.full((1,), value).to(getattr(torch, dtype)).to(device)}
        for cat in (torch.cat, lambda parts: parts[0]):
            recorded = smt.record(
                lambda given, cat=cat, into=into: into["a"].copy_(cat([given["q"]])),
                shapes,
                into,
                ways=("numbers",),
            )
            assert not recorded.unwritten


@pytest.mark.parametrize("ways", [("views", "numbers"), ("numbers",)])
def test_a_rank_without_targets_may_have_a_loader_that_fails(ways: Any) -> None:
    """As a stage without weights, whose loader has no place for any tensor."""
    into: dict[str, Tensor] = {}

    def load(given: Given) -> None:
        for name, tensor in given.items():
            into[name].copy_(tensor)

    assert record(load, into, ways=ways).natives == ()


def test_others_replace_the_start_of_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose wrapper is taken away during a recording, and one whose wrapper comes after it and calls ours."""
    real = threading.Thread.start
    begun: list[str] = []

    def follow() -> Followed:
        return Followed(lambda: begun.append("begun"))

    def run() -> None:
        thread = threading.Thread(target=begun.append, args=("target",))
        thread.start()
        thread.join()

    monkeypatch.setattr(threading.Thread, "start", lambda thread: real(thread))
    with follow():
        ours = threading.Thread.start
        threading.Thread.start = real  # type: ignore[method-assign]
    with follow():
        run()
    assert begun == ["begun", "target"]
    threading.Thread.start = lambda thread: ours(thread)  # type: ignore[method-assign]
    with follow():
        run()
    run()
    assert begun == ["begun", "target", "begun", "target", "target"]
