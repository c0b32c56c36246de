"""Real servers of vLLM's take weights through its own routes, from trainers that have no vLLM."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
import transformers
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

import shardmath_vllm as smv
from shardmath.base.errors import ExchangeError
from tests.distributed.pool import free_port
from tests.vllm import checkpoints
from tests.vllm.served.servers import TP, ask, command, complete, serve
from tests.vllm.served.sessions import run

ROOT = Path(__file__).parents[3]
BLOCKS = re.compile(r"^```sh\n([^`]*)^```\n```python\n(# train\.py, [^`]*)^```$", re.M)
LOOP = re.compile(r"^```python\n(# loop\.py, .*?)^```\n", re.M | re.S)
TORCHRUN = ["--standalone", "--nproc-per-node", "2"]
TINY = re.compile(r"^```python\n(# tiny\.py, .*?)^```\n", re.M | re.S)
ENGINE, STORE = "http://127.0.0.1:8000", "127.0.0.1:29600"
TIMEOUT_S = 60.0

# Of which most is the start of two servers at once.
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints that the program of docs/vllm.md writes, and one with larger layers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = TINY.search((ROOT / "docs/vllm.md").read_text())
    assert found is not None
    program = folder / "tiny.py"
    program.write_text(found[1])
    for seed in "01":
        run([str(program), str(folder / seed), seed], {}, folder / f"log{seed}", timeout=100)
    config = json.loads((folder / "0/config.json").read_text())
    wider = config | {"intermediate_size": config["intermediate_size"] + 64}
    return [folder / "0", folder / "1", checkpoints.save(wider, folder / "wider")]


@pytest.fixture(scope="module")
def urls(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A server that was started on each of the two."""
    with serve(folders[:2], tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture(scope="module")
def expected(urls: list[str]) -> list[Any]:
    """What an engine that was started on each checkpoint answers."""
    answers = [complete(url) for url in urls]
    assert answers[0] != answers[1]
    return answers


@pytest.mark.usefixtures("expected")
def test_no_vllm_is_needed_to_speak_to_a_server(urls: list[str]) -> None:
    with pytest.raises(ExchangeError, match=r"500: .*start_weight_update must be called before"):
        smv.HTTPClient(urls[0]).update_weights({"number": 1})
    with pytest.raises(ExchangeError, match="no such route"):
        smv.HTTPClient(f"{urls[0]}/other").start_weight_update()


def test_the_readme_s_program_sends_what_an_engine_is_started_on(
    urls: list[str], folders: list[Path], expected: list[Any], tmp_path: Path
) -> None:
    """Its trainers cannot import vLLM; the server is asked all the while, and has the prompt cached."""
    with asking(urls[0]) as answers:
        run_readme(folders[1], urls[0], tmp_path)
    assert expected[0] in answers
    assert complete(urls[0]) == expected[1]


def test_docs_vllm_md_has_the_program_of_the_readme() -> None:
    """train.py is one program, in README.md and in docs/vllm.md."""
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/vllm.md")]
    (first,), (second,) = (re.findall(r"^# train\.py, [^`]*", page, re.M) for page in pages)
    assert first == second


def test_the_page_s_loop_sends_after_each_step(
    urls: list[str], folders: list[Path], expected: list[Any], tmp_path: Path
) -> None:
    """loop.py of docs/vllm.md: the server answers with what was trained, and then again with what was loaded."""
    found = LOOP.search((ROOT / "docs/vllm.md").read_text())
    assert found is not None
    printed = run_trainer("loop.py", found[1], folders[1], urls[0], tmp_path)
    steps = re.findall(r"rank 1, step (\d): loss [\d.]+, sent", printed)
    assert steps == ["0", "1", "2"]
    assert complete(urls[0]) not in expected
    run_readme(folders[1], urls[0], tmp_path)
    assert complete(urls[0]) == expected[1]


def run_trainer(name: str, text: str, checkpoint: Path, url: str, folder: Path) -> str:
    """What a program of a page prints on two ranks, where vLLM is no module that can be imported."""
    assert ENGINE in text
    assert STORE in text
    text = text.replace(ENGINE, url).replace(STORE, f"127.0.0.1:{free_port()}")
    (folder / name).write_text(text)
    (folder / "vllm.py").write_text("raise ImportError('a trainer needs no vLLM')")
    path = os.pathsep.join(map(str, [folder, ROOT, ROOT / "backends"]))
    words = ["-m", "torch.distributed.run", *TORCHRUN, name, str(checkpoint)]
    return run(words, {"PYTHONPATH": path}, folder / "log", timeout=200)


def run_readme(checkpoint: Path, url: str, folder: Path) -> None:
    """The README's program, under FSDP2."""
    found = BLOCKS.search((ROOT / "README.md").read_text())
    assert found is not None
    commands, text = found.groups()
    # Those of the server that is up, which without them does not start on a machine with one NUMA node.
    first, *others = commands.splitlines()
    word, *variables = shlex.split(first, comments=True)
    assert word == "export"
    assert variables
    for variable in variables:
        name, _, value = variable.partition("=")
        assert os.environ[name] == value
    server, trainer = (shlex.split(line, comments=True) for line in others)
    assert server == ["VLLM_SERVER_DEV_MODE=1", *command("CHECKPOINT")]
    assert trainer == ["torchrun", *TORCHRUN, "train.py", "CHECKPOINT"]
    printed = run_trainer("train.py", text, checkpoint, url, folder)
    for rank in range(2):
        assert re.search(rf"rank {rank} sent its shards of \d+ parameters", printed)


@contextmanager
def asking(url: str) -> Iterator[list[Any]]:
    """What a server answers while the block runs; every request has to be answered."""
    answers: list[Any] = []
    faults: list[Exception] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.2):
            try:
                answers.append(complete(url))
            except Exception as error:
                faults.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()
    assert not faults


