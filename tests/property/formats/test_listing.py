"""The table of formats says what the formats do."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from shardmath import formats
from shardmath.display import cli
from shardmath.formats import Format, listing, show_listing
from shardmath.values.formats.listing import FORMATS

SIZES = {"M": 256, "K": 512, "1": 1}


def count(term: str) -> int:
    """M/128 as a number."""
    size, _, block = term.partition("/")
    return SIZES[size] // int(block or 1)


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_rows_are_what_formats_make(one: Format) -> None:
    (row,) = [row for row in listing() if row.name == one.name]
    shape = (SIZES["M"], SIZES["K"])
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    data, scales, *_ = one.quantize(x)
    assert scales.shape == tuple(map(count, row.scale_shape.split(" x ")))
    assert data.nbytes * (2 if row.data.endswith("_x2") else 1) == x.size
    for written, cuts in zip((row.row_cuts, row.column_cuts), one.legal_cuts(shape), strict=True):
        step = {"any": 1, "any, with amax": cuts[-1]}.get(written) or int(written)
        assert cuts == (*range(0, cuts[-1], step), cuts[-1])


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_formats_are_values(one: Format) -> None:
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(
        pickle.loads(pickle.dumps(one))
    )
    assert eval(repr(one), vars(formats)) == one
    assert len({each.name for each in FORMATS}) == len(set(FORMATS)) == len(FORMATS)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats"]) == 0
    assert capsys.readouterr().out == show_listing() + "\n"
    assert cli.main(["formats", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["formats"]
    assert [row["name"] for row in rows] == [one.name for one in FORMATS]
    assert rows[0]["scale_shape"] == "M x K/32"
