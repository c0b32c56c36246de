"""What `import shardmath` brings along: numpy and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy
import {module}
print(" ".join(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def imported(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "shardmath",
        "shardmath.display.cli",
        "shardmath.store, shardmath.pictures, shardmath.traces, shardmath.rules",
    ],
)
def test_the_core_imports_neither_torch_nor_hypothesis_nor_scipy(module: str) -> None:
    others = {
        "torch",
        "hypothesis",
        "scipy",
        "einops",
        "safetensors",
        "transformers",
        "rich",
        "ml_dtypes",
        "pytest",
    }
    assert not imported(module) & others
    assert not {name for name in imported(module) if name.startswith("shardmath_")}


def test_public_names_are_there() -> None:
    import shardmath

    assert all(hasattr(shardmath, name) for name in shardmath.__all__)
    assert len(set(shardmath.__all__)) == len(shardmath.__all__)


LISTED = """
import sys
import shardmath
assert not [name for name in sys.modules if name.startswith("shardmath.plans")]
listed = dir(shardmath)
assert {"plan", "verify", "store", "__version__"} <= set(listed)
assert set(shardmath.__all__) <= set(listed)
"""


def test_what_is_imported_on_use_is_listed_before() -> None:
    """So that names complete in a notebook."""
    subprocess.run([sys.executable, "-c", LISTED], check=True)


CLOSURE = """
import sys
{statement}
found = [name for name, module in sys.modules.items() if not hasattr(module, "__path__")]
print(*(name for name in found if name.startswith("shardmath")))
"""


@pytest.mark.parametrize(
    ("statement", "most", "without"),
    [
        ("from shardmath.layouts.layout import Layout", 22, ("shardmath.plans",)),
        (
            "from shardmath.plans.plan import plan",
            48,
            ("shardmath.values", "shardmath.plans.programs"),
        ),
        (
            "from shardmath.proofs.claims import check_claim",
            51,
            ("shardmath.plans.programs", "shardmath.proofs.shapes"),
        ),
        (
            "import shardmath_torch",
            24,
            (
                "torch",
                "shardmath_torch.checkpoints",
                "shardmath_torch.groups.compat",
                "shardmath_torch.moves",
                "shardmath_torch.tensors",
            ),
        ),
        (
            "import shardmath_torch as smt; smt.compile",
            119,
            (
                "shardmath.buffers",
                "shardmath.models",
                "shardmath.display.pictures",
                "shardmath_torch.checkpoints",
            ),
        ),
        (
            "import shardmath_torch as smt; smt.Refit",
            176,
            ("shardmath.buffers", "shardmath.display.pictures", "shardmath_torch.checkpoints"),
        ),
    ],
)
def test_a_name_brings_along_what_it_needs(
    statement: str, most: int, without: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSURE.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = done.stdout.split()
    assert len(found) <= most, found
    assert not [name for name in found if name.startswith(without)]


LATE = """
import pickle
import shardmath_torch as smt

assert dir(smt) == sorted(smt.__all__) and set(smt.LATE) == set(smt.__all__)
assert smt.layout_of is smt.layout_of
for name in smt.__all__:
    value = getattr(smt, name)
    assert pickle.loads(pickle.dumps(value)) is value, name
    if isinstance(value, type):
        assert value.__module__ == "shardmath_torch", name
try:
    smt.nothing
except AttributeError as error:
    assert str(error) == "module 'shardmath_torch' has no attribute 'nothing'"
else:
    raise AssertionError
"""


def test_names_of_the_torch_backend_are_imported_on_use_and_pickled_by_name() -> None:
    subprocess.run([sys.executable, "-c", LATE], check=True)


PICKLED = """
import sys
import torch
import pickle
refit = pickle.loads({pickled!r})
assert refit.__name__ == "Refit" and "shardmath_torch.checkpoints" not in sys.modules
"""


def test_a_class_is_unpickled_where_nothing_has_imported_it() -> None:
    pickled = b"cshardmath_torch\nRefit\n."
    subprocess.run([sys.executable, "-c", PICKLED.format(pickled=pickled)], check=True)


NAMED_BY_FACES = """
import pickle
import warnings
import shardmath as sm
from shardmath.models.recordings.recorded import Native
recorded = sm.storage.Recorded((), (Native("x", (1,), "int8", (), "", ""),))
text = pickle.dumps(recorded)
warnings.simplefilter("error")
assert pickle.loads(text) == recorded
for face, names in {
    "storage": ("Recorded", "RecordedSide"), "formats": ("Amaxes",), "content": ("Difference",),
    "transforms": ("Transformed",),
}.items():
    for name in names:
        found = getattr(getattr(sm, face), name)
        assert (found.__module__, found.__name__) == (f"shardmath.{face}", name)
"""


def test_classes_of_faces_are_pickled_by_names_that_stay() -> None:
    """By their former ones each would be warned of, and not be read once those are gone."""
    subprocess.run([sys.executable, "-c", NAMED_BY_FACES], check=True)
