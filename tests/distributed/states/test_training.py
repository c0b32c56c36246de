"""Training that is saved under one parallelism and goes on under another, as if it had never stopped.

Losses, weights and moments are compared with those of a run without a break. Tests that pin what torch cannot tell, by
failing, that torch was mended: then they may go.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh

import shardmath as sm
from tests.distributed import pool as workers
from tests.distributed.dtensors.test_dtensor import value
from tests.distributed.pool import Pool
from tests.distributed.tasks import training as work

pytestmark = pytest.mark.long

workers.PRELOADED.append(
    "transformers.models.mistral.modeling_mistral"
)  # seconds, once instead of in each worker

STEPS, MORE = 2, 3
Runs = dict[work.Mesh, tuple[str, list[work.Run]]]
MESHES: dict[str, work.Mesh] = {
    "FSDP2 4 x TP 2": (4, 2),
    "FSDP2 2 x TP 4": (2, 4),
    "FSDP2 8": (8,),
    "2 x FSDP2 2 x TP 2": (2, 2, 2),
    "one process": (),
}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Runs without a break, and where they saved, by mesh."""
    return {}


def uninterrupted(
    pool: Pool, runs: Runs, folder: Any, mesh: work.Mesh
) -> tuple[str, list[work.Run]]:
    """Made once a mesh."""
    if mesh not in runs:
        path = str(folder.mktemp("training"))
        runs[mesh] = (
            path,
            present(pool.run(work.uninterrupted, mesh, path, STEPS, MORE, timeout=90)),
        )
    return runs[mesh]


def present(found: list[work.Run | None]) -> list[work.Run]:
    return [run for run in found if run is not None]


