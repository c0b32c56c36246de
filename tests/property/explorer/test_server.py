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

HUGE = ASKED | {"shape": f"{1 << 24}", "src": "(n tp)", "dst": "(n tp 3)"}
"""More pieces than a gigabyte holds, or a minute makes."""


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
        wait = {"wait": "99"}
    raise AssertionError("no whole answer")


def test_the_page_and_its_answers(explorer: Explorer) -> None:
    assert get(explorer, "").decode() == live_page()
    answer = ask(explorer, ASKED)
    assert answer["plan"]["bytes"] == 144 and answer["picture"].startswith("<svg")
    assert ask(explorer, ASKED) == answer
    assert "expected ')'" in ask(explorer, ASKED | {"src": "(tp n"})["faults"]["src"]


@pytest.mark.parametrize("path", ["nothing", "answer/", "%00", "//[bad/", "answer?" + "a=1&" * 100])
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit of memory")
def test_a_question_that_memory_does_not_hold() -> None:
    """The process that answers goes on."""
    workers = Workers(most_bytes=10**9)
    try:
        assert "it needs more than 1.00 GB of memory" in workers.ask(HUGE, LIMIT_S)["refused"]
        assert workers.ask(ASKED, LIMIT_S)["plan"]
    finally:
        workers.close()


def test_pieces_that_the_library_counts(explorer: Explorer) -> None:
    larger = ask(explorer, HUGE | {"shape": f"{1 << 26}", "dst": "(tp n)"})
    assert "more than 16777216" in larger["faults"]["src"]
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


def test_two_tabs_do_not_end_each_other_s_questions() -> None:
    """Each question takes longer than a newer one of the same tab would wait for."""
    slow = ASKED | {"shape": "2048,2048", "src_mesh": "a=64", "src": "(n a 1) h"}
    slow |= {"dst_mesh": "a=64", "dst": "n (h a 1)"}
    workers = Workers()
    told: dict[str, Any] = {}

    def ask_as(tab: str) -> None:
        told[tab] = workers.ask(slow | {"rank": tab}, LIMIT_S, asker=tab)

    try:
        threads = [threading.Thread(target=ask_as, args=(tab,)) for tab in "012"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        workers.close()
    assert sorted(told) == ["0", "1", "2"] and all(answer["done"] for answer in told.values())
    assert not any(answer.get("superseded") for answer in told.values())
    assert len({answer["digest"] for answer in (each["plan"] for each in told.values())}) == 1


def test_parts_of_an_answer_come_as_they_are_made() -> None:
    slow = ASKED | {"shape": "4096,64", "src_mesh": "a=128", "src": "(a n) h"}
    slow |= {"dst_mesh": "a=128", "dst": "(n a 1) h", "node": "8"}
    workers = Workers()
    try:
        sizes = [0]
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            answer = workers.ask(slow, LIMIT_S if sizes[-1] else 0.05, have=sizes[-1])
            sizes.append(len(answer))
            if answer["done"]:
                break
    finally:
        workers.close()
    assert answer["done"] and len(set(sizes)) >= 3


def test_a_process_that_ends_at_its_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package cannot be imported there; the next question is tried again."""
    monkeypatch.setattr("shardmath.display.explorer.workers.__name__", "shardmath.no_such_module")
    workers = Workers()
    try:
        for _ in range(2):
            answer = workers.ask(ASKED, LIMIT_S)
            assert answer["done"] and "ended with status 1: " in answer["refused"]
            assert "no_such_module" in answer["refused"]
        monkeypatch.undo()
        for _ in range(3):
            answer = workers.ask(ASKED | {"shape": "8,4"}, LIMIT_S)
        assert answer["plan"]
    finally:
        workers.close()


def test_time_is_over_also_if_nobody_waits() -> None:
    workers = Workers(longest=0.3)
    try:
        workers.ask(HUGE, 0.0)
        time.sleep(1.0)
        answer = workers.ask(HUGE, 0.0)
        assert answer["done"] and "it takes more than 0.3 s" in answer["refused"]
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
        with urllib.request.urlopen(f"{url}answer?{urlencode(ASKED)}", timeout=LIMIT_S) as reply:
            assert json.loads(reply.read())["schema"]
        children = list_children(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and errors == ""
    assert not any(os.path.exists(f"/proc/{child}") for child in children)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_server_that_is_killed_leaves_nothing() -> None:
    """Not even a process that is at a question."""
    command = [sys.executable, "-m", "shardmath", "explore", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        with urllib.request.urlopen(f"{url}answer?{urlencode(HUGE)}", timeout=LIMIT_S) as reply:
            reply.read()
        children = list_children(process.pid)
        assert len(children) == 2
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + LIMIT_S
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < until
        time.sleep(0.1)


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
