"""Systems: how a recorded model is declared, and what its loader does otherwise.

>>> find_system({"vllm": "0.33.0"}).__name__
'Vllm'
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.stored import Shapes, Stored
from shardmath.models.systems import hugging_face as hf
from shardmath.models.systems import torchtitan as titan
from shardmath.models.systems.config import Config
from shardmath.models.systems.megatron import megatron, pad_vocab
from shardmath.models.systems.megatron_shapes import SINCE_0_17, SINCE_0_19, logical_shapes
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.vllm import expert_tile, vllm

__all__ = ["Megatron", "Sglang", "System", "Torchtitan", "Vllm", "find_system"]

_Ids: TypeAlias = NDArray[np.int64]
_Json: TypeAlias = Mapping[str, Any]

VOCAB = 100
"""Words of every model that was recorded with Megatron, before padding."""
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a word of a class's name begins."""
WHOLE = re.compile(r"\d+")
SINCE = {(0, 17): SINCE_0_17, (0, 19): SINCE_0_19}
"""The field that configurations of Megatron-Core have since a version."""
SGLANG_SIZES = ("tp", "pp", "ep", "attn_dp", "attn_cp", "moe_dp")
EXPERT = re.compile(r"\.experts\.\d+\.")
SCALES = re.compile(r"\.experts\.\d+\..*_scale_inv$")


class System(Protocol):
    """How a model of one system is declared; `reshapes` where a tensor is declared in another shape than it is laid;
    `own` are names of tensors that the system makes and never fills, as a user names them in `prepare(own=)`."""

    reshapes: bool
    own: tuple[str, ...]

    def reference(self, ref: Mapping[str, tuple[int, ...]]) -> Bound:
        """The reference bound to its logical tensors."""
        ...

    def bind(self, layout: _Json, shapes: Shapes, processed: bool) -> Bound:
        """A layout bound to these logical tensors, as its weights are loaded or once they are processed."""
        ...

    def load(self, layout: _Json, rank: int, arrays: Mapping[str, _Ids]) -> Mapping[str, _Ids]:
        """The logical arrays as the rank's loader reads them: themselves, but for its faults."""
        ...


class Megatron:
    """A model of Megatron-Core, which declares stacked experts as [hidden, experts * ffn]."""

    reshapes = True

    def __init__(self, model: _Json, version: str = "0.16") -> None:
        self.model = model
        self.multiple = model["make_vocab_size_divisible_by"]
        self.pattern = model["kw"].get("pattern")
        self.config = {**_list_fields(version), **model["config"]}
        if self.pattern and "/" in self.pattern:
            self.config["mtp_num_layers"] = self.pattern.count("/")
        # Where a last stage has the tied embedding to predict further tokens, logits are computed from that copy.
        has_unread = model["tied"] and self.config.get("mtp_num_layers")
        self.own: tuple[str, ...] = ("output_layer.weight",) if has_unread else ()

    def reference(self, ref: Mapping[str, tuple[int, ...]]) -> Bound:
        """What one rank stores."""
        positions = ref.get("embedding.position_embeddings.weight", (0,))
        shapes = logical_shapes(
            self.config,
            vocab=pad_vocab(VOCAB, 1, self.multiple),
            tied=self.model["tied"],
            positions=positions[0],
            pattern=self.pattern,
            dtype="int64",
        )
        return bind(self._declare(self.config, range(1)), shapes)

    def bind(self, layout: _Json, shapes: Shapes, processed: bool) -> Bound:
        """What the ranks of a layout store."""
        given = layout["layout"]
        sizes = {name: given[name] for name in ("tp", "pp", "cp", "ep", "etp", "order")}
        sizes["vpp"] = given["vpp"] or 1
        config = {**self.config, **given["cfg"]}
        return bind(self._declare(config, range(given["world"]), **sizes), shapes)

    def _declare(self, config: _Json, ranks: range, **sizes: Any) -> Stored:
        return megatron(
            config,
            ranks=ranks,
            spec=self.model["impl"],
            vocab=VOCAB,
            vocab_multiple=self.multiple,
            **sizes,
        )

    def load(self, layout: _Json, rank: int, arrays: Mapping[str, _Ids]) -> Mapping[str, _Ids]:
        """The arrays themselves."""
        return arrays


def _list_fields(version: str) -> dict[str, Any]:
    """The fields by which a configuration of this version differs: a recorded one has only those that were given."""
    numbers = tuple(map(int, WHOLE.findall(version)[:2]))
    return {field: None for since, field in SINCE.items() if numbers >= since}


class _Checkpoint:
    """A model whose reference is a Hugging Face checkpoint."""

    reshapes = False
    own: tuple[str, ...] = ()

    def __init__(self, model: _Json) -> None:
        kind = _name_kind(model["hf"])
        self.config = {**model["config"], **model["config_over"], "model_type": kind}

    def reference(self, ref: Mapping[str, tuple[int, ...]]) -> Bound:
        """How the checkpoint stores the logical tensors that its shapes say."""
        natives = {name: (shape, "int64") for name, shape in ref.items()}
        shapes = hf.logical_shapes(self.config, natives)
        return bind(hf.hugging_face(self.config, ref), shapes)


