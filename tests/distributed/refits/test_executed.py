"""Refits of every family over gloo, between storage that plain references fill and check.

1. A trainer's storage is filled by `tests/references/megatron.py`. After each of three steps, with other weights each,
   every byte of the engines is what `tests/references/vllm.py` loads.
2. The refit the other way gives the trainer's bytes back.
3. A transformers model of what the engines store gives the logits of the original, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.distributed.pool import Pool
from tests.distributed.tasks import executed
from tests.distributed.tasks.executed import STEPS, Found
from tests.references import vllm
from tests.references.checkpoint import Weights, stack, unstack
from tests.references.megatron import Trainer
from tests.references.shapes import shapes_of
from tests.refits.cases import CASES, LARGE, MORE, Case
from tests.refits.families import FAMILIES

pytestmark = pytest.mark.long

TOKENS = torch.arange(32).mul(37).remainder(100).view(2, 16)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of so small a model would only wait for each other, beside workers that need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def make_model(family: str) -> Any:
    """The transformers model, with weights of its own."""
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**FAMILIES[family].hf)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def compute_logits(family: str, weights: Weights) -> Tensor:
    """What the model computes with these weights, all of which it takes."""
    model = make_model(family)
    state = {name: torch.from_numpy(array) for name, array in stack(weights).items()}
    if FAMILIES[family].tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model(TOKENS).logits


@functools.cache
def compute_wanted(family: str) -> Tensor:
    """What it computes with the weights of the last step."""
    case = Case(family, Trainer(range(1)), {})
    return compute_logits(family, executed.draw_step(case, STEPS - 1))


def check(pool: Pool, case: Case) -> None:
    """Nothing differs there or back, and logits are equal to the last bit."""
    back = {name: case.refit_back(name) for name in case.engines}
    found: list[Found] = pool.run(executed.move, case, case.refit(), back, timeout=100.0)
    for rank, one in enumerate(found):
        assert one.there == [], rank
        assert one.back == [], rank
    shapes = shapes_of(case.family.hf)
    for name, engine in case.engines.items():
        stored = {rank: found[rank].engines[name] for rank in engine.ranks}
        weights = vllm.unload(stored, case.family.hf, engine, shapes)
        logits = compute_logits(case.name, weights)
        assert torch.equal(logits, compute_wanted(case.name)), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_engines_load_what_the_trainer_stores(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_other_sizes(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Pool]:
    pool = Pool(16)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_sixteen_ranks(sixteen: Pool, case: Case) -> None:
    check(sixteen, case)


@pytest.mark.parametrize("family", FAMILIES)
def test_references_speak_of_transformers_models(family: str) -> None:
    state = {name: tensor.numpy() for name, tensor in make_model(family).state_dict().items()}
    if FAMILIES[family].tied:
        del state["lm_head.weight"]
    found = {name: array.shape for name, array in unstack(state).items()}
    assert found == shapes_of(FAMILIES[family].hf)


@pytest.mark.parametrize(
    ("family", "fused", "order"),
    [
        ("llama", "qkv", "k q v"),
        ("qwen3", "gated", "up gate"),
        ("qwen3_moe", "gated", "up gate"),
        ("deepseek_v3", "latent", "kv_a_proj_with_mqa q_a_proj"),
        ("nemotron_h", "mamba", "x z B C dt"),
        ("nemotron_h", "conv", "x C B"),
    ],
)
def test_an_engine_in_another_order_gives_other_logits(family: str, fused: str, order: str) -> None:
    """So that equal logits say something."""
    case = Case(family, Trainer(range(1)), {})
    engine = vllm.Engine(range(1))
    swapped = {**vllm.ORDER, fused: tuple(order.split())}
    weights = executed.draw_step(case, STEPS - 1)
    stored = vllm.load(weights, case.family.hf, engine, 0, order=swapped)
    read = vllm.unload({0: stored}, case.family.hf, engine, shapes_of(case.family.hf))
    assert not torch.allclose(compute_logits(family, read), compute_wanted(family))
