"""Calls that one background thread makes, one after another."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from shardmath_torch.groups.agreement.threads import CallThread, Late
from shardmath_torch.groups.agreement.turns import Turns


class Held:
    """Something that a call holds."""


def test_calls_share_a_thread_until_one_fails() -> None:
    calls = CallThread()
    first = calls.within(5.0, threading.get_ident)
    assert first != threading.get_ident()
    assert calls.within(5.0, threading.get_ident) == first
    with pytest.raises(ZeroDivisionError):
        calls.within(5.0, lambda: 1 // 0)
    assert calls.within(5.0, lambda: 7) == 7


def test_a_late_call_does_not_hold_up_the_next() -> None:
    calls, goes_on = CallThread(), threading.Event()
    with pytest.raises(Late, match="no answer in 0 s"):
        calls.within(0.05, goes_on.wait)
    assert calls.within(5.0, lambda: 7) == 7
    goes_on.set()


def test_nothing_is_kept_between_calls() -> None:
    """Neither what a call holds, nor the thread once the object is gone."""
    calls, held = CallThread(), Held()
    gone = weakref.ref(held)
    thread = calls.within(5.0, lambda held=held: (held, threading.current_thread())[1])
    del held
    until = time.monotonic() + 5.0
    while gone() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    del calls
    thread.join(5.0)
    assert not thread.is_alive()


def test_the_thread_that_posts_ends_with_its_group() -> None:
    """Once this rank has left: the group object may be kept for long."""
    turns = Turns()
    thread = turns.posting.within(5.0, threading.current_thread)
    with turns.ending(5.0, "its process group was disconnected"):
        pass
    thread.join(5.0)
    assert not thread.is_alive()


AT_EXIT = """
import torch
from shardmath_torch.groups.agreement import threads

threads.LAST_SECONDS = 100.0
calls = threads.CallThread()
assert calls.within(5.0, lambda: 7) == 7
"""


def test_a_process_that_still_has_one_ends_at_once() -> None:
    """Not after all the time that background threads have to end."""
    subprocess.run([sys.executable, "-c", AT_EXIT], timeout=60, check=True)