def whole(layouts: dict[str, sm.Layout], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The tensors of which the ranks hold these parts; a process alone has all."""
    by_name = {name: {rank: part[name] for rank, part in enumerate(parts)} for name in layouts}
    return {name: value(layout, by_name[name]) for name, layout in layouts.items()}


def same(found: dict[str, Any], wanted: dict[str, Any], rtol: float) -> None:
    """All of it, and all of it there."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert not np.isnan(found[name]).any(), name
        np.testing.assert_allclose(found[name], wanted[name], rtol, atol=rtol * 1e-3, err_msg=name)


PAIRS = [
    ("FSDP2 4 x TP 2", "one process"),
    ("FSDP2 8", "FSDP2 4 x TP 2"),
]
MORE_PAIRS = [
    ("FSDP2 4 x TP 2", "FSDP2 2 x TP 4"),
    ("FSDP2 4 x TP 2", "FSDP2 8"),
    ("FSDP2 4 x TP 2", "2 x FSDP2 2 x TP 2"),
    ("2 x FSDP2 2 x TP 2", "FSDP2 4 x TP 2"),
    ("2 x FSDP2 2 x TP 2", "2 x FSDP2 2 x TP 2"),
    ("FSDP2 8", "2 x FSDP2 2 x TP 2"),
    ("one process", "FSDP2 4 x TP 2"),
]
"""torch needs seconds in each process for the first step on a mesh, to find out how each operation divides."""


@pytest.mark.parametrize(
    ("src", "dst"), [*PAIRS, *(pytest.param(*p, marks=pytest.mark.slow) for p in MORE_PAIRS)]
)
def test_goes_on(pool: Pool, runs: Runs, tmp_path_factory: Any, src: str, dst: str) -> None:
    """The losses of a run without a break; what was saved is there bit by bit, and stays as close as the losses."""
    path, first = uninterrupted(pool, runs, tmp_path_factory, MESHES[src])
    second = present(pool.run(work.resumed, MESHES[dst], path, STEPS, MORE, timeout=90))
    for run in second:
        np.testing.assert_allclose(run.losses, first[0].losses[STEPS:], rtol=1e-12)
    for moment, rtol in (("before", 0.0), ("after", 1e-9)):
        found, wanted = (
            whole(run[0].layouts, [getattr(r, moment) for r in run]) for run in (second, first)
        )
        same(found, wanted, rtol)


@pytest.mark.parametrize(
    "mesh",
    [
        "FSDP2 4 x TP 2",
        "FSDP2 8",
        pytest.param("FSDP2 2 x TP 4", marks=pytest.mark.slow),
        pytest.param("2 x FSDP2 2 x TP 2", marks=pytest.mark.slow),
    ],
)
def test_trains_as_one_process_does(
    pool: Pool, runs: Runs, tmp_path_factory: Any, mesh: str
) -> None:
    """Otherwise the rest here says little."""
    _, alone = uninterrupted(pool, runs, tmp_path_factory, ())
    _, found = uninterrupted(pool, runs, tmp_path_factory, MESHES[mesh])
    assert alone[0].losses[-1] < alone[0].losses[0] - 0.1
    np.testing.assert_allclose(found[0].losses, alone[0].losses, rtol=1e-12)
    same(
        whole(found[0].layouts, [run.after for run in found]),
        whole(alone[0].layouts, [alone[0].after]),
        1e-9,
    )


def test_what_is_uneven(pool: Pool, runs: Runs, tmp_path_factory: Any) -> None:
    """Layouts of parts that differ in size, or are empty, and of moments, which are the same."""
    _, found = uninterrupted(pool, runs, tmp_path_factory, (4, 2))
    layouts = found[0].layouts
    texts = {
        "embed_tokens": "(tp dp n) h",
        "layers.1.mlp.gate_proj": "(tp dp n) h",
        "layers.0.mlp.down_proj": "(dp n) (tp h)",
    }
    for name, text in texts.items():
        weight = f"model.model.{name}.weight"
        layout = layouts[weight]
        assert layout.text == text and len({layout.local_shape(rank) for rank in range(8)}) > 1, (
            layout
        )
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert layouts[f"optim.state.{weight.removeprefix('model.')}.{key}"] is layout
    assert layouts["model.model.layers.1.mlp.gate_proj.weight"].local_shape(6) == (0, 27)
    assert layouts["optim.state.lm_head.weight.step"].text == ""


def test_a_fused_weight(pool: Pool, tmp_path: Path) -> None:
    """Packed as `set_device_mesh` has it, which its DTensor does not say: moments follow."""
    assert pool.run(work.packed, str(tmp_path)) == [[True] * 4] * 8


def test_gathered_parameters(pool: Pool) -> None:
    """After a forward without a backward FSDP2 keeps the last parameters gathered; that is not what is saved."""
    for rank, (before, found, wanted) in enumerate(pool.run(work.gathered)):
        assert before == ((129, 128)[rank % 2], work.HIDDEN)
        assert found == wanted


def test_buffers_and_bytes(pool: Pool, tmp_path: Path) -> None:
    """Buffers lie as they do, plain ones on the mesh of the parameters; bytes are each rank's own."""
    for rank, (texts, rows, steps, scratch, own) in enumerate(
        pool.run(work.counted, str(tmp_path))
    ):
        assert texts["model.rows"].startswith("int64[9] (tp n) on dp=4 tp=2") and rows
        assert texts["model.steps"].startswith("int64[]") and "model.scratch" not in texts
        assert (texts["model._extra_state"], steps, scratch, own) == ("None", 3, 1, f"rank {rank}")


def test_buffers_that_differ_between_ranks(pool: Pool, tmp_path: Path) -> None:
    """As those of BatchNorm under FSDP2: all are the lowest rank's, not a part of each rank's."""
    assert pool.run(work.buffers_apart, str(tmp_path)) == [[{0.0}, {0.0}]] * 8


def test_state_that_lies_otherwise(pool: Pool) -> None:
    for said in pool.run(work.odd_state):
        for kind, text in said[:2]:
            assert kind == "CheckpointError" and "'row_var' of 'weight' has shape" in text
        for (kind, text), of in zip(said[2:], ("list", "tuple", "dict"), strict=True):
            what = (
                f"'row_var' of 'weight', which is a DTensor, has tensors in a {of}; keep each under"
            )
            assert kind == "CheckpointError" and what in text


def test_state_that_comes_to_lie_otherwise(pool: Pool, tmp_path: Path) -> None:
    for vector, inside, numbers in pool.run(work.lay_out_anew, str(tmp_path)):
        assert "'odd' of 'weight' has shape (9,), its parameter (9, 2)" in vector
        assert "'odd' of 'weight', which is a DTensor, has tensors in a list" in inside
        assert numbers == ""


@pytest.mark.parametrize("names", ["w scale", "scale"])
def test_numbers_of_a_parameter_that_is_a_number(pool: Pool, tmp_path: Path, names: str) -> None:
    """Its step has its shape, too, but stays plain where the parameter is a DTensor; foreach takes no mixture."""
    # Nothing else shows what the products of a parameter alone are.
    alone = set() if "w" in names else {"mu_product"}
    wanted = {"exp_avg", "exp_avg_sq"} | alone
    assert pool.run(work.scale_numbers, str(tmp_path), names) == [(wanted, True)] * 8


def test_state_that_was_held_whole(pool: Pool, tmp_path: Path) -> None:
    """It is made anew: its memory would be filled with copies of each rank's part."""
    for is_placed, values in pool.run(work.hold_whole, str(tmp_path)):
        assert is_placed and values == list(range(8))


def test_ranks_in_another_order(pool: Pool, tmp_path: Path) -> None:
    """torch's groups sort their ranks, so rank 0 has FSDP2's first rows, but it is second on the mesh."""
    for said in pool.run(work.in_another_order, str(tmp_path)):
        for _, text in said:
            assert (
                "'weight' is divided among ranks [1, 0, 2, 3, 4, 5, 6, 7] of a DeviceMesh" in text
            )


@pytest.mark.skipif(
    "preserve_rank_order" not in signature(DeviceMesh).parameters, reason="from torch 2.15 on"
)
def test_ranks_in_an_order_that_groups_keep(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(work.in_an_order_that_is_kept, str(tmp_path)) == [(True, True)] * 8


def test_state_that_is_one_of_two_parameters(pool: Pool, tmp_path: Path) -> None:
    for is_one, said in pool.run(work.share_state, str(tmp_path)):
        assert is_one
        assert (
            "'moment' is one tensor of 'a' and 'b' in the checkpoint, and would be placed" in said
        )


@pytest.mark.parametrize("kind", ["ours", pytest.param("torch's", marks=pytest.mark.slow)])
def test_state_that_ranks_share_out(pool: Pool, tmp_path: Path, kind: str) -> None:
    for (error, text), goes_on in pool.run(work.deal, str(tmp_path), kind):
        assert error == "CheckpointError" and "nothing on the first rank" in text
        assert "of their state before each save, by broadcasts from the rank that has it" in text
        assert goes_on


# What torch cannot


def test_torch_refuses_to_save_it(pool: Pool, tmp_path: Path) -> None:
    """257 rows: its metadata has rows in two places."""
    for said in pool.run(work.by_torch, str(tmp_path), True):
        assert "model.embed_tokens.weight has overlapping chunks" in said


def test_torch_saves_what_it_cannot_load(pool: Pool, tmp_path: Path) -> None:
    """17 rows: it saves without an error, and has lost a row."""
    for said in pool.run(work.by_torch, str(tmp_path), False):
        assert "mlp.gate_proj.weight" in said and "mismatch sizes" in said


def test_torch_takes_local_tensors_for_even(pool: Pool) -> None:
    """Why the intermediate features go on as DTensors: else torch refuses them."""
    for rank, said in enumerate(pool.run(work.refused)):
        assert f"but got [18, {(18, 16)[rank % 2]}] X [17, 27]" in said


@pytest.mark.parametrize("what", ["gives", "takes", "module"])
def test_one_rank_that_is_wrong(pool: Pool, tmp_path: Path, what: str) -> None:
    """Nobody waits for it, also where layouts have to be asked for."""
    answers = pool.run(work.wrong_on_one, str(tmp_path), what)
    assert all(
        kind == "CheckpointError" and "rank 2 could not" in said for kind, said in answers
    ), answers


@pytest.mark.parametrize("step", ["save_state", "load_state", "load_weights"])
def test_a_mesh_that_lacks_a_rank(pool: Pool, tmp_path: Path, step: str) -> None:
    """Said on all ranks: the module of a rank that is not there would not be filled."""
    for kind, said in pool.run(work.on_some_of_the_ranks, str(tmp_path), step):
        assert kind == "CheckpointError", said
        assert "rank 1 has 'weight' in its module, but is not on the mesh" in said


ASKED_OTHERWISE = {
    "no optimizer": "match its state: the optimizer is None on this rank and given on the first",
    "other parameters": "match its state: the optimizer of 'a' is given on this rank and nothing on",
    "other optimizers": "match its state: the optimizer is None on this rank and given on the first",
    "other names": "match its weights: the source of 'x' is 'b' on this rank and 'a' on the first rank",
    "other names of what is plain": "match its weights: the source of 'x' is 'b' on this rank and 'a' on",
    "other order of names": "describe its module: the first name of 'y' is 'y' on this rank and 'x' on",
    "tied": "describe its module: the first name of 'x' is 'x' on this rank and nothing on",
    "saved without an optimizer": "describe its state: the optimizer is None on this rank and given on",
    "saved with other parameters": "describe its state: the optimizer of 'a' is given on this rank and",
    "exported tied": "describe its module: the first name of 'x' is 'x' on this rank and nothing on",
    "exported with layouts": "export: the source is tensors with layouts on this rank and tensors on the",
    "exported under other names": "export: the tensor of the name 'y' is 'x' on this rank and nothing on",
}


def test_ranks_that_ask_for_different_things(pool: Pool, tmp_path: Path) -> None:
    """Each would get what it asked for, and the state would be of two runs: an error on all that says what differs."""
    for found in pool.run(work.asked_otherwise, str(tmp_path)):
        assert not found.pop("restored") and found.keys() == ASKED_OTHERWISE.keys()
        for name, said in ASKED_OTHERWISE.items():
            kind, text = found[name]
            assert kind == "CheckpointError" and f"rank 1 could not {said}" in text, (name, text)
            assert "of the group; " in text


def test_dtensors_of_other_ranks(pool: Pool, tmp_path: Path) -> None:
    """Where a rank is not on a DTensor's mesh, it has an empty tensor in its place, and nothing to save."""
    from safetensors.torch import load_file

    for rank, (found, lost) in enumerate(pool.run(work.on_two_meshes, str(tmp_path))):
        few = [[2.5, 2.5]] * 2 if rank < 4 else []
        every = [[2.5, 2.5]]
        assert found[:4] == [few, every, few, every]
        moments = [[[1.0, 1.0]] * 2] if rank < 4 else []
        assert found[4:] == [*moments, [[1.0, 1.0]]]
        assert lost[0] == "CheckpointError", lost
        assert "rank 4 (and 3 others) could not lay out its tensors: rank 4 has 'w'" in lost[1]
        assert "give mesh= of all ranks that have it" in lost[1]
    for kind in ("module", "tensors"):
        (file,) = (tmp_path / kind).glob("*.safetensors")
        assert {name: t.tolist() for name, t in load_file(file).items()} == {
            name: [[2.5, 2.5]] * 8 for name in ("few", "all")
        }


@pytest.mark.parametrize("others", ["no gradient", "a gradient", "other steps"])
@pytest.mark.parametrize("kind", ["adam", "counted"])
def test_optimizers_on_meshes_apart(pool: Pool, tmp_path: Path, kind: str, others: str) -> None:
    """State is that of the ranks on a parameter's mesh, tensors and values, whatever the others made of theirs."""
    moments = (0.1, 0.19) if kind == "adam" else (1.0, 1.5)
    steps = {"low": (1.0, moments[0]), "high": (2.0, moments[1])}
    for rank, (has_state, found, same) in enumerate(
        pool.run(work.on_meshes_apart, str(tmp_path), kind, others)
    ):
        here, there = ("low", "high") if rank < 4 else ("high", "low")
        assert has_state == [here]
        assert found == [{there: steps[there]}, steps, steps, steps]
        assert same == [True, True]


def test_optimizers_from_a_generator(pool: Pool, tmp_path: Path) -> None:
    """It is gone through once, and its optimizers are asked for twice."""
    for rank, found in enumerate(pool.run(work.from_a_generator, str(tmp_path / "c"))):
        assert found == ({"low": (1.0, 0.1)} if rank < 4 else {"high": (2.0, 0.19)})


@pytest.mark.parametrize("own", [False, True])
def test_optimizers_of_stages(pool: Pool, tmp_path: Path, own: bool) -> None:
    """Each with all parameters, or its own stage's alone: what the stage's ranks have is saved, also of options."""
    rates = {"low": 0.25, "high": 0.5}
    states = {"low": (1.0, 0.1), "high": (2.0, 0.19)}
    for rank, found in enumerate(pool.run(work.of_stages, str(tmp_path), own)):
        here, there = ("low", "high") if rank < 4 else ("high", "low")
        wanted: list[Any] = []
        for stage in (here, there):
            held = {stage: rates[stage]} if own else rates
            wanted.append((held, {stage: states[stage]}))
        wanted.append((rates, states))
        assert found == wanted * 2


def test_options_are_those_of_each_parameters_ranks(pool: Pool, tmp_path: Path) -> None:
    """In whatever groups it is with those of other ranks; what is not here has no say in a group at a load."""
    for rank, (found, said) in enumerate(pool.run(work.of_mixed_groups, str(tmp_path / "c"))):
        apart = [0.25, 0.5, 0.125]
        assert found == [apart, [0.25, 9.0 + rank] if rank < 4 else [0.5, 0.125]]
        kind, text = said
        assert kind == "CheckpointError" and "rank 5 could not describe its state" in text
        assert "the optimizer of 'top' is nothing on this rank and given on the first" in text


NAMED = [f"model.{name}" for name in ("high", "low")] + [
    f"optim.state.{name}.{key}"
    for name in ("high", "low")
    for key in ("exp_avg", "exp_avg_sq", "step")
]


@pytest.mark.parametrize("case", ["spanned", "some", "all"])
def test_state_of_what_is_on_some_ranks(pool: Pool, case: str) -> None:
    """Those tell each other in the group of a mesh that has all of them, or in the group given; nobody waits."""
    found = pool.run(work.on_meshes_of_some, case)
    calling = 8 if case == "all" else 4
    assert found == [[*NAMED, "training"]] * calling + [None] * (8 - calling)


def test_state_of_what_no_group_has(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(work.on_meshes_of_some, "apart")):
        if rank < 4:
            kind, text = told
            assert kind == "CheckpointError" and "ranks [4, 5, 6, 7] are not on a mesh" in text
            assert "give group= of the ranks that call: of these others, or" in text
    for rank, told in enumerate(pool.run(work.on_meshes_of_some, "outside")):
        if rank > 3:
            kind, text = told
            assert (
                kind == "CheckpointError" and f"rank {rank} is not on a mesh of the module" in text
            )
            assert "give group= of all ranks that call, this one too" in text


def test_ranks_that_read_meshes_otherwise_are_told_at_once(pool: Pool, tmp_path: Path) -> None:
    for (kind, text), seconds in pool.run(work.with_other_meshes, str(tmp_path / "c")):
        assert kind == "CheckpointError", text
        assert seconds < 20
    assert pool.run(work.from_a_generator, str(tmp_path / "d"))[0]  # the group is whole


def test_an_optimizer_that_keeps_its_state_in_another(pool: Pool, tmp_path: Path) -> None:
    """Its own state is empty: all moments would be lost."""
    said = "ZeroRedundancyOptimizer keeps state in its own optimizer, the Adam in its attribute 'optim'"
    for saved, loaded in pool.run(work.divided_by_zero, str(tmp_path)):
        for kind, text in (saved, loaded):
            assert kind == "CheckpointError" and said in text and "FSDP2" in text
    assert not (tmp_path / "new").exists()


def test_weights_of_another_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Other names, another type, a parameter with two names, FSDP2 in uneven rows."""
    import torch
    from safetensors.torch import save_file

    whole = {"model.words": torch.arange(36.0).reshape(9, 4), "model.ln.weight": torch.ones(4) * 3}
    whole["model.ln.bias"] = torch.ones(4) / 2
    save_file({name: t.bfloat16() for name, t in whole.items()}, tmp_path / "model.safetensors")
    for found in pool.run(work.filled, str(tmp_path)):
        assert found == {
            "embed.weight": ("torch.float32", whole["model.words"].tolist()),
            "norm.weight": ("torch.float32", [3.0] * 4),
            "norm.bias": ("torch.float32", [0.5] * 4),
        }
