"""Files are opened and closed once; folders that cannot be made."""

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


@pytest.mark.parametrize("folder", ["link", "link/below", "file", "link to a file"])
def test_a_folder_whose_name_is_taken(tmp_path: Path, folder: str) -> None:
    """The error says by what, though for the system a link to nothing is a file that exists."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "none")
    (tmp_path / "link to a file").symlink_to(tmp_path / "file")
    said = {"file": "file is not a folder", "link to a file": "link to a file is not a folder"}
    said |= dict.fromkeys(
        ["link", "link/below"], r"link is a link to .*/none, which does not exist"
    )
    with pytest.raises(FileExistsError, match=said[folder]):
        places.make_folder(tmp_path / folder)
