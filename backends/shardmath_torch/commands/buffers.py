"""`python -m shardmath buffers`: a model's flat buffers, under the rule of an optimizer, as a table and as pictures.

    python -m shardmath buffers deepseek-ai/DeepSeek-V3 --dp 128 --rule layer_wise --svg buffers.svg
    python -m shardmath buffers llama --dp 8 --bucket-size none --shared-embedding model.embed_tokens.weight

1. The model is a name of `configs.MODELS`, a folder with config.json, such a file, a model type of
   transformers ("llama" is its default config), or a Hub id. It is laid out whole, without tensor,
   pipeline or expert parallelism.
2. RULES lists the options of each rule; any other option is wrong usage. Names and shapes are the
   checkpoint's, while Megatron fuses q, k and v, and gate and up, and orders experts differently.
3. Under some rules experts have separate buffers: see RULES.
4. Exit status: see `command_line`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmath import ShardError, buffers
from shardmath.display.arguments import add_json, print_json, working, write_svg
from shardmath.display.pictures.buffer_drawing import buffer_svg
from shardmath.display.pictures.buffer_text import buffer_map
from shardmath.display.pictures.text import buffer_table
from shardmath_torch.commands.command_line import make_parser, read_count, run_command
from shardmath_torch.commands.models.configs import MODELS
from shardmath_torch.commands.models.shapes import parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["RULES", "Chosen", "command"]


class Chosen(NamedTuple):
    """A training framework's rule for packing parameters into flat buffers (1-d tensors), and the options of the
    command `python -m shardmath buffers` that can be used with this rule.

    `experts`: experts have separate buffers `always`, if `asked` (`--expert-dp`), or `never`.

    `sharded` says whether ranks divide its buffers.
    """

    rule: buffers.Rule
    sharded: bool
    bucket_size: bool
    busbw: bool
    experts: str


RULES: dict[str, Chosen] = {
    # rule                                                       sharded  bucket_size  busbw  experts
    "distributed_optimizer": Chosen(buffers.distributed_optimizer, True, True, True, "asked"),
    "data_parallel": Chosen(buffers.data_parallel, False, True, False, "never"),
    "layer_wise": Chosen(buffers.layer_wise, True, True, True, "asked"),
    "megatron_fsdp": Chosen(buffers.megatron_fsdp, True, True, False, "always"),
    "flat_parameter": Chosen(buffers.flat_parameter, True, False, False, "never"),
    "zero": Chosen(buffers.zero, True, False, False, "never"),
}
"""The rules. Megatron-Core separates experts that expert parallelism divides, Megatron-FSDP all, other rules none."""


def command(argv: Sequence[str]) -> int:
    """Print how a model's parameters lie in its flat buffers, as a table and text pictures, and return the exit status.
    `argv` has the arguments of the command `python -m shardmath buffers`."""
    parser = _make_parser()
    given = parser.parse_args(argv)
    chosen = RULES[given.rule]
    for option in _list_unsupported(given, chosen):
        parser.error(f"{option} does not apply to rule {given.rule}; leave it out")
    with working("laying out the buffers"):
        return run_command("buffers", lambda: _show(given, chosen), as_json=given.json)


def _make_parser() -> argparse.ArgumentParser:
    """The parser of `buffers`' arguments."""
    parser = make_parser("buffers", "Lay out a model's flat buffers, and show them.")
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help=f"folder or file of a config, model type, or one of {', '.join(MODELS)}",
    )
    add("--dp", type=read_count, required=True, help="data-parallel ranks")
    add("--expert-dp", type=read_count, help="data-parallel ranks of experts, if others")
    add(
        "--rule",
        choices=RULES,
        default="distributed_optimizer",
        help="whose buffers (distributed_optimizer)",
    )
    add(
        "--bucket-size",
        type=_read_bucket_size,
        help="elements; default: what Megatron-Core takes (if not given); none: one bucket",
    )
    add("--busbw", action="store_true", help="pad buckets for NCCL's full bus bandwidth")
    add("--dtype", help="of the parameters, the config's if not given")
    add(
        "--shared-embedding",
        metavar="NAME",
        action="append",
        default=[],
        help="an embedding on two pipeline stages",
    )
    add("--most", type=read_count, default=4, help="buckets and parameters of a bucket to show (4)")
    add_json(parser)
    add(
        "--svg",
        type=Path,
        metavar="FILE",
        help="write a picture; of several buffers FILE, FILE-1, FILE-2 ...",
    )
    return parser


def _read_bucket_size(text: str) -> int | str:
    return text if text in ("default", "none") else read_count(text)


def _list_unsupported(given: argparse.Namespace, chosen: Chosen) -> list[str]:
    """The given options that the rule does not take."""
    unsupported = []
    if given.bucket_size is not None and not chosen.bucket_size:
        unsupported.append("--bucket-size")
    if given.busbw and not chosen.busbw:
        unsupported.append("--busbw")
    if given.expert_dp is not None and chosen.experts == "never":
        unsupported.append("--expert-dp")
    return unsupported


