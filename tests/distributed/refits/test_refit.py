"""Refits over gloo: a trainer's own tensors become an engine's own, in place, step after step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from shardmath.storage import Stored, bind, parse
from shardmath_torch.tensors.refits.holders import find_owners, find_removed, watch
from shardmath_torch.tensors.refits.views import bind_views
from tests.distributed.pool import Pool
from tests.distributed.tasks import refits
from tests.distributed.tasks.released import release


@pytest.mark.parametrize(
    "ranks",
    [
        range(2, 6),
        pytest.param(range(4, 8), marks=pytest.mark.slow),
        pytest.param(range(4), marks=pytest.mark.slow),
    ],
)
def test_every_stored_tensor_is_right_after_every_step(pool: Pool, ranks: range) -> None:
    for rank, right in enumerate(pool.run(refits.move, ranks, 3)):
        assert right == ([[], [], []] if rank in ranks else [])


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("missing", "stores 'lm_head.weight' as (3, 8), and the rank has no such tensor"),
        ("in no row", "the rank has 'extra', which no row of the side stores; add a row for it"),
        ("dtype", "'lm_head.weight' is float64, but the refit was planned for float32"),
        ("moved", "engine 'lm_head.weight' lies elsewhere in memory than when prepare()"),
        pytest.param(
            "strides",
            "engine 'lm_head.weight' lies elsewhere in memory than when prepare()",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "shorter",
            "engine 'lm_head.weight' lies elsewhere in memory than when prepare()",
            marks=pytest.mark.slow,
        ),
        ("freed", "engine 'lm_head.weight' lies elsewhere in memory than when prepare()"),
    ],
)
def test_one_rank_s_tensors_are_an_error_on_all(pool: Pool, fault: str, what: str) -> None:
    for told in pool.run(refits.refuse, fault):
        assert told is not None
        assert what in told
        assert "rank 5" in told


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("options", [{}, {"commit": "all"}, {"changes": True}])
def test_what_was_bound_goes_once_it_is_released(
    pool: Pool, quantizes: bool, options: dict[str, Any]
) -> None:
    for left, said, wrong in pool.run(release, quantizes, options):
        assert left == 0
        assert (
            "this rank has not prepared the refit, or has released its tensors since; call" in said
        )
        assert wrong == []


def test_sides_that_tell_each_other_how_they_store(pool: Pool) -> None:
    assert pool.run(refits.learn) == [[]] * 8


def test_whoever_has_not_prepared_is_named(pool: Pool) -> None:
    for told in pool.run(refits.forget):
        assert told is not None
        assert "has not prepared the refit" in told


def test_engines_that_share_ranks(pool: Pool) -> None:
    found = pool.run(refits.move_to_two)
    assert found == [(0, [])] * 4 + [(1, [])] * 2 + [(2, [])] * 2


def test_a_function_that_fails_is_heard_of(pool: Pool) -> None:
    for told in pool.run(refits.refuse, "function"):
        assert told is not None
        assert "a function of the user's" in told
    pool.broken = True  # the group is, since the move had begun


@pytest.mark.parametrize("in_block", [False, True])
def test_a_step_that_fails_leaves_all_as_it_was(pool: Pool, in_block: bool) -> None:
    """With commit="all" a function's fault is an objection: nothing is stored, and the next step works."""
    for rank, (found, is_said) in enumerate(pool.run(refits.commit, 5, in_block)):
        first, second, third = found
        assert first[:3] == ("", 1, True)
        who = "" if in_block and rank == 5 else "rank 5: "
        assert f"{who}ValueError: a function of the user's" in second[0]
        assert second[1] == 1 and (rank < 4 or second[3])
        assert third[:3] == ("", 2, True)
        assert is_said


@pytest.mark.parametrize("chunk", [0, 1])
def test_virtual_stages_with_equal_names(pool: Pool, chunk: int) -> None:
    name = "'decoder.layers.0.self_attention.linear_proj.weight'"
    for told in pool.run(refits.swap_in_a_chunk, chunk):
        assert told is not None
        assert name + (" of chunk 1 lies elsewhere" if chunk else " lies elsewhere") in told


def test_a_dtensor_with_other_memory(pool: Pool) -> None:
    for told in pool.run(refits.swap_inside_a_dtensor):
        assert told is not None
        assert "source 'w' lies elsewhere in memory" in told


def test_memory_that_is_given_again(pool: Pool) -> None:
    for told in pool.run(refits.free_and_take_again):
        assert told is not None
        assert "source 'w' lies elsewhere in memory" in told


