"""The program of docs/from-jax.md that trains with JAX: a server answers as transformers does after the same steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.pool import free_port
from tests.vllm.served.servers import ask, serve
from tests.vllm.served.sessions import begin, run

ROOT = Path(__file__).parents[3]
PROGRAM = re.compile(
    r"^```python\n(# jax_vllm\.py, in \.venv-vllm\n.*?)^```\n```text\n(.*?)^```$", re.M | re.S
)
TINY = re.compile(r"^```python\n(# tiny\.py, .*?)^```\n", re.M | re.S)
ENGINE, STORE = "http://127.0.0.1:8000", "127.0.0.1:29600"
PROMPT = [1, 2, 3, 4]
COUNT = 8
STEPS, RATE = 3, 0.1
TIMEOUT_S = 200.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints that the program of docs/vllm.md writes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = TINY.search((ROOT / "docs/vllm.md").read_text())
    assert found is not None
    (folder / "tiny.py").write_text(found[1])
    for seed in "01":
        run([str(folder / "tiny.py"), str(folder / seed), seed], {}, folder / "log", timeout=100)
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module")
def url(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the first."""
    with serve(folders[:1], tmp_path_factory.mktemp("logs"), "--dtype=float32") as (started,):
        yield started


def train(model: Any) -> None:
    """The steps of the program, by torch."""
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        for weight in model.parameters():
            weight.data -= RATE * weight.grad
            weight.grad = None


def generate(model: Any) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers' model, and their log probabilities."""
    tokens, logs = torch.tensor([PROMPT]), []
    with torch.no_grad():
        for _ in range(COUNT):
            best = model(tokens).logits[0, -1].log_softmax(-1).max(-1)
            tokens = torch.cat([tokens, best.indices.reshape(1, 1)], 1)
            logs.append(best.values.item())
    return tokens[0, len(PROMPT) :].tolist(), logs


def complete(url: str) -> tuple[list[int], list[float]]:
    """The same of the engine."""
    said = {
        "model": ask(f"{url}/v1/models")["data"][0]["id"],
        "prompt": PROMPT,
        "max_tokens": COUNT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "detokenize": False,
        "logprobs": 1,
    }
    (answer,) = ask(f"{url}/v1/completions", said)["choices"]
    return answer["token_ids"], answer["logprobs"]["token_logprobs"]


def check_same(url: str, model: Any) -> list[int]:
    """The tokens of both."""
    tokens, logs = complete(url)
    expected_tokens, expected_logs = generate(model)
    assert tokens == expected_tokens
    assert logs == pytest.approx(expected_logs, abs=2e-3)
    return tokens


def run_jax(url: str, checkpoint: Path, sizes: Sequence[int], folder: Path) -> None:
    """The page's program in processes with these numbers of devices."""
    found = PROGRAM.search((ROOT / "docs/from-jax.md").read_text())
    assert found is not None
    text, printed = found.groups()
    assert ENGINE in text
    assert STORE in text
    text = text.replace(ENGINE, url).replace(STORE, f"127.0.0.1:{free_port()}")
    (folder / "jax_vllm.py").write_text(text)
    (folder / "vllm.py").write_text("raise ImportError('a trainer needs no vLLM')")
    path = f"{folder}:{ROOT}:{ROOT / 'backends'}"
    of_jax = f"127.0.0.1:{free_port()}"
    with ExitStack() as running:
        started = []
        for place, devices in enumerate(sizes):
            flags = f"--xla_force_host_platform_device_count={devices}"
            env = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            words = ["jax_vllm.py", str(checkpoint), str(place), str(len(sizes)), of_jax]
            log = folder / f"log{place}"
            started.append((running.enter_context(begin(words, env, log)), log))
        for process, log in started:
            assert process.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
            steps = re.findall(r"^step .*\n", log.read_text(), re.M)
            assert len(steps) == STEPS
            # Other losses, where the checkpoint is another.
            assert checkpoint.name != "0" or "".join(steps) == printed


@pytest.mark.parametrize(
    ("seed", "sizes"), [(0, (1, 1)), (1, (8,)), (0, (4, 4))], ids=["apart", "alone", "both"]
)
def test_a_server_answers_what_was_trained_by_jax(
    url: str, folders: list[Path], seed: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """In processes of one device or several, which divide the rows of all matrices."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folders[seed], dtype=torch.float32)
    before = complete(url)
    if seed == 0 and sizes == (1, 1):
        check_same(url, model)
    run_jax(url, folders[seed], sizes, tmp_path)
    train(model)
    check_same(url, model)
    assert complete(url)[1] != pytest.approx(before[1], abs=2e-2)
