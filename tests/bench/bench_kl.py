"""How far quantized weights move what a language model says: the KL divergence of its next byte.

    python tests/bench/bench_kl.py [steps] [windows]

The reference is the model in bfloat16. Weights of linear layers are quantized and read as bfloat16 again; embeddings,
the head, norms and activations stay as they are. No pretrained language model can be had without a network, so a small
one is trained first, for so many steps, on the text that every Python has: its language reference. Divergences are in
nats per byte, of so many windows of text that it was not trained on. One thread, and seeds, so that runs repeat.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import shardmath_torch as smt
from shardmath.formats import FP8, MXFP8, NVFP4, Format, FP8Blocks
from tests.bench.section import arguments, show

HEAD = ["format", "KL", "KL, of masters", "KL between the two", "same likeliest byte"]
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(rounding="floor"),
    MXFP8("e5m2"),
    FP8Blocks(),
    FP8Blocks(power_of_two=True),
    FP8("channel"),
    FP8("tensor"),
    NVFP4(),
    NVFP4(two_d=True),
]
WIDTH = 128
"""Bytes of a window."""
BATCH = 8
PUBLISHED = (
    "Others have published figures for other models and texts. In these, activations are quantized, too. "
    "[InternLM/xtuner#2044](https://github.com/InternLM/xtuner/issues/2044) compares a trainer in FP8 with an engine "
    "in FP8 (Qwen3.5-35B-A3B, k3 estimates). If both quantize weights rounded to bfloat16, the KL is 3.3e-4 to 3.7e-4. "
    "If the trainer quantizes its float32 masters, the KL is 8.7e-3 after one step. "
    "[voipmonitor/rtx6kpro](https://github.com/voipmonitor/rtx6kpro), `benchmarks/kld-evaluation.md`, compares NVFP4 "
    "with FP8 (lukealonso/Qwen3.5-397B-A17B-NVFP4, WikiText-2). There the KL is 0.035 to 0.036."
)

Tensor: TypeAlias = torch.Tensor


def read_text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and the last tenth, which is held out."""
    parts = [topics[name] for name in sorted(topics)]
    text = bytearray("\n\n".join(parts).encode())
    numbers = torch.frombuffer(text, dtype=torch.uint8).long()
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:]


def make_model() -> LlamaForCausalLM:
    """Four layers, whose matrices are several tiles of 128 x 128."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WIDTH,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, text: Tensor, steps: int) -> None:
    """AdamW in float32, the rate up and down once."""
    most = 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=most, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, most, total_steps=steps)
    windows = text.unfold(0, WIDTH, 1)
    for _ in range(steps):
        drawn = torch.randint(len(windows), (BATCH,))
        batch = windows[drawn]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def list_linear(model: LlamaForCausalLM) -> Iterator[Tensor]:
    """The weights that are quantized: all of the layers' but norms."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            yield module.weight.detach()


def read_as(model: LlamaForCausalLM, read: Callable[[Tensor], Tensor]) -> LlamaForCausalLM:
    """The model in bfloat16, with what `read` makes of each float32 master."""
    copied = copy.deepcopy(model).bfloat16()
    for master, weight in zip(list_linear(model), list_linear(copied), strict=True):
        weight.copy_(read(master))
    return copied


def ask(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Logarithms of the probabilities of each next byte, windows x bytes x 256."""
    with torch.inference_mode():
        logits = model(input_ids=windows).logits
    return functional.log_softmax(logits.float(), dim=-1)


def diverge(first: Tensor, second: Tensor) -> float:
    """The mean of KL(first || second) over positions."""
    sizes = functional.kl_div(second, first, log_target=True, reduction="none").sum(-1)
    return sizes.double().mean().item()


def measure(one: Format, model: LlamaForCausalLM, windows: Tensor, reference: Tensor) -> list[str]:
    """A row of the table."""

    def pass_through(weight: Tensor) -> Tensor:
        return smt.dequantize(one, smt.quantize(one, weight), torch.bfloat16)

    rounded = read_as(model, lambda master: pass_through(master.bfloat16()))
    direct = read_as(model, pass_through)
    said = ask(rounded, windows)
    found = [diverge(reference, said), diverge(reference, ask(direct, windows))]
    # In bfloat16 the rounding of activations hides the difference.
    found.append(diverge(ask(rounded.float(), windows), ask(direct.float(), windows)))
    same = (said.argmax(-1) == reference.argmax(-1)).double().mean().item()
    cells = [f"{size:.2e}" for size in found]
    return [one.name, *cells, f"{same:.1%}"]


def main(steps: int, count: int, page: Path | None = None) -> None:
    """Trains, measures all formats and shows the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, held_out = read_text()
    model = make_model()
    train(model, text, steps)
    windows = held_out[: count * WIDTH].view(-1, WIDTH)
    reference = ask(read_as(model, torch.Tensor.bfloat16), windows)
    loss = functional.nll_loss(reference[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).item()
    wide = diverge(reference, ask(model, windows))
    rows = [["none: float32 throughout", f"{wide:.2e}", "-", "-", "-"]]
    rows += [measure(one, model, windows, reference) for one in FORMATS]
    size = sum(weight.numel() for weight in model.parameters())
    about = (
        'The table says how far quantized weights move a model\'s predictions. The column "KL" is KL(bfloat16 || '
        f"format) of the next byte, in nats. It is the mean over {windows.numel():,} bytes of held-out text. The model "
        f"is a Llama of 4 layers and {size / 1e6:.1f} million weights. The run downloads nothing, so it trains the "
        f"model for {steps} steps on Python's language reference. In bfloat16, the model's loss is "
        f"{loss:.2f} nats per byte. Arithmetic is in bfloat16, and only the weights of linear layers are quantized. In "
        'the column "KL", they are rounded to bfloat16 before they are quantized. In the column "KL, of masters", the '
        "float32 weights are quantized directly. The first row quantizes nothing: it compares the model in bfloat16 "
        'with the model in float32. The column "KL between the two" is the KL between the model of the '
        'column "KL" and the model of the column "KL, of masters". It uses float32 arithmetic, since bfloat16 would '
        'hide the difference. The column "same likeliest byte" is the share of bytes for which the model in '
        'bfloat16 and the model of the column "KL" predict the same likeliest byte. If a trainer and an engine '
        "quantize the same way, their bytes are equal, and the KL between them is 0. `tests/bench/bench_kl.py` "
        f"measures this.\n\n{PUBLISHED}"
    )
    show(page, "KL of quantized weights", about, HEAD, rows)


if __name__ == "__main__":
    given = arguments(__doc__ or "", steps=600, windows=64)
    main(given.steps, given.windows, given.page)