ELSEWHERE = {
    "src": "rank 5 was given src=, but the trainer has ranks 0-3; leave src= out",
    "dst": "rank 1 was given dst=, but the engine has ranks 4-7; leave dst= out",
    "dst of several": "rank 1 is in no engine, but dst= has tensors for list; leave dst= out",
    "an engine's name": "rank 1 is in no engine, but dst= has tensors for decode; leave dst= out",
    "dst by chunk": "rank 6 is in prefill, decode, but dst= has tensors for list; pass dst={",
}


def test_tensors_of_a_side_that_the_rank_is_not_of(pool: Pool) -> None:
    """Nobody would move them: an error on all ranks, of which nobody waits."""
    for told in pool.run(refits.prepare_elsewhere):
        assert told.keys() == ELSEWHERE.keys()
        for case, what in ELSEWHERE.items():
            kind, text = told[case]
            assert kind == "ExchangeError" and what in text, (case, text)


def test_what_is_not_a_refit() -> None:
    with pytest.raises(sm.ExchangeError, match=r"smt.Refit got int, where a planned refit"):
        smt.Refit(5)  # type: ignore[arg-type]


def test_no_tensors_at_all(pool: Pool) -> None:
    for told in pool.run(refits.prepare_nonsense):
        assert told is not None
        assert "rank 6: src= or dst= is int, where a mapping" in told


def test_tensors_made_in_inference_mode(pool: Pool) -> None:
    assert pool.run(refits.into_inference_tensors) == [[]] * 8


def test_a_module_under_fsdp(pool: Pool) -> None:
    """Uneven shards of two layers become rows of one fused tensor."""
    q = [[6.0 * row + column for column in range(6)] for row in range(5)]
    k = [[100 + 6.0 * row + column for column in range(6)] for row in range(3)]
    whole = q + k
    assert pool.run(refits.from_fsdp) == [None] * 4 + [whole[:4], whole[4:]] + [None] * 2


def test_another_tensor_in_the_place_of_a_prepared_one(pool: Pool) -> None:
    """What was bound is no longer what is trained or served, if it lies as it did. A rank's own may be anywhere."""
    for told in pool.run(refits.replace):
        kind, text = told.pop("a mapping that raises")
        said = "rank 0: the mapping passed to prepare() raised OSError: it is closed for source 'w'"
        assert kind == "ExchangeError" and said in text
        fine = {
            "its own",
            "a parameter, of a state dict",
            "the same memory",
            "a tied parameter that is deleted in one module",
            "a mapping without entries",
            "memory that was shared",
        }
        assert {case: told.pop(case) for case in fine} == dict.fromkeys(fine)
        for case in ("a deleted parameter", "a parametrization", "weight norm", "pruned"):
            kind, text = told.pop(case)
            assert kind == "ExchangeError" and "'w' is no longer where its module had it" in text
            assert "call prepare() again on all ranks" in text
        for case, (kind, text) in told.items():
            side = "engine" if case == "an entry of dst" else "source"
            name = "b" if case == "a buffer" else "w"
            said = f"{side} {name!r} is another tensor than when prepare() was"
            assert kind == "ExchangeError" and said in text, (case, text)
            assert "call prepare() again on all ranks" in text


def test_parameters_that_fsdp_has_gathered(pool: Pool) -> None:
    """They are in the place of what is trained for the time being."""
    for rank, (is_gathered, found, (kind, text)) in enumerate(pool.run(refits.gathered)):
        assert is_gathered is (True if rank < 2 else None)
        assert found == ([[5.0] * 3] * 4 if rank == 2 else None)
        assert kind == "ExchangeError" and "source 'layer.weight' is another tensor than" in text


class Growing(dict[str, torch.Tensor]):
    """Parameters of a module to which another thread adds while somebody goes through them."""

    def items(self) -> Any:
        for pair in super().items():
            yield pair
            self[str(len(self))] = torch.empty(0)


def test_modules_that_grow_meanwhile() -> None:
    module = torch.nn.Linear(2, 2)
    module._buffers = Growing(a=torch.empty(0), b=torch.empty(0))
    weight = module.weight
    (watched,) = watch("source", {"weight": weight}, {(0, "weight"): weight})
    find_owners([watched])
    assert find_removed([watched]) is None
    del module.weight
    assert find_removed([watched]) == "source 'weight'"


def test_other_threads_make_tuples_meanwhile() -> None:
    """CPython raised SystemError in a thread whose tuple was among the objects searched, half made."""
    is_over = threading.Event()
    errors = []

    def make() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(1000))
            except SystemError as error:
                errors.append(error)

    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    weight = torch.nn.Linear(2, 2).weight
    for _ in range(10):
        find_owners(watch("source", {"weight": weight}, {(0, "weight"): weight}))
    is_over.set()
    maker.join()
    assert not errors


