"""Destinations that share memory are refused before anything moves; buffers whose holes interlock are not."""

from __future__ import annotations

import pytest
import torch

import shardmath as sm
from shardmath_torch.moves.exchange.local import Tensors, check, wanted
from shardmath_torch.moves.exchange.overlaps import overlaps_itself

MESH = sm.Mesh(tp=2)


def _check(src: dict[str, sm.Layout], dst: dict[str, sm.Layout], out: Tensors) -> None:
    wants = wanted(sm.plan(src, dst), 0)
    given = {key: torch.zeros(shape) for key, (shape, _) in wants[0].tensors.items()}
    check(wants, (given, out), torch.device("cpu"))


def _of(text: str, names: str = "ab", n: int = 4) -> dict[str, sm.Layout]:
    return {name: sm.Layout((n,), MESH, text) for name in names}


def test_one_tensor_for_two_names() -> None:
    """Tied weights passed twice: the second would overwrite the first."""
    tied = torch.zeros(4)
    with pytest.raises(
        sm.ExchangeError, match="'a' and destination tensor 'b' share memory: one would overwrite"
    ):
        _check(_of("(tp n)"), _of("n"), {"a": tied, "b": tied})


def test_views_that_meet() -> None:
    whole = torch.zeros(7)
    with pytest.raises(sm.ExchangeError, match="share memory"):
        _check(_of("(tp n)"), _of("n"), {"a": whole[:4], "b": whole[3:]})
    _check(_of("(tp n)"), _of("n"), {"a": torch.zeros(8)[::2], "b": torch.zeros(8)[1::2]})
    both = torch.zeros(8)
    _check(_of("(tp n)"), _of("n"), {"a": both[::2], "b": both[1::2]})


def test_a_tensor_that_overlaps_itself() -> None:
    windows = torch.zeros(5).as_strided((4,), (1,)).as_strided((2, 2), (1, 1))
    layouts = [{"a": sm.Layout((2, 2), MESH, text)} for text in ("(tp n) h", "n h")]
    with pytest.raises(
        sm.ExchangeError, match=r"strides \(1, 1\), which put several elements at one address"
    ):
        _check(*layouts, {"a": windows})


def test_holes_may_be_another_s() -> None:
    buffer = torch.zeros(8)
    dst = {
        "a": sm.Layout((4,), MESH, "(n)=<0:2 -2 2:4 -2>"),
        "b": sm.Layout((4,), MESH, "(n)=<-2 0:2 -2 2:4>"),
    }
    _check(_of("(tp n)"), dst, {"a": buffer, "b": buffer})
    longer = torch.zeros(10)
    with pytest.raises(sm.ExchangeError, match="share memory"):
        _check(_of("(tp n)"), dst, {"a": longer[:8], "b": longer[2:]})


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (3, 2), False),
        ((3, 4), (4, 3), False),
        ((3, 4), (3, 3), True),
        ((2, 4), (2, 1), True),
        ((4,), (0,), True),
        ((0, 4), (0, 0), False),
    ],
)
def test_cells_of_strides_are_counted(
    shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool
) -> None:
    """Strides that interleave may still give every element a cell of its own."""
    assert overlaps_itself(torch.zeros(64).as_strided(shape, strides)) == overlaps
