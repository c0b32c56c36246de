"""A Megatron model that rows have filled computes what the transformers model computes.

Recorded storage of Megatron proves how rows cut, but not which component is which: there Megatron is compared with
itself. Here its forward pass says whether q is q, and gate is gate.
"""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.megatron.cases import Case, Found, is_before
from tests.megatron.tasks import run

TOLERANCE = 1e-5
"""Of the largest logit; all is float32, and sums are in another order."""
TIMEOUT_S = 100.0

LATER = pytest.mark.skipif(is_before("0.17"), reason="fields of Megatron-Core 0.17 and later")
HYBRID = pytest.mark.skipif(
    is_before("0.19"), reason="hybrid models of Megatron-Core 0.19 and later predict further tokens"
)

CASES = [
    Case("llama"),
    Case("llama", tied=True),
    Case("llama", tp=2),
    Case("llama", tp=2, pp=2, layers=3, first=1),
    Case("llama", tp=2, pp=2, layers=3, first=1, tied=True),
    Case("llama", pp=2, vpp=2, layers=4),
    Case("llama-2-groups", tp=4),
    Case("qwen2", tp=2),
    Case("qwen3", tp=2),
    Case("starcoder2", tp=2),
    Case("mixtral"),
    Case("mixtral", tp=2, etp=2),
    Case("mixtral", ep=2),
    Case("mixtral", tp=2, ep=2),
    Case("mixtral", pp=2, ep=2),
    Case("mixtral", tp=2, pp=2, ep=2, order="pp-tp-cp-ep-dp"),
    pytest.param(
        Case("mixtral", legacy=True, ep=2),
        marks=pytest.mark.skipif(
            not is_before("0.17"), reason="Megatron-Core 0.17 and later have no GroupedMLP"
        ),
    ),
    Case("qwen3_moe", tp=2, ep=2, etp=2),
    Case("qwen2_moe", tp=2, etp=2),
    Case("qwen3_next", spec="te"),
    Case("qwen3_next", spec="te", tp=2, ep=2),
    Case("nemotron_h", layers=3, spec="te"),
    Case("nemotron_h", layers=3, spec="te", tp=2),
    Case("nemotron_h", layers=3, spec="te", pp=2, first=1),
    Case("nemotron_h", layers=3, spec="te", stepwise=True),
    Case("nemotron_h", layers=3, spec="te", stepwise=True, tp=2),
    Case("nemotron_h-experts", layers=3, spec="te", tp=2, ep=2),
    Case("mamba2", spec="te"),
    Case("mamba2", spec="te", stepwise=True, pp=2),
    Case("deepseek_v3"),
    Case("deepseek_v3", tp=2, ep=2),
    Case("qwen3", spec="te", tp=2),
    Case("starcoder2", spec="te", tp=2),
    Case("mixtral", spec="te", tp=2, ep=2, etp=2),
    Case("deepseek_v3", spec="te", tp=2, ep=2),
    Case("deepseek_v3", further=1),
    Case("deepseek_v3", further=1, spec="te", tp=2, ep=2),
    Case("deepseek_v3", further=1, pp=2, tied=True),
    Case("llama", further=2, tp=2),
    Case("llama", further=1, pp=2, vpp=2, layers=4),
    Case("llama", further=1, pp=3, layout="Et|t|mL"),
    # The last stage has the head alone.
    Case("llama", further=1, pp=3, layout="Ett|m|L"),
    Case("llama", further=1, pp=3, vpp=2, layers=3, layout="Et|t||t|m|L", tied=True),
    pytest.param(Case("deepseek_v3", further=2, repeated=True, tp=2), marks=LATER),
    pytest.param(Case("nemotron_h", further=1, layers=3, spec="te"), marks=HYBRID),
    pytest.param(
        Case(
            "nemotron_h-experts", further=2, repeated=True, layers=3, spec="te", tp=2, pp=2, first=1
        ),
        marks=HYBRID,
    ),
    Case("qwen3_next", further=1, spec="te"),
    Case("qwen3_next", further=1, spec="te", tp=2, pp=2),
]

QKV = "(groups (q + k + v) | tp n)"
FC1 = "mlp.[gate up]_proj.* : (tp (gate + up))"
MAMBA = "(tp (z + x + B + C + dt))"
DELTA = "(tp (q + k + v + z + b + a))"
GATED = "(groups (q + g + k + v) | tp n)"
EXPERT = "mlp.experts.{e}.[gate up]_proj.* : (etp (gate + up))"


def further_row(native: str, logical: str) -> str:
    """The row of a norm before the projection of a layer that predicts a further token."""
    return f"mtp.layers.{{m}}.{native}norm.* = mtp.{{m}}.{logical}norm.*"


WRONG = {
    "q and k": Case("llama", swap=(QKV, "(groups (k + q + v) | tp n)")),
    "k and v": Case("llama", swap=(QKV, "(groups (q + v + k) | tp n)")),
    "groups": Case("llama", swap=(QKV, "(q + k + v | tp n)")),
    "rows of ranks": Case("llama-2-groups", tp=4, swap=(QKV, "(tp (groups (q + k + v)))")),
    "gate and up": Case("llama", tp=2, swap=(FC1, FC1.replace("gate + up)", "up + gate)"))),
    "gate and up before tp": Case(
        "llama", tp=2, swap=(FC1, FC1.replace("(tp (gate + up))", "(gate + up | tp n)"))
    ),
    "gate and up of experts": Case(
        "mixtral", swap=(EXPERT, EXPERT.replace("gate + up)", "up + gate)"))
    ),
    "q and its gate": Case(
        "qwen3_next", spec="te", swap=(GATED, "(groups (g + q + k + v) | tp n)")
    ),
    "z and x": Case("nemotron_h", layers=3, spec="te", swap=(MAMBA, "(tp (x + z + B + C + dt))")),
    "B and C": Case("nemotron_h", layers=3, spec="te", swap=(MAMBA, "(tp (z + x + C + B + dt))")),
    "embedding and hidden state": Case(
        "deepseek_v3",
        further=1,
        swap=(
            "\n".join(further_row(*pair) for pair in ("ee", "hh")),
            "\n".join(further_row(*pair) for pair in ("eh", "he")),
        ),
    ),
    "b and a": Case("qwen3_next", spec="te", swap=(DELTA, "(tp (q + k + v + z + a + b))")),
}
"""Rows that are wrong in one structure, and still cut every tensor into parts of the right shape."""


def run_alone(case: Case) -> list[Found]:
    """What each rank found, in processes of its own, which are gone afterwards."""
    pool = Pool(case.ranks)
    try:
        return pool.run(run, case, timeout=TIMEOUT_S)
    finally:
        pool.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_megatron_gives_the_logits_of_transformers(case: Case) -> None:
    found = run_alone(case)
    with_logits = [one for one in found if one.difference is not None]
    print(
        f"{case!s}: {max(one.difference for one in with_logits):.1e} of {with_logits[0].largest:.1f}"
    )
    assert len(with_logits) == case.ranks // case.pp
    for one in with_logits:
        assert one.difference < TOLERANCE * one.largest
        assert one.greedy
    assert found[0].not_back == []
    assert all(one.strange == [] for one in found)


@pytest.mark.parametrize("what", WRONG)
def test_rows_in_a_wrong_order_give_other_logits(what: str) -> None:
    found = run_alone(WRONG[what])
    for one in found:
        assert one.difference > 0.1 * one.largest
    assert any(one.strange for one in found) == WRONG[what].is_plain
    # A way there and back is blind to it: what is stored wrongly is read back in the same wrong way.
    assert found[0].not_back == []
