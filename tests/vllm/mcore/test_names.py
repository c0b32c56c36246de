"""vLLM's loaders take Megatron-Core's tensors by the rows of a checkpoint, and store what they do of the checkpoint.

Numbers go two ways into vLLM's model: as transformers saves them, and as the plain reference says that Megatron has
them, which rows then read. No engine runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

import shardmath_torch as smt
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.storage import bind, gather
from shardmath_torch.tensors.conversions.saved import record_conversion
from shardmath_vllm.converting import convert, declare_conversion
from tests.megatron import configs, trainer
from tests.megatron.cases import PLAIN, Case
from tests.references.checkpoint import unstack
from tests.references.megatron import Trainer, store
from tests.vllm import checkpoints, engine
from tests.vllm.cases import VOCAB, fields
from tests.vllm.test_recording import FUNCTIONS, number

Arrays = dict[str, Any]

MORE = {"qwen3_moe": {"mlp_only_layers": []}}
"""Which layers have experts is not compared."""
CONVERTED = {"mixtral", "nemotron_h"}
"""Models whose checkpoints have other names, or fused tensors."""


@pytest.mark.parametrize("model", PLAIN)
def test_loaders_take_megatrons_tensors_as_a_checkpoint(model: str, tmp_path: Path) -> None:
    folder = checkpoints.save(fields(model, **MORE.get(model, {})), tmp_path)
    hf = transformers.AutoConfig.from_pretrained(folder)
    original = build_empty(hf)
    memory = number(original.shapes)
    spec = "te" if model == "nemotron_h" else "local"
    case = Case(model, layers=hf.num_hidden_layers, spec=spec)
    held, shapes = read_as_megatron(memory, case, hf)
    conversion = declare_conversion(hf, shapes)
    assert (conversion is not None) == (model in CONVERTED)
    saved, served = save_numbers(original, memory)
    with engine.built(folder) as built:
        names = [name for name, _ in built.named_parameters()]
        functions = {name: "neg_exp" for name in names if name.endswith(FUNCTIONS)}
        more: dict[str, Any] = {"form": "pairs", "functions": functions}

        def load(pairs: Any) -> None:
            built.load_weights(pairs if conversion is None else convert(conversion, pairs))

        wanted = smt.record(built.load_weights, served, built, **more).fill(saved)
        found = smt.record(load, shapes, built, **more).fill(held)
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not np.array_equal(found[name], wanted[name])]
    assert different == []


class Original(NamedTuple):
    """transformers' model without data, and its tensors."""

    model: Any
    shapes: checkpoints.Shapes


def build_empty(hf: Any) -> Original:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    tensors = trainer.own_tensors(model)
    return Original(model, {name: (tuple(t.shape), "bfloat16") for name, t in tensors.items()})


def save_numbers(original: Original, memory: Arrays) -> tuple[Arrays, checkpoints.Shapes]:
    """The numbers as transformers saves them, and the shapes of that."""
    recorded = record_conversion(original.model, original.shapes)
    if recorded is None:
        return memory, original.shapes
    served = {native.name: (native.shape, native.dtype) for native in recorded.natives}
    return recorded.fill(memory), served


def read_as_megatron(memory: Arrays, case: Case, hf: Any) -> tuple[Arrays, checkpoints.Shapes]:
    """The numbers by the logical names of rows, read off what the reference says that one rank of Megatron stores."""
    config = configs.configure(case, hf)
    shapes = logical_shapes(config, vocab=VOCAB, pattern=case.pattern, dtype="bfloat16")
    side = megatron(config, ranks=range(1), spec=case.spec, vocab=VOCAB)
    fields_ = {**hf.to_dict(), "num_hidden_layers": hf.num_hidden_layers}
    plain = Trainer(range(1), te=case.spec == "te", multiple=128)
    (stored,) = store(unstack(memory), fields_, plain, 0)
    natives = {(0, name): array for name, array in stored.items()}
    return gather(bind(side, shapes), {0: natives}, [0]), shapes
