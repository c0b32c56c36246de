"""Locks go with the process that has them, whatever it has forked."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints.files.locks import close, keep, locked

LAYOUTS = {"w": sm.Layout((8,), sm.Mesh(), "n")}


def write(call: str, path: Path, **options: Any) -> None:
    """An export or a save of ones."""
    act = smt.export if call == "export" else smt.save
    act(path, {"w": torch.ones(8)}, LAYOUTS, **options)


def killed(call: str, path: Path) -> int:
    """A process that forks another in the middle of a call, and is killed; the pid of the other."""
    reading, writing = os.pipe()
    writer = os.fork()
    if not writer:

        def fork(*_: int) -> None:
            child = os.fork()
            if not child:
                time.sleep(30.0)
                os._exit(0)
            os.write(writing, str(child).encode())
            os.kill(os.getpid(), signal.SIGKILL)

        write(call, path, progress=fork)
        os._exit(0)
    child = int(os.read(reading, 20))
    os.waitpid(writer, 0)
    return child


@pytest.mark.parametrize("call", ["export", "save"])
def test_a_lock_goes_with_a_process_that_has_forked(tmp_path: Path, call: str) -> None:
    """A data worker that lives on does not keep it: the next call goes through, and leaves nothing of the former."""
    write(call, tmp_path)
    count = len(os.listdir(tmp_path))
    child = killed(call, tmp_path)
    try:
        write(call, tmp_path)
        assert len(os.listdir(tmp_path)) == count
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("call", ["export", "save"])
@pytest.mark.parametrize("end", ["raises", "exits", "goes on"])
def test_a_child_forked_while_files_are_written_takes_nothing_away(
    tmp_path: Path, call: str, end: str
) -> None:
    """Neither drafts, nor the bytes that are in a file's buffer; only its parent goes on."""
    parent, calls = os.getpid(), 0
    status = -1

    def fork(*_: int) -> None:
        nonlocal calls, status
        calls += 1
        if calls != 2:
            return
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
        elif end == "raises":
            raise ValueError
        elif end == "exits":
            raise SystemExit

    try:
        write(call, tmp_path, progress=fork)
    except BaseException:
        if os.getpid() == parent:
            raise
        os._exit(7)
    if os.getpid() != parent:
        os._exit(8)
    # It has ended where it left the function.
    assert os.waitstatus_to_exitcode(status) == {"raises": 1, "exits": 0, "goes on": 1}[end]
    assert smt.load(tmp_path, LAYOUTS)["w"].eq(1).all()


def test_a_forked_child_that_leaves_a_lock_takes_nothing_away(tmp_path: Path) -> None:
    """Neither the file nor a handle that has the number of the closed one."""
    file = tmp_path / "lock"
    with locked(file, "test"):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            assert status == 0
            assert file.exists()
    if not child:
        os._exit(0)
    assert not file.exists()


def test_a_lock_ends_with_its_process_s_part(tmp_path: Path) -> None:
    """A child that was forked just as it ended may still have the open file."""
    file = tmp_path / "lock"
    handle = keep(os.open(file, os.O_RDWR | os.O_CREAT))
    fcntl.flock(handle, fcntl.LOCK_EX)
    childs = os.dup(handle)
    try:
        close(handle)
        with locked(file, "write"):
            pass
    finally:
        os.close(childs)
