"""Calls inside of functions that torch.compile compiles: the graph breaks there, and the call is as anywhere else."""

from __future__ import annotations

import inspect

import shardmath_torch as smt
from tests.distributed.pool import alone
from tests.distributed.tasks import compiled

KINDS = ("move", "once", "changes", "beside", "block", "replan", "compile")

TRACEABLE = {
    "checkpointable",
    "dequantize",
    "megatron_hook",
    "quantize",
    "quantized_parts",
    "sendable",
}
"""Functions that no other rank is in: torch.compile may trace them."""

METHODS = {
    smt.Changes: ("__call__", "close", "let_go", "replan"),
    smt.Handle: ("done", "wait"),
    smt.Mover: ("__call__", "__exit__", "close", "let_go", "replan"),
    smt.Quantizer: ("__call__",),
    smt.Refit: ("__call__", "__exit__", "__init__", "close", "prepare", "release", "replan"),
    smt.TransformedMover: ("__call__", "close", "let_go", "replan"),
}
"""Methods that concern other ranks."""


def test_moves_in_compiled_steps() -> None:
    for ends in alone(2, compiled.calls, KINDS):
        for kind, (said, is_right, graphs) in zip(KINDS, ends, strict=True):
            assert said == ["", ""] and is_right, (kind, said)
            # Before the call and after it: none of the library's own code. What follows a block is not compiled.
            assert graphs == (1 if kind == "block" else 2), kind


def test_a_step_of_one_graph_raises_before_the_move() -> None:
    """Which no rank begins, so that the group is whole."""
    for ((said, _, _),) in alone(2, compiled.calls, ("fullgraph",)):
        assert all("torch.compile cannot trace it" in one for one in said), said


def test_redistributions_in_compiled_steps() -> None:
    """Of DTensors and plain tensors, with the backward in the step or after it."""
    assert alone(2, compiled.gradients) == [[True] * 4] * 2


def test_no_call_of_several_ranks_is_traced() -> None:
    """One that is new has the mark, too, or is listed here."""
    functions = [getattr(smt, name) for name in smt.__all__ if name not in TRACEABLE]
    entries = [inspect.unwrap(one) for one in functions if inspect.isfunction(one)]
    entries += [getattr(kind, method) for kind, names in METHODS.items() for method in names]
    traced = [one.__qualname__ for one in entries if not hasattr(one, "_torchdynamo_disable")]
    assert not traced and len(entries) > 25
