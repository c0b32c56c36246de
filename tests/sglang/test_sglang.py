"""A trainer refits two ranks of SGLang's own models, over HTTP, through SGLang's own updaters."""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import os
import pickle
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardmath as sm
import shardmath_vllm as smv
from shardmath_sglang import SGLangClient
from tests.distributed.pool import free_port
from tests.sglang import ranks
from tests.vllm import checkpoints
from tests.vllm.cases import fields
from tests.vllm.contract import wheel
from tests.vllm.served.sessions import run
from tests.vllm.served.test_clients import answering

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(# train_sglang\.py, .*?)^```$", re.M | re.S)
SERVER, STORE = "http://127.0.0.1:30000", "127.0.0.1:29600"
TP = 2
TIMEOUT_S = 60.0
START_S = 120.0
SPOILED = {
    "quantized": "model is quantized; start the engine on unquantized weights",
    "cache": "--weight-cache-mode attach",
    "derived": "cannot be renewed",
    "packed": "keeps experts in the blocks of FlashInfer's trtllm kernels; start the engine with",
}
"""Kinds of engines that cannot be refitted, and what each says."""

pytestmark = pytest.mark.timeout(300)


class Ranks:
    """The processes of an engine's ranks, which all do what is asked of one."""

    def __init__(self, pipes: list[Any]) -> None:
        self._pipes = pipes

    def ask(self, *order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self._pipes]


@contextlib.contextmanager
def started(folder: Path, *, plugin: bool = True) -> Iterator[Ranks]:
    """Ranks that were started on a checkpoint, with our plugin or without it."""
    files = str(wheel.fetch_or_skip("sglang", ranks.VERSION))
    spawn = multiprocessing.get_context("spawn")
    start = ranks.Start(files, folder, TP, free_port(), plugin)
    pipes, processes = [], []
    try:
        for rank in range(TP):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=ranks.serve, args=(start, rank, theirs))
            process.start()
            # An error there ends what is read here.
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            assert pipe.poll(START_S), "a rank does not start"
            assert pipe.recv() == "up"
        yield Ranks(pipes)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def serving(engine: Ranks) -> Iterator[str]:
    """The URL of a server that passes requests on to all ranks, and answers as SGLang's routes do."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            answers = engine.ask("post", self.path.removeprefix("/"), text)
            success = all(success for success, _ in answers)
            message = " | ".join(message for _, message in answers)
            self.send_response(200 if success else 400)
            self.end_headers()
            self.wfile.write(json.dumps({"success": success, "message": message}).encode())

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def load(folder: Path) -> torch.nn.Module:
    """A trainer's model."""
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16
    )
    return model


def inform(workers: int = TP, **given: Any) -> smv.TrainerInfo:
    """A trainer of one rank, which waits no longer than a test."""
    address = f"127.0.0.1:{free_port()}"
    return smv.TrainerInfo(address, 1, workers=workers, rank=0, timeout=TIMEOUT_S, **given)


def test_the_page_s_program(tmp_path: Path) -> None:
    """train_sglang.py of docs/sglang.md, on two ranks under FSDP2, of which none has SGLang."""
    folders = [checkpoints.save(fields("llama"), tmp_path / str(seed), seed) for seed in range(2)]
    found = PROGRAM.search((ROOT / "docs/sglang.md").read_text())
    assert found is not None
    (text,) = found.groups()
    assert SERVER in text and STORE in text
    with started(folders[0]) as engine, serving(engine) as url:
        text = text.replace(SERVER, url).replace(STORE, f"127.0.0.1:{free_port()}")
        (tmp_path / "train_sglang.py").write_text(text)
        path = os.pathsep.join(map(str, [ROOT, ROOT / "backends", ROOT / "integrations"]))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [*launch, "train_sglang.py", str(folders[1])]
        printed = run(words, {"PYTHONPATH": path}, tmp_path / "log", timeout=200)
        assert len(re.findall(r"rank \d sent its shards of 21 parameters", printed)) == 2
        assert engine.ask("compare", folders[1]) == [([], 1)] * TP


def test_a_server_is_told_by_sglang_s_routes() -> None:
    with answering(200) as (url, heard):
        client = SGLangClient(url)
        client.init_weight_transfer_engine({"workers": TP})
        client.start_weight_update()
        client.update_weights({"number": 1})
        client.finish_weight_update("v1")
    begin = ("/begin_weight_update", {"selector": "target"})
    told = [body for route, body in heard if route == "/update_weights_from_tensor"]
    entries = [body.pop("serialized_named_tensors") for body in told]
    texts = [{pickle.loads(base64.b64decode(each)) for each in both} for both in entries]
    assert texts == [{'{"workers": 2}'}, {'{"number": 1}'}]
    assert [len(both) for both in entries] == [TP, TP]
    assert told == [
        {"load_format": "shardmath_join", "flush_cache": False, "selector": "target"},
        {"load_format": "shardmath", "flush_cache": True, "selector": "target"},
    ]
    named = ("/update_weight_version", {"new_version": "v1", "abort_all_requests": False})
    assert heard == [
        ("/end_weight_update", {}),
        ("/update_weights_from_tensor", told[0]),
        begin,
        ("/update_weights_from_tensor", told[1]),
        ("/end_weight_update", {}),
        named,
    ]


