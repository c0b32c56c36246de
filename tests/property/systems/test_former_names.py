"""Names and paths that systems had before are found where the systems are now."""

from __future__ import annotations

from importlib import import_module

import pytest

FORMER = {
    "shardmath.families.megatron_core.megatron": "megatron.megatron",
    "shardmath.families.megatron_core.logical_shapes": "megatron.logical_shapes",
    "shardmath.families.megatron_shapes.logical_shapes": "megatron.logical_shapes",
    "shardmath.families.hf_plans.hf_parallel": "hf_plans.hf_parallel",
    "shardmath.engines.vllm_core.vllm": "vllm.vllm",
    "shardmath.engines.sglang_core.sglang": "sglang.sglang",
    "shardmath.engines.torchtitan.torchtitan": "torchtitan.torchtitan",
    "shardmath.engines.hf_core.logical_shapes": "hugging_face.logical_shapes",
}
"""What pages showed, and where it is within the systems."""

NAMES = {
    "shardmath.families.megatron.trainer": "former.trainer",
    "shardmath.families.vllm.engine": "former.engine",
    "shardmath.families.vllm.KV": "former.KV",
    "shardmath.engines.hf_core.hf_checkpoint": "hugging_face.hugging_face",
}
"""The same, of names that their module no longer has."""


def find(path: str) -> object:
    module, _, name = path.rpartition(".")
    package, _, last = module.rpartition(".")
    # As `from package import last` finds it, which asks the package before it imports anything.
    found = getattr(__import__(package, fromlist=[last]), last)
    assert found is import_module(module)
    return getattr(found, name)


@pytest.mark.parametrize("path", FORMER)
def test_what_pages_showed_is_found(path: str) -> None:
    assert find(path) is find(f"shardmath.models.systems.{FORMER[path]}")


@pytest.mark.parametrize("path", NAMES)
def test_a_name_that_moved_is_found_with_a_warning(path: str) -> None:
    now = f"shardmath.models.systems.{NAMES[path]}"
    with pytest.warns(DeprecationWarning, match=f" is {now}$"):
        found = find(path)
    assert found is find(now)


def test_a_name_that_never_was() -> None:
    module = import_module("shardmath.models.systems.vllm")
    with pytest.raises(AttributeError, match=r"systems\.vllm' has no attribute 'trainer'"):
        module.trainer  # noqa: B018