def test_another_model_is_refused_and_the_servers_go_on(
    urls: list[str], folders: list[Path], expected: list[Any]
) -> None:
    """What the servers' workers found wrong comes back over HTTP."""
    clients = [smv.HTTPClient(url) for url in urls]
    with pytest.raises(ExchangeError, match=r"gate_proj|down_proj"):
        smv.Trainer.trainer_init(inform(), client=clients, source=load(folders[2]))
    assert [complete(url) for url in urls] == [expected[1], expected[1]]


def test_vllm_s_own_client_and_ours_refit_two_servers_at_once(
    urls: list[str], folders: list[Path], expected: list[Any]
) -> None:
    """vLLM's client leaves what prompts left in caches to the engine. A server that is paused takes weights, too."""
    clients = [HTTPVLLMWeightSyncClient(urls[0]), smv.HTTPClient(urls[1])]
    model = load(folders[0])
    trainer = smv.Trainer.trainer_init(inform(), client=clients, source=model)
    trainer.send_weights()
    assert [complete(url) for url in urls] == [expected[0], expected[0]]
    model.load_state_dict(load(folders[1]).state_dict())
    ask(f"{urls[0]}/pause?mode=keep", {})
    trainer.send_weights()
    ask(f"{urls[0]}/resume", {})
    assert [complete(url) for url in urls] == [expected[1], expected[1]]
    trainer.shutdown()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_server_that_is_paused_in_any_way_takes_weights(
    urls: list[str], folders: list[Path], expected: list[Any], mode: str
) -> None:
    """By a pause, vLLM drops its caches itself, unless it keeps its requests."""
    model = load(folders[1])
    with meet(urls, model) as trainer:
        trainer.send_weights()
        assert complete(urls[0]) == expected[1]
        model.load_state_dict(load(folders[0]).state_dict())
        ask(f"{urls[0]}/pause?mode={mode}", {})
        assert ask(f"{urls[0]}/is_paused") == {"is_paused": True}
        trainer.send_weights()
        ask(f"{urls[0]}/resume", {})
        assert [complete(url) for url in urls] == [expected[0], expected[0]]


def test_vllm_s_checker_finds_what_an_engine_is_started_on(
    urls: list[str], folders: list[Path], expected: list[Any]
) -> None:
    """Its checksums are of each worker's part: equal of engines of equal TP, also after weights were lost."""
    model = load(folders[0])
    with meet(urls, model) as trainer:
        trainer.send_weights()
        checked = [ask(f"{url}/weight_checker", {"action": "checksum"}) for url in urls]
        assert checked[0] == checked[1]
        baseline = checked[0]["checksums"]
        assert {name.split(":")[3] for name in baseline} == {"tp0", "tp1"}
        for url in urls:
            ask(f"{url}/weight_checker", {"action": "reset"})
        said = {"action": "compare", "baseline": baseline}
        assert not ask(f"{urls[0]}/weight_checker", said)["match"]
        assert complete(urls[0]) != expected[0]
        trainer.send_weights()
        for url in urls:
            found = ask(f"{url}/weight_checker", said)
            assert found == {"match": True, "mismatches": []}
            assert complete(url) == expected[0]


def test_a_draft_is_refused_and_the_next_update_works(
    urls: list[str], folders: list[Path], expected: list[Any]
) -> None:
    with meet(urls, load(folders[1])) as trainer:
        with pytest.raises(HTTPError) as refused:
            ask(f"{urls[0]}/start_draft_weight_update", {})
        said = refused.value.read().decode()
        assert "WorkerEngine does not support draft model weight updates" in said
        trainer.send_weights()
        assert [complete(url) for url in urls] == [expected[1], expected[1]]


@contextmanager
def meet(urls: list[str], model: torch.nn.Module) -> Iterator[smv.Trainer]:
    """A trainer of the model, which both servers have joined."""
    clients = [smv.HTTPClient(url) for url in urls]
    trainer = smv.Trainer.trainer_init(inform(), client=clients, source=model)
    yield trainer
    trainer.shutdown()


def test_all_replicas_of_a_server_are_refitted(folders: list[Path], tmp_path: Path) -> None:
    """Under data parallelism: each replica has workers, which all are of one engine."""
    replicas = range(2)
    sizes = "--tensor-parallel-size=1", f"--data-parallel-size={len(replicas)}"
    with serve(folders[:1], tmp_path, *sizes) as (url,):
        before = [complete(url, replica) for replica in replicas]
        assert before[0] == before[1]
        model = load(folders[1])
        info = smv.TrainerInfo(
            f"127.0.0.1:{free_port()}", 1, workers=len(replicas), timeout=TIMEOUT_S, rank=0
        )
        trainer = smv.Trainer.trainer_init(info, client=smv.HTTPClient(url), source=model)
        trainer.send_weights()
        after = [complete(url, replica) for replica in replicas]
        assert after[0] == after[1] != before[0]
        model.load_state_dict(load(folders[0]).state_dict())
        trainer.send_weights()
        assert [complete(url, replica) for replica in replicas] == before
        trainer.shutdown()


def inform() -> smv.TrainerInfo:
    """A trainer of one process, and both servers."""
    address = f"127.0.0.1:{free_port()}"
    return smv.TrainerInfo(address, 1, workers=(TP, TP), timeout=TIMEOUT_S, rank=0)


def load(folder: Path) -> torch.nn.Module:
    """A module of a checkpoint, whole."""
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16
    )
    return model