def test_a_submodule_in_the_place_of_one() -> None:
    """An engine got the former one's weights, without an error."""
    group = smt.connect(dist.HashStore(), 0, 1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    side = Stored(parse("w = w"), (sm.Mesh(),))
    refit = smt.Refit(sm.refit(side, side, {"w": ((2, 2), "float32")}), group=group)
    former = model[0]
    refit.prepare({"w": former.weight}, {"w": torch.zeros(2, 2)}, modules=[model])
    refit()
    model[0] = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(sm.ExchangeError, match=r"source 'w' is no longer where .* or replaced"):
        refit()
    model[0] = former
    refit()
    smt.disconnect(group)


def _set_parameter(model: Any) -> None:
    model.weight = torch.nn.Parameter(torch.ones(4, 2))


def _set_data(model: Any) -> None:
    model.weight.data = torch.ones(4, 2)


def _delete(model: Any) -> None:
    del model.weight


@pytest.mark.parametrize("act", [_set_parameter, _set_data, _delete])
@pytest.mark.parametrize("halve", [False, True])
def test_a_parameter_in_the_place_of_one_of_which_views_were_given(
    act: Callable[[Any], None], halve: bool
) -> None:
    """With modules=, too, an engine got the former one's weights, without an error."""
    group = smt.connect(dist.HashStore(), 0, 1)
    model = torch.nn.Linear(2, 4)
    model.bias = torch.nn.Parameter(torch.zeros(4))
    side = Stored(parse("w = w"), (sm.Mesh(),))
    rows = 2 if halve else 4
    refit = smt.Refit(sm.refit(side, side, {"w": ((rows, 2), "float32")}), group=group)
    view = model.state_dict()["weight"][4 - rows :]
    refit.prepare({"w": view}, {"w": torch.zeros(rows, 2)}, modules=[model])
    model.bias = torch.nn.Parameter(torch.ones(4))
    model.weight = torch.nn.Parameter(model.weight.data)
    refit()
    act(model)
    with pytest.raises(sm.ExchangeError, match=r"source 'w' is (another tensor|no longer where)"):
        refit()
    smt.disconnect(group)


@pytest.mark.parametrize("modules", [torch.nn.Sequential(torch.nn.Linear(2, 2)), [3], 3])
def test_modules_that_are_no_list_of_modules(modules: Any) -> None:
    """A Sequential stood for its parts, of which none notices that another is in its place."""
    group = smt.connect(dist.HashStore(), 0, 1)
    side = Stored(parse("w = w"), (sm.Mesh(),))
    refit = smt.Refit(sm.refit(side, side, {"w": ((2,), "float32")}), group=group)
    with pytest.raises(sm.ExchangeError, match=r"modules= (is|are) "):
        refit.prepare({"w": torch.zeros(2)}, {"w": torch.zeros(2)}, modules=modules)
    smt.disconnect(group)


def test_a_refit_with_other_rules() -> None:
    """The engine got what the former rules compute, without an error."""
    group = smt.connect(dist.HashStore(), 0, 1)
    side = Stored(parse("w = w"), (sm.Mesh(),))
    shapes = {"w": ((2,), "float32")}
    first, other = (
        sm.refit(side, side, shapes, served=shapes, rules={"*": rule})
        for rule in (transforms.NegativeExp(), transforms.Cast("float32"))
    )
    refit = smt.Refit(first, group=group)
    own, its = torch.zeros(2), torch.zeros(2)
    refit.prepare({"w": own}, {"w": its})
    with pytest.raises(sm.ExchangeError, match=r"'w' by Cast\(.*, but this one by NegativeExp\("):
        refit.replan(other)
    refit.replan(sm.refit(side, side, shapes, served=shapes, rules={"*": transforms.NegativeExp()}))
    refit()
    assert its.tolist() == [-1.0, -1.0]
    smt.disconnect(group)


def make_freed() -> torch.Tensor:
    tensor = torch.zeros(2, 2)
    tensor.untyped_storage().resize_(0)
    return tensor


def make_sparse() -> torch.Tensor:
    return torch.zeros(2, 2).to_sparse()


# Functions: pytest prints arguments, and ends as it prints a freed tensor.
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (make_freed, "reaches 16 bytes into a storage of 0, which was freed or resized"),
        (make_sparse, r"is stored as torch\.sparse_coo"),
    ],
)
def test_tensors_without_their_memory_are_named(
    make: Callable[[], torch.Tensor], fault: str
) -> None:
    """Of one that FSDP has freed, torch said 'setStorage: sizes [2, 2]', and of which tensor nobody said."""
    group = smt.connect(dist.HashStore(), 0, 1)
    side = Stored(parse("w = w"), (sm.Mesh(),))
    refit = smt.Refit(sm.refit(side, side, {"w": ((2, 2), "float32")}), group=group)
    for src, dst in ((make(), torch.zeros(2, 2)), (torch.zeros(2, 2), make())):
        with pytest.raises(sm.ExchangeError, match=f"'w' {fault}"):
            refit.prepare({"w": src}, {"w": dst})
    smt.disconnect(group)


