"""The page's server: it answers, whatever it is asked, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

import shardmath as sm
from shardmath.display.cli import main
from shardmath.display.explorer.page import live_page
from shardmath.display.explorer.server import Explorer
from shardmath.display.explorer.workers import Workers

LIMIT_S = 60.0

ASKED = {
    "shape": "9,4",
    "src_mesh": "tp=2",
    "src": "(tp n) h",
    "dst_mesh": "tp=2 ranks=2:4",
    "dst": "n (tp h)",
}

HUGE = ASKED | {"shape": f"{1 << 26}", "src": "(n tp)", "dst": "(n tp 3)"}
"""Far more transfers than memory holds."""


@pytest.fixture(scope="module")
def explorer() -> Iterator[Explorer]:
    with Explorer() as served:
        thread = threading.Thread(target=served.serve)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def get(explorer: Explorer, path: str) -> bytes:
    with urllib.request.urlopen(explorer.url + path, timeout=LIMIT_S) as reply:
        body: bytes = reply.read()
        return body


def ask(explorer: Explorer, texts: dict[str, str]) -> Any:
    """The whole answer."""
    until = time.monotonic() + LIMIT_S
    wait: dict[str, str] = {}
    while time.monotonic() < until:
        answer = json.loads(get(explorer, "answer?" + urlencode(texts | wait)))
        if answer["done"]:
            return answer
        wait = {"wait": "1"}
    raise AssertionError("no whole answer")


def test_the_page_and_its_answers(explorer: Explorer) -> None:
    assert get(explorer, "").decode() == live_page()
    answer = ask(explorer, ASKED)
    assert answer["plan"]["bytes"] == 144 and answer["picture"].startswith("<svg")
    assert ask(explorer, ASKED) == answer
    assert "expected ')'" in ask(explorer, ASKED | {"src": "(tp n"})["faults"]["src"]


@pytest.mark.parametrize("path", ["nothing", "answer/", "%00", "answer?" + "a=1&" * 100])
def test_other_requests(explorer: Explorer, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(explorer, path)
    assert raised.value.code in (400, 404)
    assert ask(explorer, ASKED)["plan"]


def test_bytes_that_are_no_request(explorer: Explorer) -> None:
    port = int(explorer.url.rstrip("/").rpartition(":")[2])
    for sent in (
        b"\x00\xff\r\n\r\n",
        b"GET /answer?src=%ff%fe HTTP/1.0\r\n\r\n",
        b"PUT / HTTP/1.0\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
            connection.sendall(sent)
            while connection.recv(65536):
                pass
    assert ask(explorer, ASKED)["plan"]


def test_a_question_that_memory_does_not_hold(explorer: Explorer) -> None:
    assert "blocks, or plan in a script" in ask(explorer, HUGE)["refused"]
    assert ask(explorer, ASKED)["plan"]


def test_a_newer_question_ends_one_that_takes_long() -> None:
    workers = Workers()
    try:
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.append(workers.ask(HUGE, LIMIT_S)))
        thread.start()
        time.sleep(1.0)
        answer = workers.ask(ASKED, LIMIT_S)
        thread.join()
    finally:
        workers.close()
    assert answer["plan"]["bytes"] == 144
    # On a fast machine, memory may be over before the newer question comes.
    assert told[0].get("superseded") or "refused" in told[0]


def test_a_question_that_takes_too_long() -> None:
    workers = Workers(longest=0.2)
    try:
        answer = workers.ask(HUGE, LIMIT_S)
        assert answer["done"] and "it takes more than 0.2 s" in answer["refused"]
        # The process was ended; the next question goes to another.
        workers._longest = LIMIT_S
        assert workers.ask(ASKED, LIMIT_S)["plan"]
    finally:
        workers.close()


def list_children(pid: int) -> set[int]:
    """The processes that a process has started."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return set(map(int, children.read().split()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_command_ends_with_ctrl_c_and_leaves_nothing() -> None:
    command = [sys.executable, "-m", "shardmath", "explore", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        url = first.split()[1]
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
            assert b"shardmath explorer" in reply.read()
        children = list_children(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and errors == ""
    assert not any(os.path.exists(f"/proc/{child}") for child in children)


def test_a_port_that_is_taken(explorer: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    port = explorer.url.rstrip("/").rpartition(":")[2]
    assert main(["explore", "--port", port]) == 1
    assert main(["explore", "--port", "99999"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("pass another --port" in line for line in said)


def test_a_page_of_a_plan(tmp_path: Any) -> None:
    """Nothing in a tensor's name ends the script in which the answer stands."""
    name = "a</script><script>alert(1)//"
    layout = sm.Layout((8, 4), sm.Mesh(tp=2), "(tp n) h")
    planned = sm.plan({name: layout}, {name: sm.Layout((8, 4), sm.Mesh(tp=2), "n (tp h)")})
    planned.html(tmp_path / "plan.html", topology=sm.Topology(ranks_per_node=1))
    text = (tmp_path / "plan.html").read_text()
    assert text.count("</script>") == 2 and name not in text
    shown = sm.explore(planned, topology=sm.Topology(ranks_per_node=1))
    assert shown.html == text
    frame = shown._repr_html_()
    assert frame.startswith("<iframe") and frame.count("<") == 2
    with pytest.raises(sm.errors.PlanError, match=r"pass what shardmath\.plan"):
        sm.explore(layout)  # type: ignore[arg-type]
