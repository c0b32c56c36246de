"""Inside: what a host does with its engine (`llm` first), and what the engine's workers do of that (`worker` first)."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmath import ExchangeError

__all__ = [
    "ask_workers",
    "begin",
    "compare",
    "count_held",
    "digest",
    "fail",
    "finish",
    "generate",
    "is_refusing",
    "kill",
    "mend",
    "sleep",
    "step",
    "wake",
    "watch",
    "widen",
]

PROMPTS = (3, 50)
TOKENS = 12
LOGPROBS = 3


def generate(llm: Any, adapter: Path | None = None) -> Any:
    """Greedy tokens after two prompts, each with the logprobs of the likeliest ones; by an adapter, if there is one."""
    import vllm
    from vllm.lora.request import LoRARequest

    from tests.vllm.cases import VOCAB

    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=TOKENS, logprobs=LOGPROBS, detokenize=False, ignore_eos=True
    )
    prompts = []
    for start in PROMPTS:
        tokens = [(start + 37 * i) % VOCAB for i in range(8)]
        prompts.append({"prompt_token_ids": tokens})
    adapted = LoRARequest("adapter", 1, str(adapter)) if adapter else None
    answers = []
    for answer in llm.generate(prompts, greedy, use_tqdm=False, lora_request=adapted):
        output = answer.outputs[0]
        likely = [{token: one.logprob for token, one in at.items()} for at in output.logprobs]
        answers.append((list(output.token_ids), likely))
    return answers


# An engine that sleeps


def sleep(llm: Any, level: int) -> None:
    llm.sleep(level=level)


def wake(llm: Any, tags: list[str] | None = None) -> bool:
    """Whether all of the engine is awake now."""
    return bool(llm.wake_up(tags))


# A request under way


def begin(llm: Any, prompt: list[int], tokens: int, steps: int) -> list[int]:
    """The tokens that a request has after so many steps of the engine, of `tokens` that it asks for."""
    import vllm

    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True
    )
    llm.llm_engine.add_request("held", {"prompt_token_ids": prompt}, greedy)
    return step(llm, steps)


def step(llm: Any, steps: int) -> list[int]:
    """The request's tokens after so many steps more, or once it has all."""
    found: list[int] = []
    while steps and llm.llm_engine.has_unfinished_requests():
        for answer in llm.llm_engine.step():
            found = list(answer.outputs[0].token_ids)
        steps -= 1
    return found


def finish(llm: Any) -> list[int]:
    """All tokens of the request."""
    return step(llm, -1)


def ask_workers(llm: Any, act: Any, *args: Any) -> list[Any]:
    """What `act(worker, *args)` gives on each worker."""
    return list(llm.collective_rpc(act, args=args))


# Parameters


def digest(worker: Any) -> dict[str, str]:
    """Shape, type and bytes of all that the model has as parameters and buffers."""
    model = worker.model_runner.model
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor[None]
        told = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()
        found[name] = f"{tuple(tensor.shape)} {tensor.dtype} {told}"
    return found


def watch(worker: Any, folder: Path) -> None:
    """Compare what the next update brings with what vLLM's own loader stores of a checkpoint."""
    loading = worker.weight_transfer_engine._loading
    wanted = _load(worker.vllm_config, folder)
    worker.seen = seen = {}
    materialize, process = type(loading).materialize, type(loading).process
    arriving: dict[str, Tensor] = {}

    def keep(natives: Any) -> dict[str, Tensor]:
        made = materialize(loading, natives)
        arriving.update(made)
        return made

    def look(natives: Any) -> None:
        for native in natives:
            tensor = arriving.pop(native)
            # Beside adapters, an engine has a layer as their base.
            name = native.replace(".base_layer.", ".")
            seen[name] = tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name])
        process(loading, natives)

    # On the instance, before what its class has.
    loading.materialize, loading.process = keep, look
    worker.wanted = wanted


def compare(worker: Any) -> tuple[list[str], list[str]]:
    """Tensors of the checkpoint that did not come, and those that were others; nothing is watched any more."""
    mend(worker)
    absent = [name for name in worker.wanted if name not in worker.seen]
    other = [name for name, same in worker.seen.items() if not same]
    return absent, other


def widen(worker: Any) -> None:
    """Make biases float32, as vLLM does where its kernel asks for that."""
    for name, parameter in worker.model_runner.model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.data = parameter.data.float()


def mend(worker: Any) -> None:
    """Take away what was put in the place of the engine's own."""
    loading = worker.weight_transfer_engine._loading
    for name in ("materialize", "process", "_process"):
        vars(loading).pop(name, None)


def _load(config: Any, folder: Path) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a new model that has loaded the checkpoint, which vLLM has not processed."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tests.vllm import checkpoints

    with _beside(config) as own, set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        model = initialize_model(own)
        for _, tensor in _list_stored(model):
            tensor.data.fill_(_find_mark(tensor))
        blank = {name: tensor.clone() for name, tensor in _list_stored(model)}
        model.load_weights(checkpoints.read(folder))
    loaded = {}
    for name, tensor in _list_stored(model):
        # What loading has not written is no checkpoint's, such as scales of caches.
        if not torch.equal(tensor, blank[name]):
            loaded[name] = tensor.detach()
    return loaded


def _find_mark(tensor: Tensor) -> float:
    """What no checkpoint of random weights has all over a tensor."""
    limits = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return limits(tensor.dtype).min


def _list_stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict(keep_vars=True)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in kept:
            yield name, tensor


@contextlib.contextmanager
def _beside(config: Any) -> Iterator[Any]:
    """vLLM's configuration as of another model: it would not have two of one name."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    if isinstance(config.quant_config, OnlineQuantizationConfig):
        # What it quantizes as it loads is loaded as if it did not.
        own.quant_config = None
    with set_current_vllm_config(own):
        yield own


# Failures


def fail(worker: Any, rank: int, portion: int, how: str) -> None:
    """Have the worker of this rank "raise" as it processes a portion, or "die"."""
    loading = worker.weight_transfer_engine._loading
    process = type(loading).process
    left = [portion]

    def refuse(module: nn.Module, frees: bool) -> None:
        raise ArithmeticError("this layer cannot be processed")

    def act(natives: Any) -> None:
        if left[0] == 0:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            # Once kernels are freed for new ones.
            loading._process = refuse
        left[0] -= 1
        process(loading, natives)

    if worker.rank == rank:
        loading.process = act


def is_refusing(worker: Any) -> bool:
    """Whether the worker's model refuses to say what its weights make."""
    try:
        worker.model_runner.get_model().compute_logits(None)
    except ExchangeError as error:
        return "the weights are torn" in str(error)
    return False


def kill(worker: Any, rank: int) -> None:
    """End the worker of this rank at once."""
    if worker.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


# What is held


def count_held(worker: Any = None) -> dict[str, int]:
    """Open files, threads, and bytes of memory of this process."""
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
