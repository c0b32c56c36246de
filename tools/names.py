"""Classes of one name in two modules: whoever reads a name has to find out which is meant.

    python tools/names.py            all of them, with their modules
    python tools/names.py --check    exits 1 where a public name is one of them

Only classes at the top of a file count.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shardmath", "backends", "integrations")

DOORS = {
    "Refit": "sm.Refit, a plan, and smt.Refit, which carries it out",
}
"""Names that two packages show their users, who tell them apart by the package."""


def find_shared() -> dict[str, list[str]]:
    """The files of each class whose name stands in two of them, at the top of the file."""
    homes = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(file.relative_to(ROOT)))
    return {name: files for name, files in sorted(homes.items()) if len(files) > 1}


def is_fault(name: str) -> bool:
    """Whether nobody can tell the classes apart by what they are imported from."""
    return not name.startswith("_") and name not in DOORS


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    shared = find_shared()
    is_check = list(arguments) == ["--check"]
    if is_check:
        shared = {name: files for name, files in shared.items() if is_fault(name)}
    for name, files in shared.items():
        print(f"{name}: {', '.join(files)}")
    return int(is_check and bool(shared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
