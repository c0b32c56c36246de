"""The index of all public names, one line each, grouped by what people look for: docs/names.md.

    python tools/index.py            write the page
    python tools/index.py --check    exit 1 if the page is not what would be written

A line is the first sentence of the name's docstring. A public name that stands in no group is an error.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "names.md"


class _Anything(type):
    """A class of a package that is not installed: a base class, and decorators that change nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: lambda made: made


class _Absent(ModuleType):
    """A module of a package that is not installed."""

    __path__: tuple[str, ...] = ()
    __version__ = "not installed"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(MetaPathFinder, Loader):
    """Finds every module of packages that this environment does not have: only docstrings are read."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in ("accelerate", "jax", "ray", "trl", "verl")
        return ModuleSpec(name, self) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
warnings.simplefilter("ignore")  # what a package says of a version that is not there

MODULES = {
    "sm": "shardmath",
    "smt": "shardmath_torch",
    "shardmath_jax": "shardmath_jax",
    "shardmath_ray": "shardmath_ray",
    "shardmath_trl": "shardmath_trl",
    "shardmath_verl": "shardmath_verl",
    "shardmath_sglang": "shardmath_sglang",
    "shardmath_vllm": "shardmath_vllm",
    "sm.buffers": "shardmath.buffers",
    "sm.content": "shardmath.content",
    "sm.errors": "shardmath.errors",
    "sm.formats": "shardmath.formats",
    "sm.pictures": "shardmath.pictures",
    "sm.rules": "shardmath.rules",
    "sm.storage": "shardmath.storage",
    "sm.store": "shardmath.store",
    "sm.traces": "shardmath.traces",
    "sm.transforms": "shardmath.transforms",
    "shardmath.testing": "shardmath.testing",
}
"""Modules that people use, by what pages call them."""

GROUPS = {
    "Who holds what": """sm.Layout sm.Mesh sm.Placement sm.Shard sm.StridedShard sm.Replicate sm.Partial sm.Ragged
        sm.Balanced sm.BlockCyclic sm.Packed sm.Table sm.Runs sm.from_ranges sm.from_holdings sm.window
        sm.equivalent""",
    "Plans and proofs": """sm.plan sm.Plan sm.Transfer sm.TransferTable sm.verify sm.prove
        sm.prove_equivalent sm.simulate sm.adjoint sm.relabel sm.recognize sm.explore sm.without""",
    "Rounds, and how close to the fastest": """sm.schedule sm.Program sm.certify sm.Certificate sm.crossing_bytes
        sm.Topology""",
    "Move tensors": """smt.compile smt.Mover smt.Handle smt.Moved smt.commit smt.redistribute smt.progress_bar
        smt.trace smt.compile_changes smt.Changes smt.compile_transformed smt.TransformedMover smt.megatron_hook""",
    "Join separate jobs": "smt.connect smt.disconnect",
    "Refit an engine": """sm.refit sm.Refit sm.divide smt.Refit smt.record shardmath_vllm.*
        shardmath_ray.* shardmath_trl.* shardmath_verl.*
        shardmath_sglang.*""",
    "How systems store weights": "sm.rules.* sm.storage.*",
    "DTensors and modules": """smt.layout_of smt.from_dtensor smt.to_dtensor smt.Fused smt.set_device_mesh
        smt.checkpointable smt.digest smt.amax smt.sendable""",
    "JAX": "shardmath_jax.*",
    "Checkpoints": """smt.save smt.load smt.save_state smt.load_state smt.state_of smt.load_weights smt.export
        smt.open_checkpoint smt.CheckpointError smt.WeightsError""",
    "Quantized formats": """smt.quantize smt.dequantize smt.quantized_parts smt.compile_quantize smt.Quantizer
        sm.formats.*""",
    "Transforms on the way": "sm.transforms.*",
    "Flat buffers": "sm.buffers.*",
    "Windows and views": "sm.store.*",
    "Compare contents": "sm.content.*",
    "Pictures and traces": "sm.pictures.* sm.traces.*",
    "Test placements, rules and transforms": "shardmath.testing.*",
    "Errors": "sm.ShardError sm.errors.*",
    "Memory": "sm.clear_caches",
}
"""Names by what they are for; `module.*` stands for all names of a module."""

HEAD = """# All names

Every public name in one line, by what it is for. `sm` is `shardmath`, `smt` is `shardmath_torch`. For arguments,
shapes, units and errors call `help(name)`, or read the [API page](api.md), which `make docs` fills in.
"""


def list_names(words: str) -> list[tuple[str, str]]:
    """(module, name) of all names that the words of a group stand for."""
    names = []
    for word in words.split():
        module, _, name = word.rpartition(".")
        every = importlib.import_module(MODULES[module]).__all__
        names += [(module, one) for one in (every if name == "*" else [name])]
    return names


def summarize(module: str, name: str) -> str:
    """The first sentence of a public name's docstring, in one line."""
    value = getattr(importlib.import_module(MODULES[module]), name)
    text = find_text(MODULES[module], name) or inspect.getdoc(value)
    assert text, f"{module}.{name} has no docstring"
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0]
    return sentence.rstrip(".") + "."


def find_text(module: str, name: str) -> str:
    """The text under the assignment of a constant or an alias, in the module that makes it."""
    source = importlib.import_module(module).__file__
    assert source is not None
    body = ast.parse(Path(source).read_text()).body
    for node, after in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.ImportFrom) and {name, "*"} & {one.name for one in node.names}:
            return find_text(str(node.module), name)
        names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
        is_made = isinstance(node, ast.Assign | ast.AnnAssign) and name == names[0]
        if is_made and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return inspect.cleandoc(str(after.value.value))
    return ""


def find_ungrouped() -> set[str]:
    """Public names that stand in no group."""
    every = {
        f"{short}.{name}"
        for short, long in MODULES.items()
        for name in importlib.import_module(long).__all__
    }
    return every - {
        f"{module}.{name}" for words in GROUPS.values() for module, name in list_names(words)
    }


def write_page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    for group, words in GROUPS.items():
        yield f"## {group}\n"
        for module, name in list_names(words):
            yield f"- `{module}.{name}`: {summarize(module, name)}"
        yield ""
    yield "Next: [all pages by task](index.md), or the [glossary](glossary.md)."


def main() -> int:
    ungrouped = find_ungrouped()
    assert not ungrouped, f"give these names a group in {Path(__file__).name}: {sorted(ungrouped)}"
    text = "\n".join(write_page()) + "\n"
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() != text:
        print("docs/names.md is not what docstrings say; run python tools/index.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
