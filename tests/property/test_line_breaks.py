"""`tools/line_breaks.py`: where the cells of a table may break."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def line_breaks() -> ModuleType:
    """The module of the tool, which is in no package."""
    path = ROOT / "tools" / "line_breaks.py"
    spec = importlib.util.spec_from_file_location("line_breaks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("html", "wanted"),
    [
        (
            "<td><code>notebooks/03_what_nine.ipynb</code></td>",
            "<td><code>notebooks/<wbr>03_<wbr>what_<wbr>nine.ipynb</code></td>",
        ),
        ("<td><code>handle.wait()</code></td>", "<td><code>handle.wait()</code></td>"),
        ("<td>943.7 us</td>", "<td>943.7&nbsp;us</td>"),
        ("<td>8 ranks take in 337 GB</td>", "<td>8 ranks take in 337 GB</td>"),
        ("<p><code>a_long_name_in_a_paragraph</code></p>", None),
    ],
)
def test_cells_break_at_signs_of_long_names_and_not_in_amounts(
    line_breaks: ModuleType, html: str, wanted: str | None
) -> None:
    assert line_breaks.on_page_content(html, page=None) == (wanted or html)
