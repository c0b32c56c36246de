"""Which files use names of torch that begin with an underscore: these, which a new version of torch may break."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

BACKENDS = Path(__file__).parents[2] / "backends"
KEEPERS = {
    "shardmath_torch/groups/compat.py",
    "shardmath_torch/groups/joint_group.py",
    "shardmath_torch/tensors/fsdp.py",
}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and part != "__future__" for part in dotted.split("."))


def list_private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of torch that are imported, or looked up in what was imported from torch."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torch":
                    imported[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in node.names:
                imported[name.asname or name.name] = f"{node.module}.{name.name}"
    yield from filter(is_private, imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr[:2] != "__":
            first, *_ = ast.unparse(node).split(".")
            if first in imported:
                yield ast.unparse(node)


def test_private_names_of_torch_are_in_three_files() -> None:
    found = {}
    for file in sorted(BACKENDS.rglob("*.py")):
        names = sorted(set(list_private_names(ast.parse(file.read_text()))))
        if names:
            found[file.relative_to(BACKENDS).as_posix()] = names
    assert found.keys() == KEEPERS, found


def test_what_is_looked_for() -> None:
    text = """
import torch
import torch.distributed as dist
from torch._C import Node
from torch.distributed import distributed_c10d as c10d
torch._C.hidden, dist.open, c10d._world.names, torch.Tensor.__add__, self._own
"""
    names = set(list_private_names(ast.parse(text)))
    assert names == {"torch._C.Node", "torch._C", "c10d._world"}
