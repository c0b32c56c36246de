"""The logical tensors of a Megatron-Core configuration: names and global shapes.

1. A configuration is a TransformerConfig, or a mapping of its fields; missing fields have Megatron's defaults.
2. Names are as in `megatron_rows`. Linear layers have (out, in) weights.
3. A layer is a list of **modules**, each with its norm before it: `*` attention, `-` dense MLP, `E` experts,
   `M` Mamba, `G` gated delta net, `+` latent attention; a hybrid model's pattern has these letters. A layer of a GPT is
   attention (or delta net) and an MLP.
4. In a pattern `|` divides stages, and each `/` begins the layers that predict one further token.

>>> shapes = logical_shapes({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}, vocab=10, tied=True)
>>> shapes["model.layers.0.self_attn.q_proj.weight"], len(shapes)
(((8, 8), 'float32'), 19)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from shardmath.base.errors import StoreError
from shardmath.models.storage.stored import Shapes

__all__ = ["SINCE_0_17", "SINCE_0_19", "MegatronConfig", "logical_shapes"]

Shape: TypeAlias = tuple[int, ...]

DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "gated_linear_unit": False,
    "normalization": "LayerNorm",
    "moe_layer_freq": 1,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
"""Megatron's defaults of fields, except those that are None or false."""
CONV = 4
"""The kernel size of Mamba's convolution, for which there is no field."""
SINCE_0_17 = "mtp_use_repeated_layer"
SINCE_0_19 = "mamba_training_ssm_states_dtype"
"""A field that configurations of Megatron-Core have since this version."""
MLA_Q_LORA = 512
"""The rank of latent queries if the field is missing; a field that is None means that queries are not latent."""


class MegatronConfig:
    """The fields of a Megatron configuration, with Megatron's defaults."""

    def __init__(self, given: object) -> None:
        self.fields = given if isinstance(given, Mapping) else vars(given)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the field `name`. If it is missing or None, return Megatron's default for this field, or
        `default` for a field without one."""
        value = self.fields.get(name)
        return DEFAULTS.get(name, default) if value is None else value

    @property
    def hidden(self) -> int:
        """The size of the hidden states."""
        return int(self.get("hidden_size"))

    @property
    def layers(self) -> int:
        """The number of layers of the model, without those that predict further tokens."""
        return int(self.get("num_layers"))

    @property
    def heads(self) -> int:
        """The number of attention (query) heads."""
        return int(self.get("num_attention_heads"))

    @property
    def groups(self) -> int:
        """The number of groups of query heads; each group has one key head and one value head."""
        return int(self.get("num_query_groups", self.heads))

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return int(self.get("kv_channels", self.hidden // self.heads))

    @property
    def ffn(self) -> int:
        """The inner size of the feed-forward network; by default 4 times the hidden size."""
        return int(self.get("ffn_hidden_size", 4 * self.hidden))

    @property
    def experts(self) -> int:
        """The number of routed experts per layer; 0 for a dense model."""
        return int(self.get("num_moe_experts", 0))

    @property
    def expert_ffn(self) -> int:
        """The inner size of a routed expert; by default the inner size of a dense MLP."""
        return int(self.get("moe_ffn_hidden_size", self.ffn))

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return bool(self.get("multi_latent_attention", False))

    @property
    def mtp(self) -> int:
        """The number of stored layers that predict further tokens; one that is used repeatedly is stored once."""
        layers = int(self.get("mtp_num_layers", 0))
        return min(1, layers) if self.repeats_mtp else layers

    @property
    def repeats_mtp(self) -> bool:
        """Whether one layer predicts all further tokens."""
        return bool(self.get(SINCE_0_17))


def logical_shapes(
    config: object,
    *,
    vocab: int,
    tied: bool = False,
    positions: int = 0,
    pattern: str | None = None,
    dtype: str = "float32",
) -> Shapes:
    """Return the shape and dtype of every tensor, by logical name, of a Megatron model with this `config` and
    vocabulary size `vocab`. `tied` omits the output layer, `positions` is the number of learned positions, and
    `pattern` has one letter per layer of a hybrid model.

    Raises StoreError for a letter that does not stand for a module, and for a pattern of another number of layers.
    """
    return {
        name: (shape, dtype) for name, shape in _list_all(config, vocab, tied, positions, pattern)
    }


def _list_all(
    given: object, vocab: int, tied: bool, positions: int, pattern: str | None
) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of all tensors of a model."""
    config = MegatronConfig(given)
    h = config.hidden
    yield "model.embed_tokens.weight", (vocab, h)
    if positions:
        yield "model.position_embeddings.weight", (positions, h)
    main, *_ = (pattern or "").replace("|", "").split("/")
    if main and len(main) != config.layers:
        what = f"pattern={pattern!r} has {len(main)} layers before any '/', and num_layers is {config.layers}"
        raise StoreError(f"{what}; give one letter per layer")
    for layer in range(config.layers):
        modules = main[layer] if main else _choose_modules(config, layer)
        for name, shape in _list_layer(config, modules):
            yield f"model.layers.{layer}.{name}", shape
    yield from _norm(config, "model.norm", h)
    if not tied:
        yield "lm_head.weight", (vocab, h)
    yield from _list_further(config, pattern or "")