RARELY = ["a root", "kept gathered", "replicas"]


@pytest.mark.parametrize(
    "cases",
    [
        [case for case in refits.SERVED if case not in RARELY],
        pytest.param(RARELY, marks=pytest.mark.slow),
    ],
)
def test_engines_that_fsdp_has_gathered(pool: Pool, cases: list[str]) -> None:
    """The next forward has what has arrived, and not what was gathered before."""
    for rank, told in enumerate(pool.run(refits.serve, cases)):
        assert list(told) == cases
        for case, (served, (kind, text)) in told.items():
            assert served == ([15.0, 21.0] if rank < 2 else []), (case, served)
            assert kind == "ExchangeError", (case, text)
            assert (
                "'layer.weight' is a copy that FSDP2 gathered for a forward, not a shard; call"
                in text
            )


CONTRADICTIONS = {
    "strided": "layout float32[16, 8] (tp dp n) h on dp=4 tp=2, but the plan has float32[16, 8] (dp tp",
    "a plain side": "layout float32[16, 8] (tp dp n) h on dp=4 tp=2, but the plan has float32[16, 8] (dp",
    "flipped": "but the plan has float32[16, 8] (world n) h on world=8",
    "partial": "'w' is a DTensor with placements (Partial(sum),), of which a rank holds a partial sum",
}


def test_dtensors_that_lie_otherwise_than_planned(pool: Pool) -> None:
    """Of the same local shapes: other rows would be moved."""
    for told in pool.run(refits.contradict):
        for case, said in told.items():
            if case not in CONTRADICTIONS:
                assert said is None, (case, said)
                continue
            kind, text = said
            assert kind == "ExchangeError" and CONTRADICTIONS[case] in text, (case, text)


@pytest.mark.parametrize(
    ("function", "found"),
    [("one number", "float32[]"), ("integers", "int32[4, 3]"), ("nothing", "NoneType")],
)
def test_a_function_that_makes_other_tensors(pool: Pool, function: str, found: str) -> None:
    for kind, text in pool.run(refits.store_by, function):
        assert kind == "ExchangeError"
        assert (
            f"computes 'w' returned {found}, where the stored tensor is float32[4, 3]; return"
            in text
        )
    pool.broken = True  # the group is, since the move had begun


def test_a_function_that_rounds(pool: Pool) -> None:
    assert pool.run(refits.store_by, "narrow") == [None] * 8


@pytest.mark.parametrize("options", [{}, {"changes": True}, {"commit": "all"}])
@pytest.mark.parametrize("check", [None, "digest"])
def test_a_function_that_writes_into_what_it_gets(options: dict[str, Any], check: Any) -> None:
    """With changes, the next ones were put into what the function had written; a check compared that."""
    group = smt.connect(dist.HashStore(), 0, 1)
    side, to = (Stored(parse(row), (sm.Mesh(),)) for row in ("w = w", "w = twice(w)"))
    planned = sm.refit(side, to, {"w": ((4,), "float32")})
    refit = smt.Refit(planned, group=group, **options)
    own, its = torch.arange(4.0), torch.zeros(4)
    refit.prepare({"w": own}, {"w": its}, functions={"twice": lambda tensor: tensor.mul_(2)})
    for step in range(3):
        own[step] += 1
        refit(check=check)
        assert torch.equal(its, own * 2)
    smt.disconnect(group)


