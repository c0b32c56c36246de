"""Pictures of certificates: bars as long as the times, and the witness in words."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from hypothesis import given

from shardmath import Certificate, Program, certify
from shardmath.base.text import show_seconds
from shardmath.pictures import show, svg
from shardmath.plans.flows.certificate import Witness, make_certificate
from tests.property.drawn.programs import cut_anywhere, programs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def bars_of(root: ElementTree.Element) -> dict[str, float]:
    """Widths by name; the hatched box has no tooltip."""
    out = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title")
        if title:
            out[title] = float(rect.attrib["width"])
        elif rect.attrib.get("fill", "").startswith("url("):
            out["latency"] = float(rect.attrib["width"])
    return out


def texts_of(root: ElementTree.Element) -> list[str]:
    return ["".join(x.itertext()) for x in root.iter(f"{SVG}text")]


def check_bars(certificate: Certificate) -> None:
    root = ElementTree.fromstring(svg(certificate))
    bars = bars_of(root)
    texts = texts_of(root)
    longest = max(certificate.bound_s, certificate.plan_s)
    times = {f"{name}: {show_seconds(seconds)}": seconds for name, seconds in times_of(certificate)}
    times["latency"] = certificate.latency_s
    assert bars.keys() == times.keys()
    for name, seconds in times.items():
        assert bars[name] == pytest.approx(330 * seconds / longest, abs=0.01)
    assert show_seconds(certificate.plan_s) in texts
    assert float(root.attrib["width"]) < 560 and float(root.attrib["height"]) < 160
    assert root.findtext(f"{SVG}desc") == str(certificate)


def times_of(certificate: Certificate) -> list[tuple[str, float]]:
    return [("bound", certificate.bound_s), ("plan", certificate.plan_s)]


@given(programs())
def test_bars_are_as_long_as_the_times(prog: Program) -> None:
    certificate = certify(prog)
    if certificate.witness is not None:
        check_bars(certificate)


def test_a_certificate_in_words() -> None:
    witness = Witness(ranks=(2, 3), direction="out", nbytes=10**9, bytes_per_s=1e11)
    found = make_certificate((0.0101, witness), 0.0125)
    check_bars(found)
    texts = texts_of(ElementTree.fromstring(found.svg()))
    assert texts[0] == "the plan takes 1.238 times the bound"
    assert texts[-2:] == [
        "2 ranks (2, 3) must give out 1 GB",
        "over links of together 100 GB/s; hatched: 100 us of latency",
    ]
    assert {"bound", "10.1 ms", "plan", "12.5 ms", "0", "5 ms", "10 ms"} <= set(texts)
    assert show(found)._repr_html_() == found._repr_html_() == svg(found, inline=True)


@pytest.mark.parametrize(
    ("plan_s", "head"),
    [
        (0.01, "no plan is faster: this one takes as long as the bound"),
        (1e9, "the plan takes 1e+11"),
    ],
)
def test_extreme_ratios(plan_s: float, head: str) -> None:
    witness = Witness(ranks=tuple(range(1000)), direction="in", nbytes=10**9, bytes_per_s=1e11)
    found = make_certificate((0.01, witness), plan_s)
    check_bars(found)
    texts = texts_of(ElementTree.fromstring(svg(found)))
    assert texts[0].startswith(head)
    assert texts[-1] == "over links of together 100 GB/s"


def test_nothing_has_to_move() -> None:
    for plan_s in (0.0, 1e-3):
        found = make_certificate((0.0, None), plan_s)
        texts = texts_of(ElementTree.fromstring(svg(found)))
        assert texts[0] == "nothing has to move"
        assert found.latency_s == 0