def _list_further(config: MegatronConfig, pattern: str) -> Iterator[tuple[str, Shape]]:
    """The tensors that predict further tokens: by the pattern's layers, or as the last layer of the model."""
    main, *further = pattern.split("/")
    if config.repeats_mtp:
        further = further[:1]
    listed = _list_hybrid_mtp
    if not further:
        listed = _list_mtp
        further = [main[-1:] or _choose_modules(config, config.layers - 1)] * config.mtp
    for depth, modules in enumerate(further):
        for name, shape in listed(config, modules):
            yield f"mtp.{depth}.{name}", shape


def _choose_modules(config: MegatronConfig, layer: int) -> str:
    """The modules of a layer of a GPT, as letters."""
    mixer = "*"
    if config.get("experimental_attention_variant") == "gated_delta_net":
        frequency = config.get("linear_attention_freq")
        # Every n-th layer is attention; or a list has 1 for each delta net, and 0 for attention.
        is_attention = (
            (layer + 1) % frequency == 0 if isinstance(frequency, int) else not frequency[layer]
        )
        mixer = "*" if is_attention else "G"
    return mixer + _choose_mlp(config, layer)


def _choose_mlp(config: MegatronConfig, layer: int) -> str:
    """The letter of a layer's MLP: experts, or dense."""
    if not config.experts:
        return "-"
    # Every n-th layer from the first has experts; or a list has 1 for each layer with experts.
    frequency = config.get("moe_layer_freq")
    routed = layer % frequency == 0 if isinstance(frequency, int) else frequency[layer]
    return "E" if routed else "-"


def _list_layer(config: MegatronConfig, modules: str) -> Iterator[tuple[str, Shape]]:
    """The tensors of one layer."""
    makers = {
        "*": ("input_layernorm", _list_attention),
        "G": ("input_layernorm", _list_delta_net),
        "+": ("input_layernorm", _list_latent),
        "M": ("input_layernorm", _list_mamba),
        "-": ("post_attention_layernorm", _list_mlp),
        "E": ("post_attention_layernorm", _list_experts),
    }
    for module in modules:
        if module not in makers:
            letters = " ".join(makers)
            what = f"the letter {module!r} of the pattern stands for no module"
            raise StoreError(f"{what}; use only the letters {letters}")
        norm, make = makers[module]
        yield from _norm(config, norm, config.hidden)
        yield from make(config)


def _list_mtp(config: MegatronConfig, modules: str) -> Iterator[tuple[str, Shape]]:
    """The tensors of a layer that predicts a further token: these modules behind a projection."""
    yield from _list_projection(config)
    yield from _list_layer(config, modules)
    yield from _norm(config, "norm", config.hidden)


def _list_hybrid_mtp(config: MegatronConfig, modules: str) -> Iterator[tuple[str, Shape]]:
    """The same for a hybrid model, in which each module is a layer; the first has the projection, the last the norm."""
    for number, module in enumerate(modules):
        listed = list(_list_layer(config, module))
        if number == 0:
            listed = [*_list_projection(config), *listed]
        if number == len(modules) - 1:
            listed += _norm(config, "norm", config.hidden)
        for name, shape in listed:
            yield f"layers.{number}.{name}", shape


