"""A file of tensors of every type."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.distributed.tasks.every_type import tensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors().items()}, path)
    return path
