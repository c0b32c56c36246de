"""The newer vLLM has what this backend uses of it, under the names and with the meanings that it relies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmath import formats
from tests.vllm import checkpoints
from tests.vllm.cases import MODELS, fields
from tests.vllm.contract import inside, wheel
from tests.vllm.contract.conftest import Ask

NOT_BUILT = {"gpt2"}
"""Needs an operation that only the compiled part of vLLM has."""
TILED = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 8}
"""Sizes of which tiles of 128 x 128 are whole on two ranks."""


def test_the_version_is_the_one_that_was_downloaded(ask: Ask) -> None:
    assert ask(inside.name_version) == wheel.VERSION


def test_all_modules_are_imported(ask: Ask) -> None:
    assert {"worker", "supplying", "loading"} <= set(ask(inside.import_all))


def test_what_metadata_says(ask: Ask) -> None:
    said = ask(inside.list_metadata)
    assert said["fields"] == ["name", "dtype", "shape", "owners", "mesh_shape", "placements"]
    assert said["keywords"] == ["owners", "mesh_shape", "placements"]
    assert (said["Shard"], said["Replicate"]) == (["dim"], [])
    assert "owners=(1, 0), mesh_shape=(2,), placements=None" in said["default"]


def test_what_sources_engines_and_clients_have(ask: Ask) -> None:
    said = ask(inside.list_methods)
    assert set(said["WeightSource"]) == {
        "metadata",
        "owned_names(self, rank)",
        "implements_iter_full(self)",
        "implements_iter_local(self)",
        "iter_full(self)",
        "iter_local(self)",
    }
    assert set(said["ModuleSource"]) == {"metadata", "iter_full(self)", "iter_local(self)"}
    assert set(said["VLLMWeightSyncClient"]) == {
        "init_weight_transfer_engine(self, init_info)",
        "start_weight_update(self)",
        "update_weights(self, update_info)",
        "finish_weight_update(self, weight_version)",
    }
    assert set(said["WeightTransferEngine"]) == {
        "drain_pending(self)",
        "set_weight_update_target(self, model, model_config)",
        "reset_weight_update_target(self)",
        "parse_init_info(self, init_dict)",
        "parse_update_info(self, update_dict)",
        "init_transfer_engine(self, init_info)",
        "start_weight_update(self)",
        "finish_weight_update(self)",
        "update_weights(self, update_info)",
        "receive_weights(self, update_info)",
        "shutdown(self)",
    }
    assert "metadata must be a functools.cached_property" in ask(inside.refuse_a_method)


def test_the_plugin_registers_both_ends(ask: Ask) -> None:
    said = ask(inside.register)
    assert (said["engine"], said["trainer"], said["is_one"]) == ("WorkerEngine", True, True)
    assert said["called"] == said["ours"] == ["init_info", "client", "source"]


def test_the_engine_answers_what_vllm_asks(ask: Ask) -> None:
    """Nothing is left abstract, drafts are not taken, and weights are there when a call returns."""
    assert ask(inside.list_engine) == {"abstract": [], "drafts": False, "defers": False}
    assert ask(inside.ask_for_draft) == "WorkerEngine does not support draft model weight updates."


def test_answers_of_workers_are_told_apart(ask: Ask) -> None:
    """Also of those that vLLM starts concurrently, since each executor is patched at its first call."""
    assert ask(inside.list_executor) == {
        "asks": True,
        "reads": True,
        "patched": "shardmath_vllm.workers.answers",
        "concurrent": True,
    }


def test_a_server_has_the_routes_that_clients_and_pages_name(ask: Ask) -> None:
    routes = ask(inside.list_routes)
    assert routes["/init_weight_transfer_engine"] == ["raw_request", "init_info"]
    assert routes["/start_weight_update"] == ["raw_request"]
    assert routes["/update_weights"] == ["raw_request", "update_info"]
    assert routes["/finish_weight_update"] == ["raw_request", "weight_version"]
    assert {"/pause", "/resume", "/weight_checker"} <= set(routes)
    assert ask(inside.list_pauses) == ["abort", "wait", "keep"]


def test_only_one_pause_lets_new_requests_wait(ask: Ask) -> None:
    """The others answer them with an error, after which clients may try again."""
    assert ask(inside.queue_while_paused) == {"abort": False, "wait": False, "keep": True}


@pytest.mark.parametrize("model", sorted(MODELS.keys() - NOT_BUILT))
def test_loaders_store_what_rows_declare(ask: Ask, model: str, tmp_path: Path) -> None:
    """Of the newer vLLM's own models, built on the meta device, over 1, 2 and 4 ranks."""
    assert ask(inside.compare_loaders, checkpoints.save(fields(model), tmp_path)) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_quantizes_again_is_sent_its_checkpoint(
    ask: Ask, tp: int, tmp_path: Path
) -> None:
    """It loads what a checkpoint has, as without it, and makes other tensors of that later."""
    whole = checkpoints.save(fields("llama", **TILED), tmp_path / "whole")
    tiles = formats.FP8Blocks((128, 128))
    quantized = [
        checkpoints.quantize(whole, tmp_path / "fp8", tiles),
        checkpoints.quantize_int8(whole, tmp_path / "int8"),
    ]
    for folder in quantized:
        again = ask(inside.record_again, folder, tp, {"linear": "fp8_per_channel"})
        assert again == ask(inside.record_again, folder, tp, None)


def test_vllm_s_checksums_are_of_a_worker_s_part_and_ours_of_the_whole(
    ask: Ask, tmp_path: Path
) -> None:
    folder = checkpoints.save(fields("llama"), tmp_path)
    (one,), ours, file = ask(inside.digest, folder, 1)
    two, ours_of_two, _ = ask(inside.digest, folder, 2)
    assert ours == ours_of_two == file
    assert len(ours) == len(checkpoints.shapes_of(folder))
    # By vLLM's, only what all workers have whole can be compared.
    for worker in two:
        same = {name for name, checksum in worker.items() if checksum == one[name]}
        assert same == {name for name in one if name.endswith("norm.weight")}
        assert len(same) < len(worker) == len(one)


def test_a_source_of_vllm_s_is_a_source(ask: Ask) -> None:
    assert ask(inside.send) == [True] * 4