def _show(given: argparse.Namespace, chosen: Chosen) -> None:
    """Print the table and the text pictures, and write drawings if `--svg` is given."""
    params = parameters(_find_model(given.model), dtype=given.dtype, shared=given.shared_embedding)
    if not _has_expert_buffers(given, chosen):
        params = tuple(replace(param, expert_parallel=False) for param in params)
    layouts = buffers.full_layout(params, rule=chosen.rule, **_options(given, chosen))
    if given.json:
        listed = [_buffer_facts(given, chosen, key, layout) for key, layout in layouts.items()]
        print_json("buffers", {"model": given.model, "rule": given.rule, "buffers": listed})
    else:
        print(buffer_table(layouts))
    for number, (key, layout) in enumerate(layouts.items()):
        ranks = _count_ranks(given, chosen, key)
        contents = _describe_contents(key)
        title = f"{given.model}, {given.rule}: {contents}"
        if not given.json:
            text = buffer_map(layout, ranks, most=given.most)
            print(f"\n{title}\n{text}")
        if given.svg:
            drawing = buffer_svg(layout, ranks, most=given.most, title=title)
            _write_drawing(given, number, drawing)


def _write_drawing(given: argparse.Namespace, number: int, drawing: str) -> None:
    """Write the drawing of that number, and print its file."""
    file = _number_file(given.svg, number)
    _check_not_config(file, Path(given.model))
    write_svg(os.fspath(file), drawing)
    if not given.json:
        print(f"\ndrawn in {file}")


def _buffer_facts(
    given: argparse.Namespace,
    chosen: Chosen,
    key: buffers.BufferKey,
    layout: buffers.PerBufferParamLayout,
) -> dict[str, Any]:
    """A buffer as values for JSON: positions are elements, from the first to one past the last."""
    placed = [
        {"name": name, "start": start, "stop": stop, "bucket": bucket}
        for name, (start, stop, bucket) in layout.placed
    ]
    return {
        **asdict(key),
        "ranks": _count_ranks(given, chosen, key),
        "elements": layout.numel,
        "padding": layout.padding,
        "buckets": [list(bucket) for bucket in layout.bucket_indices],
        "parameters": placed,
    }


def _has_expert_buffers(given: argparse.Namespace, chosen: Chosen) -> bool:
    """Whether experts have separate buffers."""
    if chosen.experts == "asked":
        return given.expert_dp is not None
    return chosen.experts == "always"


def _number_file(file: Path, number: int) -> Path:
    """FILE for the first picture, FILE-1 for the second, and so on."""
    return file.with_stem(f"{file.stem}-{number}") if number else file


def _check_not_config(file: Path, model: Path) -> None:
    """Raise ShardError if the drawing would overwrite the model's config, by any link."""
    config = model / "config.json" if model.is_dir() else model
    if file.exists() and config.exists() and os.path.samefile(file, config):
        raise ShardError(f"--svg {file} is {config}, which describes the model; give another file")


def _find_model(text: str) -> PretrainedConfig | str:
    """The default config, if the text is a model type and neither in MODELS nor a path; else the text."""
    from transformers import CONFIG_MAPPING

    if text in MODELS or Path(text).exists() or text not in CONFIG_MAPPING:
        return text
    return CONFIG_MAPPING[text]()


def _options(given: argparse.Namespace, chosen: Chosen) -> dict[str, Any]:
    """The rule's keyword arguments."""
    elements: int | None
    if given.bucket_size is None or given.bucket_size == "default":
        elements = buffers.default_bucket_size(given.dp)
    elif given.bucket_size == "none":
        elements = None
    else:
        elements = given.bucket_size
    # Each with its value, and whether the rule takes it.
    options = {
        "data_parallel_world_size": (given.dp, chosen.sharded),
        "expert_data_parallel_world_size": (given.expert_dp, chosen.experts != "never"),
        "bucket_size": (elements, chosen.bucket_size),
        "pad_for_high_nccl_busbw": (given.busbw, chosen.busbw),
    }
    return {name: value for name, (value, taken) in options.items() if taken}


def _count_ranks(given: argparse.Namespace, chosen: Chosen, key: buffers.BufferKey) -> int:
    """How many ranks divide a buffer."""
    if not chosen.sharded:
        return 1
    experts_apart = key.is_expert_parallel and given.expert_dp
    return int(given.expert_dp if experts_apart else given.dp)


def _describe_contents(key: buffers.BufferKey) -> str:
    """The contents of a buffer, for its title."""
    words = [key.param_dtype, f"gradients {key.grad_dtype}"]
    if key.is_expert_parallel:
        words.append("experts")
    if key.is_managed_by_layer_wise_optimizer:
        words.append("managed")
    return ", ".join(words)
