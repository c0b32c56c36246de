"""The block of docs/recording.md that records a real vLLM is run as it stands there and prints what is below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.distributed.pool import free_port
from tests.vllm import checkpoints
from tests.vllm.cases import fields

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(# record_vllm\.py, .*?)^```\n```text\n(.*?)^```$", re.M | re.S)
PORT = "29500"


def test_the_page_s_program_prints_what_the_page_says(tmp_path: Path) -> None:
    found = BLOCK.search((ROOT / "docs/recording.md").read_text())
    assert found is not None
    text, printed = found.groups()
    assert PORT in text
    program = tmp_path / "record_vllm.py"
    program.write_text(text.replace(PORT, str(free_port())))
    folder = checkpoints.save(fields("llama", num_hidden_layers=1), tmp_path / "checkpoint")
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    done = subprocess.run(
        [sys.executable, str(program), str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