def test_a_server_that_refuses_is_an_error_with_sglang_s_words() -> None:
    """The error of ending a session that is not there is none; every other comes first."""
    answer = b'{"success": false, "message": "no weight-update session is open; call"}'
    with (
        answering(400, answer) as (url, heard),
        pytest.raises(sm.ExchangeError, match=r"from_tensor answered 400: no weight-update"),
    ):
        SGLangClient(url).init_weight_transfer_engine({"workers": TP})
    assert [route for route, _ in heard] == ["/end_weight_update", "/update_weights_from_tensor"]
    for code, word in ((401, r"answered 401: \{}"), (404, r"no such route; .* SGLang 0\.5\.23")):
        with (
            answering(code) as (url, heard),
            pytest.raises(sm.ExchangeError, match=rf"/end_weight_update .*{word}"),
        ):
            SGLangClient(url).init_weight_transfer_engine({"workers": TP})
        assert len(heard) == 1
    silent = "start an SGLang server there, or pass SGLangClient a longer timeout"
    with pytest.raises(sm.ExchangeError, match=silent):
        SGLangClient(f"http://127.0.0.1:{free_port()}").start_weight_update()


def test_a_server_without_the_plugin_goes_on(tmp_path: Path) -> None:
    """Also in the session that an update left open."""
    folder = checkpoints.save(fields("llama"), tmp_path / "engine")
    with started(folder, plugin=False) as engine, serving(engine) as url:
        client = SGLangClient(url)
        for _ in range(2):
            with pytest.raises(sm.ExchangeError, match=r"has no plugin of shardmath; install"):
                client.init_weight_transfer_engine(inform().tell(0, ""))
            client.start_weight_update()
        assert engine.ask("compare", folder) == [([], 0)] * TP


@pytest.mark.parametrize("model", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_sglang_s_models_have_what_was_sent(model: str, tmp_path: Path) -> None:
    """Fused projections and stacked experts, each where SGLang's own loader puts it, three times in a row."""
    # SGLang has experts in every layer, whatever the configuration says.
    given = fields(model, **{"mlp_only_layers": []} if model == "qwen3_moe" else {})
    folders = [checkpoints.save(given, tmp_path / str(seed), seed) for seed in range(2)]
    with started(folders[0]) as engine, serving(engine) as url:
        (different, flushes), _ = engine.ask("compare", folders[1])
        assert different and not flushes
        trained = load(folders[1])
        client = SGLangClient(url)
        trainer = smv.Trainer.trainer_init(inform(), client=client, source=trained)
        assert engine.ask("compare", folders[0]) == [([], 0)] * TP
        for update, seed in enumerate((1, 0, 1), 1):
            trained.load_state_dict(load(folders[seed]).state_dict())
            trainer.send_weights()
            assert engine.ask("compare", folders[seed]) == [([], update)] * TP
        trainer.shutdown()


def test_a_rank_that_fails_in_an_update_ends_no_process(tmp_path: Path) -> None:
    """All ranks answer with an error, and a new connection sends all weights again."""
    folders = [checkpoints.save(fields("llama"), tmp_path / str(seed), seed) for seed in range(2)]
    with started(folders[0]) as engine, serving(engine) as url:
        client = SGLangClient(url)
        trained = load(folders[1])
        trainer = smv.Trainer.trainer_init(inform(), client=client, source=trained)
        engine.ask("fail", 1, "no memory left")
        with pytest.raises(sm.ExchangeError, match=r"(?s)no memory left.*partly new weights"):
            trainer.send_weights()
        with pytest.raises(sm.ExchangeError, match="connect again by trainer_init"):
            trainer.send_weights()
        engine.ask("fail", 1, "")
        trainer = smv.Trainer.trainer_init(inform(), client=client, source=trained)
        trainer.send_weights()
        assert [different for different, _ in engine.ask("compare", folders[1])] == [[], []]
        trainer.shutdown()


def test_what_does_not_fit_is_an_error_and_the_engine_goes_on(tmp_path: Path) -> None:
    folder = checkpoints.save(fields("llama"), tmp_path / "engine")
    wider = checkpoints.save(fields("llama", intermediate_size=64), tmp_path / "wider", seed=1)
    with started(folder) as engine, serving(engine) as url:
        client = SGLangClient(url)
        with pytest.raises(sm.ExchangeError, match=r"gate_proj|up_proj|down_proj"):
            smv.Trainer.trainer_init(inform(), client=client, source=load(wider))
        client.start_weight_update()
        with pytest.raises(sm.ExchangeError, match="connected to no trainer, or to another"):
            client.update_weights({"number": 1})
        client.finish_weight_update()
        with pytest.raises(sm.ExchangeError, match=r"float32, but .* is bfloat16"):
            smv.Trainer.trainer_init(inform(dtype="float32"), client=client, source=load(folder))
        assert engine.ask("compare", folder) == [([], 0)] * TP
        for kind, word in SPOILED.items():
            engine.ask("spoil", kind, False)
            with pytest.raises(sm.ExchangeError, match=word):
                client.init_weight_transfer_engine(inform().tell(0, ""))
            engine.ask("spoil", kind, True)
        for workers in (1, 3):
            with pytest.raises(
                sm.ExchangeError, match=rf"workers={workers} for engine 0, which has 2 ranks"
            ):
                client.init_weight_transfer_engine(inform(workers).tell(0, ""))
        assert engine.ask("compare", folder) == [([], 0)] * TP


def test_sglang_s_own_formats_are_let_through(tmp_path: Path) -> None:
    folders = [checkpoints.save(fields("llama"), tmp_path / str(seed), seed) for seed in range(2)]
    with started(folders[0]) as engine:
        for update, (load_format, seed) in enumerate(((None, 1), ("direct", 0)), 1):
            assert engine.ask("send", load_format, folders[seed]) == [True] * TP
            assert engine.ask("compare", folders[seed]) == [([], update)] * TP