@pytest.mark.parametrize("options", [{}, {"changes": True}, {"commit": "all"}])
def test_a_function_that_returns_the_same_memory_each_time(options: dict[str, Any]) -> None:
    """With commit="all" all of its tensors got the last one's values."""
    group = smt.connect(dist.HashStore(), 0, 1)
    apart = Stored(parse("p = p\nq = q"), (sm.Mesh(),))
    engine = Stored(parse("p = twice(p)\nq = twice(q)"), (sm.Mesh(),))
    planned = sm.refit(apart, engine, dict.fromkeys("pq", ((4,), "float32")))
    refit = smt.Refit(planned, group=group, **options)
    own = {"p": torch.arange(4.0), "q": torch.ones(4)}
    its = {name: torch.zeros(4) for name in "pq"}
    memory = torch.empty(4)
    refit.prepare(own, its, functions={"twice": lambda tensor: torch.mul(tensor, 2, out=memory)})
    refit()
    assert all(torch.equal(its[name], own[name] * 2) for name in "pq")
    smt.disconnect(group)


@pytest.mark.parametrize("functions", [{"twice": "neg_exp"}, {"twice": None}, ["twice"], "twice"])
def test_functions_that_are_none(functions: Any) -> None:
    """The first move broke the group."""
    group = smt.connect(dist.HashStore(), 0, 1)
    side, to = (Stored(parse(row), (sm.Mesh(),)) for row in ("w = w", "w = twice(w)"))
    refit = smt.Refit(sm.refit(side, to, {"w": ((4,), "float32")}), group=group)
    own, its = torch.ones(4), torch.zeros(4)
    with pytest.raises(sm.ExchangeError, match=r"functions= .*; pass "):
        refit.prepare({"w": own}, {"w": its}, functions=functions)
    refit.prepare({"w": own}, {"w": its}, functions={"twice": lambda tensor: tensor * 2})
    refit()
    assert its.tolist() == [2.0] * 4
    smt.disconnect(group)


@pytest.mark.parametrize("options", [{}, {"changes": True}, {"commit": "all"}])
def test_a_function_leaves_the_cells_between_its_own(options: dict[str, Any]) -> None:
    """Those of another component, and padding, got a function of memory that nobody wrote."""
    group = smt.connect(dist.HashStore(), 0, 1)
    shapes = {"p": ((6,), "float32"), "q": ((4,), "float32")}
    apart = Stored(parse("p = p\nq = q"), (sm.Mesh(),))
    fused = Stored(parse("w = neg_exp([p q]) : (2 (p^4 + q))"), (sm.Mesh(),))
    refit = smt.Refit(sm.refit(apart, fused, shapes), group=group, **options)
    p, q, w = torch.arange(6.0), torch.arange(4.0), torch.full((12,), 7.0)
    refit.prepare({"p": p, "q": q}, {"w": w})
    refit()
    hole = torch.tensor([7.0])
    made = [-p[:3].exp(), hole, -q[:2].exp(), -p[3:].exp(), hole, -q[2:].exp()]
    assert torch.equal(w, torch.cat(made))
    smt.disconnect(group)


@pytest.mark.parametrize(
    ("shared", "what"),
    [
        ("source", "source tensor 'q' and destination tensor 'p' share memory"),
        ("destination", "destination tensor '[pq]' and destination tensor '[pq]' share memory"),
        ("itself", "destination tensor 'p' has shape .* several elements at one address"),
    ],
)
def test_a_function_s_tensor_in_memory_of_another(shared: str, what: str) -> None:
    """The function was written there, without an error, or broke the group."""
    group = smt.connect(dist.HashStore(), 0, 1)
    shapes = dict.fromkeys("pq", ((4,), "float32"))
    apart = Stored(parse("p = p\nq = q"), (sm.Mesh(),))
    engine = Stored(parse("p = neg_exp(p)\nq = q"), (sm.Mesh(),))
    refit = smt.Refit(sm.refit(apart, engine, shapes), group=group)
    own = {name: torch.zeros(4) for name in "pq"}
    memory = torch.zeros(6)
    its = {
        "source": own["q"],
        "destination": memory[2:],
        "itself": torch.zeros(1).expand(4),
    }
    with pytest.raises(sm.ExchangeError, match=what):
        refit.prepare(own, {"p": its[shared], "q": memory[:4]})
    refit.prepare(own, {"p": torch.zeros(4), "q": memory[:4]})
    refit()
    smt.disconnect(group)


def test_a_source_that_stores_a_function() -> None:
    """No memory that nobody wrote is sent, whoever made the plan."""
    bound = bind(Stored(parse("A = neg_exp(q)"), (sm.Mesh(),)), {"q": ((4,), "float32")})
    given = bound.slots(0), bound.layouts, {(0, "A"): torch.ones(4)}, 0, (), {}
    assert len(bind_views(bound, *given, receives=True).computed) == 1
    with pytest.raises(
        sm.StoreError,
        match=r"the trainer stores neg_exp\(q\) as 'A', from which q cannot be computed",
    ):
        bind_views(bound, *given, receives=False)
