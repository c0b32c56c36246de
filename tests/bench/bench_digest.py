"""Digests of content beside numpy's own sum and zlib.crc32 of the same memory, in one run.

    python tests/bench/bench_digest.py [megabytes] [repeats]

Figures are GB of input per second of a core: process CPU time, the best of the repeats. numpy's sum reads and adds, and
crc32 reads bytes in the order of memory; neither says anything of a tensor that is laid out otherwise.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import shardmath as sm
from tests.bench.section import arguments, show

HEAD = ["local array", "digest", "numpy sum", "crc32"]


def best(act: Callable[[], object], repeats: int) -> float:
    """Seconds of CPU time."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        act()
        seconds.append(time.process_time() - start)
    return min(seconds)


def arrays(megabytes: int) -> Iterator[tuple[str, str, Any]]:
    """A name, the dtype of the layout, and an array."""
    drawn = np.random.default_rng(0).integers(0, 1 << 16, megabytes << 19, np.uint16)
    for dtype, kind in (("float32", np.uint32), ("bfloat16", np.uint16)):
        whole = drawn.view(kind)
        even = whole[: len(whole) // 3 * 3]
        yield f"{dtype}, one dimension", dtype, whole
        yield f"{dtype}, rows of 4096", dtype, whole.reshape(-1, 4096)
        yield f"{dtype}, rows of 4096, transposed", dtype, whole.reshape(-1, 4096).T
        yield f"{dtype}, rows of 4096, every second column", dtype, whole.reshape(-1, 4096)[:, ::2]
        yield f"{dtype}, rows of 3", dtype, even.reshape(-1, 3)
        yield f"{dtype}, rows of 3, transposed", dtype, even.reshape(3, -1).T
    yield "float64, rows of 4096", "float64", drawn.view(np.uint64).reshape(-1, 4096)
    yield "int8, rows of 4096", "int8", drawn.view(np.uint8).reshape(-1, 4096)


def main(megabytes: int = 256, repeats: int = 5, page: Path | None = None) -> None:
    """Weighs all arrays and shows the table."""
    found = []
    for name, dtype, array in arrays(megabytes):
        text = " ".join("nh"[: array.ndim])
        layout = sm.Layout(array.shape, sm.Mesh(), text, dtype=dtype)
        ways: list[Callable[[], object]] = [
            lambda layout=layout, array=array: sm.content.digest_of(layout, {0: array}),  # type: ignore[misc]
            lambda array=array: array.sum(dtype=np.uint64),  # type: ignore[misc]
        ]
        if array.flags.c_contiguous:
            ways.append(lambda array=array: zlib.crc32(array))  # type: ignore[misc]
        rates = [f"{array.nbytes / best(way, repeats) / 1e9:.2f}" for way in ways]
        found.append([name, *rates, *["-"] * (3 - len(rates))])
    about = (
        f"Figures are GB of input that one core reads per second. Arrays have {megabytes} MB. In rows "
        f'with "every second column", arrays have {megabytes // 2} MB. crc32 reads only contiguous arrays.'
    )
    show(page, "Digests of content", about, HEAD, found)


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=256, repeats=5)
    main(given.megabytes, given.repeats, given.page)
