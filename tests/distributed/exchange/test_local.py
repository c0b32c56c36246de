"""Destinations that share memory are refused before anything moves; buffers whose holes interlock are not."""

from __future__ import annotations

import pytest
import torch

import shardmath as sm
from shardmath_torch.moves.exchange import glance
from shardmath_torch.moves.exchange.local import Tensors, check, fits, wanted
from shardmath_torch.moves.exchange.overlaps import overlaps_itself

MESH = sm.Mesh(tp=2)


@pytest.fixture(autouse=True, params=[0, glance.MANY], ids=["at a glance", "one by one"])
def _many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tensors are checked both ways, with the same errors."""
    monkeypatch.setattr(glance, "MANY", request.param)


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


def _odd() -> dict[str, torch.Tensor]:
    """Tensors of 4 x 4 that no move takes, and some that it takes."""
    whole = torch.ones(4, 4)
    freed = torch.ones(4, 4)
    freed.untyped_storage().resize_(63)
    gone = torch.ones(4, 4)
    gone.untyped_storage().resize_(0)
    return {
        "plain": whole,
        "parameter": torch.nn.Parameter(whole.clone()),
        "strided": torch.ones(4, 9)[:, 1::2],
        "broadcast": torch.ones(1).expand(4, 4),
        "another shape": torch.ones(4, 5),
        "another dtype": whole.to(torch.int32),
        "meta": whole.to("meta"),
        "resized": freed,
        "freed": gone,
        "sparse": whole.to_sparse(),
        "rows": whole.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([whole, whole]),
        "jagged": torch.nested.nested_tensor([whole, whole], layout=torch.jagged),
        "functional": torch._to_functional_tensor(whole),
        "conjugate": torch.ones(4, 4, dtype=torch.complex64).conj(),
        "negative": torch.ones(4, 4, dtype=torch.complex64).conj().imag,
        "quantized": torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("name", _odd())
def test_a_glance_passes_only_what_fits(name: str, dtype: str) -> None:
    given = {"a": _odd()[name]}
    layouts = {"a": sm.Layout((4, 4), MESH, "m n", dtype=dtype)}
    want, _ = wanted(sm.plan(layouts, layouts), 0)
    cpu = torch.device("cpu")
    seen = glance.look(given, glance.sign_memory(given))
    try:
        fits(want, given, cpu)
    except sm.ExchangeError:
        assert seen is None or not seen.fits(want.tensors, cpu)
    else:
        assert seen is None or seen.fits(want.tensors, cpu)


def test_empty_tensors_meet_nothing() -> None:
    """An empty tensor has no memory, or lies within another's."""
    whole = torch.zeros(4)
    dst = {name: sm.Layout((0 if name == "b" else 4,), MESH, "n") for name in "ab"}
    _check(dst, dst, {"a": whole, "b": whole[2:2]})
    _check(dst, dst, {"a": whole, "b": torch.zeros(0)})


def test_sources_beside_destinations() -> None:
    """A source may not lie where bytes arrive, even where it lies among many others."""
    layouts = _of("n")
    wants = wanted(sm.plan(layouts, layouts), 0)
    cpu = torch.device("cpu")
    whole = torch.zeros(16)
    src = {"a": whole[0:4], "b": whole[4:8]}
    check(wants, (src, {"a": whole[12:], "b": whole[8:12]}), cpu)
    for first in (1, 6, 7):
        dst = {"a": whole[first : first + 4], "b": whole[12:]}
        with pytest.raises(sm.ExchangeError, match="arriving bytes would overwrite"):
            check(wants, (src, dst), cpu)
        check(wants, (src, dst), cpu, apart=False)