def _list_projection(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    """The projection of a hidden state and a token's embedding, with a norm of each."""
    h = config.hidden
    yield from _norm(config, "enorm", h)
    yield from _norm(config, "hnorm", h)
    yield "eh_proj.weight", (h, 2 * h)


def _norm(config: MegatronConfig, name: str, n: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (n,)
    if config.get("normalization") == "LayerNorm":
        yield f"{name}.bias", (n,)


def _linear(name: str, out: int, inner: int, bias: object = False) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _list_attention(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    if config.latent:
        yield from _list_latent(config)
        return
    h = config.hidden
    rows = config.heads * config.head_dim
    bias = config.get("add_bias_linear")
    qkv_bias = bias or config.get("add_qkv_bias")
    yield from _linear("self_attn.q_proj", rows, h, qkv_bias)
    if config.get("attention_output_gate"):
        yield from _linear("self_attn.g_proj", rows, h, qkv_bias)
    kv_rows = config.groups * config.head_dim
    for name in ("k", "v"):
        yield from _linear(f"self_attn.{name}_proj", kv_rows, h, qkv_bias)
    yield from _linear("self_attn.o_proj", h, rows, bias)
    if config.get("softmax_type") == "learnable":
        yield "self_attn.sinks", (config.heads,)
    if config.get("qk_layernorm"):
        yield from _norm(config, "self_attn.q_norm", config.head_dim)
        yield from _norm(config, "self_attn.k_norm", config.head_dim)


def _list_latent(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    h = config.hidden
    rank = config.get("kv_lora_rank")
    key_dim = config.get("qk_head_dim")
    rope_dim = config.get("qk_pos_emb_head_dim")
    value_dim = config.get("v_head_dim")
    yield from _list_latent_queries(config, key_dim + rope_dim)
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + rope_dim, h)
    rows = config.heads * (key_dim + value_dim)
    yield from _linear("self_attn.kv_b_proj", rows, rank)
    if config.get("qk_layernorm"):
        yield from _norm(config, "self_attn.kv_a_layernorm", rank)
    values = config.heads * value_dim
    bias = config.get("add_bias_linear")
    yield from _linear("self_attn.o_proj", h, values, bias)


def _list_latent_queries(config: MegatronConfig, head: int) -> Iterator[tuple[str, Shape]]:
    """Queries with `head` elements per head, latent or not."""
    # A field that is None means that queries are not latent; a missing field means the default rank.
    rank = config.fields.get("q_lora_rank", MLA_Q_LORA)
    if rank is None:
        yield from _linear("self_attn.q_proj", config.heads * head, config.hidden)
        # From 0.19 on, TransformerEngine's modules have a second norm of the layer's input before the queries.
        if config.get("qk_layernorm") and SINCE_0_19 in config.fields:
            yield from _norm(config, "self_attn.q_a_layernorm", config.hidden)
        return
    yield from _linear("self_attn.q_a_proj", rank, config.hidden)
    yield from _linear("self_attn.q_b_proj", config.heads * head, rank)
    if config.get("qk_layernorm"):
        yield from _norm(config, "self_attn.q_a_layernorm", rank)


def _list_mlp(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    yield from _ffn(config, "mlp.", config.ffn, config.hidden)


def _ffn(config: MegatronConfig, prefix: str, inner: int, h: int) -> Iterator[tuple[str, Shape]]:
    bias = config.get("add_bias_linear")
    if config.get("gated_linear_unit"):
        yield from _linear(f"{prefix}gate_proj", inner, h, bias)
    yield from _linear(f"{prefix}up_proj", inner, h, bias)
    yield from _linear(f"{prefix}down_proj", h, inner, bias)


def _list_experts(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    h = config.hidden
    bias = config.get("add_bias_linear")
    yield from _linear("mlp.gate", config.experts, h, bias)
    if config.get("moe_router_enable_expert_bias"):
        yield "mlp.gate.e_score_correction_bias", (config.experts,)
    yield from _list_routed(config)
    shared = config.get("moe_shared_expert_intermediate_size")
    if shared:
        yield from _ffn(config, "mlp.shared_experts.", shared, h)
        if config.get("moe_shared_expert_gate"):
            yield "mlp.shared_expert_gate.weight", (1, h)


def _list_routed(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    h = config.hidden
    bias = config.get("add_bias_linear")
    latent = config.get("moe_latent_size")
    if latent:
        yield from _linear("mlp.fc1_latent_proj", latent, h, bias)
        yield from _linear("mlp.fc2_latent_proj", h, latent, bias)
    for expert in range(config.experts):
        yield from _ffn(config, f"mlp.experts.{expert}.", config.expert_ffn, latent or h)


def _list_mamba(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    h = config.hidden
    head = config.get("mamba_head_dim")
    heads = config.get("mamba_num_heads", 2 * h // head)
    inner = heads * head
    # The heads of a group share B and C, and each head has its own z and x.
    state = config.get("mamba_num_groups") * config.get("mamba_state_dim")
    sizes = {"z": inner, "x": inner, "B": state, "C": state, "dt": heads}
    for name, n in sizes.items():
        yield f"mixer.{name}.weight", (n, h)
    for name in ("x", "B", "C"):
        yield f"mixer.conv_{name}.weight", (sizes[name], 1, CONV)
        yield f"mixer.conv_{name}.bias", (sizes[name],)
    for name in ("A_log", "D", "dt_bias"):
        yield f"mixer.{name}", (heads,)
    yield "mixer.norm.weight", (inner,)
    yield from _linear("mixer.out_proj", h, inner, False)


def _list_delta_net(config: MegatronConfig) -> Iterator[tuple[str, Shape]]:
    h = config.hidden
    heads = config.get("linear_num_value_heads")
    keys = config.get("linear_num_key_heads") * config.get("linear_key_head_dim")
    head = config.get("linear_value_head_dim")
    values = heads * head
    sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    for name, n in sizes.items():
        yield f"linear_attn.{name}.weight", (n, h)
    width = config.get("linear_conv_kernel_dim")
    for name in ("q", "k", "v"):
        yield f"linear_attn.conv_{name}.weight", (sizes[name], 1, width)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (head,)
    yield from _linear("linear_attn.out_proj", h, values)