class Sglang(_Checkpoint):
    """A model of SGLang."""

    def bind(self, layout: _Json, shapes: Shapes, processed: bool) -> Bound:
        """What the ranks of a layout store."""
        given = layout["layout"]
        sizes = {name: given.get(name, 1) for name in SGLANG_SIZES}
        side = sglang(
            self.config,
            ranks=range(sizes["tp"] * sizes["pp"]),
            moe_dense_tp=given.get("moe_dense_tp_size"),
            dp_lm_head=given.get("enable_dp_lm_head", False),
            whole_shared="SGLANG_SHARED_EXPERT_TP1" in given,
            **sizes,
        )
        return bind(side, shapes)

    def load(self, layout: _Json, rank: int, arrays: Mapping[str, _Ids]) -> Mapping[str, _Ids]:
        """The arrays themselves."""
        return arrays


class Torchtitan(_Checkpoint):
    """A model of torchtitan."""

    def reference(self, ref: Mapping[str, tuple[int, ...]]) -> Bound:
        """How the checkpoint stores the logical tensors that its shapes say."""
        natives = {name: (shape, "int64") for name, shape in ref.items()}
        shapes = titan.logical_shapes(self.config, natives)
        return bind(titan.checkpoint(self.config, ref), shapes)

    def bind(self, layout: _Json, shapes: Shapes, processed: bool) -> Bound:
        """What one rank stores."""
        return bind(titan.torchtitan(self.config, ranks=range(1)), shapes)

    def load(self, layout: _Json, rank: int, arrays: Mapping[str, _Ids]) -> Mapping[str, _Ids]:
        """The arrays themselves."""
        return arrays


class Vllm(_Checkpoint):
    """A model of vLLM."""

    def bind(self, layout: _Json, shapes: Shapes, processed: bool) -> Bound:
        """What the ranks of a layout store: of the model, or of its layers that predict further tokens."""
        given, options = layout["layout"], layout["layout"]["kw"]
        sizes = {name: given[name] for name in ("tp", "pp", "dp")}
        draft = "MTP" in layout["module_class"]
        # What balances experts places them itself, with or without redundant ones.
        placement = "linear" if options.get("enable_eplb") else given["place"]
        side = vllm(
            self.config,
            ranks=range(math.prod(sizes.values())),
            ep=given["ep"],
            placement=placement,
            redundant=options.get("eplb_config", {}).get("num_redundant_experts", 0),
            backend=_find_backend(layout),
            processed=processed,
            draft=draft,
            unknown="replicate",
            **sizes,
        )
        shapes = self._refine_shapes(layout, shapes)
        if draft:
            # Some drafts read the model's own embedding and head, and none its layers.
            return bind(side, shapes, unused=("model.*", "lm_head.*"))
        own = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
        return bind(side, own)

    def _find_refined(self, layout: _Json) -> int:
        """How often scales of experts are repeated in each dimension, so that no rank cuts a tile."""
        given = layout["layout"]
        sizes = {name: given[name] for name in ("tp", "dp", "ep")}
        finer = expert_tile(self.config, backend=_find_backend(layout), **sizes)
        tile = Config(self.config).tile
        return 1 if tile is None or finer is None else tile[0] // finer[0]

    def _refine_shapes(self, layout: _Json, shapes: Shapes) -> Shapes:
        """The shapes; experts' scales have the shapes in which vLLM repeats them."""
        times = self._find_refined(layout)
        return {
            name: (tuple(n * times for n in shape), dtype)
            if SCALES.search(name)
            else (shape, dtype)
            for name, (shape, dtype) in shapes.items()
        }

    def load(self, layout: _Json, rank: int, arrays: Mapping[str, _Ids]) -> Mapping[str, _Ids]:
        """The arrays; experts' scales are repeated where ranks would cut their tiles, and if ranks have unequally many
        experts, gpt_oss reads one for all of a rank.

        `gpt_oss.py` loads from expert `rank * (experts // ep)` on, and copies one expert into two slots without an
        error. What refits into these slots has to write the experts that the rows say.
        """
        given = layout["layout"]
        size = given["tp"] * given["dp"]
        times = self._find_refined(layout)
        if times > 1:
            arrays = {
                name: array.repeat(times, -2).repeat(times, -1) if SCALES.search(name) else array
                for name, array in arrays.items()
            }
        experts = self.config.get("num_local_experts", 0)
        if (
            not self.config["model_type"].startswith("gpt_oss")
            or not given["ep"]
            or experts % size == 0
        ):
            return arrays
        replica, inside = divmod(rank, given["pp"] * given["tp"])
        own = replica * given["tp"] + inside % given["tp"]
        read = f".experts.{own * (experts // size)}."
        return {name: arrays[EXPERT.sub(read, name)] for name in arrays}


def _find_backend(layout: _Json) -> str:
    """The backend of experts that was chosen, as an option of vLLM calls it."""
    chosen = layout["moe_backend"] or ["triton"]
    return str(chosen[0]).rpartition(".")[2].lower()


def _name_kind(name: str) -> str:
    """The `model_type` of a configuration class."""
    words = WORD.sub("_", name.removesuffix("Config"))
    return words.lower()


def find_system(meta: _Json) -> Callable[[_Json], System]:
    """Who recorded the file."""
    named: dict[str, Callable[[_Json], System]] = {
        "vllm": Vllm,
        "sglang": Sglang,
        "torchtitan": Torchtitan,
    }
    for name, system in named.items():
        if name in meta:
            return system
    version = str(meta.get("megatron_core", ""))
    return functools.partial(Megatron, version=version)
