"""Files are opened and closed once."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from shardmath_torch.checkpoints.files import places


def test_ctrl_c_when_a_file_has_been_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt, not an error of a handle that is closed twice; it may be another thread's by then."""
    file = tmp_path / "file"
    file.write_bytes(b"abc")

    def strike(*args: Any, **kwargs: Any) -> None:
        with builtins.open(*args, **kwargs):
            raise KeyboardInterrupt

    monkeypatch.setattr(places, "open", strike, raising=False)
    with pytest.raises(KeyboardInterrupt):
        places.content_of(file)
    monkeypatch.undo()
    assert places.content_of(file) == b"abc"
