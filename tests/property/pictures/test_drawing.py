"""Any value as a picture, in files and in notebooks."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

import shardmath as sm
from shardmath import Layout, Mesh, Topology
from shardmath.pictures import show, svg

MESH = Mesh(dp=2, tp=2)
LAYOUT = Layout((8, 4), MESH, "(tp dp n) h")
PLAN = sm.plan(LAYOUT, Layout((8, 4), MESH, "(tp n) h"))
PROGRAM = sm.schedule(PLAN, topology=Topology(ranks_per_node=2))
DRAWN = [MESH, LAYOUT, PLAN, sm.adjoint(PLAN), PROGRAM, sm.certify(PROGRAM)]


@pytest.mark.parametrize("value", DRAWN, ids=lambda value: type(value).__name__)
def test_a_value_has_a_picture(
    value: Mesh | Layout | sm.Plan | sm.Transposed | sm.Program | sm.Certificate,
) -> None:
    assert value.svg() == svg(value)
    root = ElementTree.fromstring(value.svg())
    page = ElementTree.fromstring(value._repr_html_())
    assert root.tag == page.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["viewBox"] == page.attrib["viewBox"]
    assert show(value)._repr_html_() == value._repr_html_()


def test_what_has_no_picture_is_text() -> None:
    assert show(Topology())._repr_html_().startswith("<pre>nodes of 8 ranks; ")
    with pytest.raises(sm.ShardError, match="has no picture; draw a Mesh"):
        svg(Topology())  # type: ignore[arg-type]
    with pytest.raises(sm.ShardError, match="3 has no picture"):
        svg(3)  # type: ignore[arg-type]


def test_pictures_are_the_same_everywhere() -> None:
    code = "import shardmath as s; print(s.Layout((4, 4), s.Mesh(a=2, b=2), '(a n) h').svg())"
    texts = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        texts.add(done.stdout)
    assert len(texts) == 1


def test_importing_shardmath_imports_no_pictures() -> None:
    code = "import sys, shardmath; print('shardmath.display.pictures' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
