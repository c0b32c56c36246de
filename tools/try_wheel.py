"""The wheel, tried in environments that have nothing else: numpy alone, the pinned torch, and the newest torch.

python tools/try_wheel.py dist         # makes three environments in a temporary folder; gigabytes if torch is CUDA's

Exits with 1 if the wheel's README would show a broken link, or a program fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

CORE = """
import sys
import shardmath as sm

rows, columns = sm.Layout((9, 4), sm.Mesh(tp=4), "(tp n) h"), sm.Layout((9, 4), sm.Mesh(tp=2), "n (tp h)")
plan = sm.plan(rows, columns)
sm.verify(plan)
assert plan.svg().startswith("<svg") and "torch" not in sys.modules
print(plan)
"""
TORCH = """
import importlib.util
import torch, torch.distributed as dist
import shardmath as sm, shardmath_sglang, shardmath_torch as smt, shardmath_vllm
# They import their own framework.
for name in ("shardmath_jax", "shardmath_ray", "shardmath_trl", "shardmath_verl"):
    assert importlib.util.find_spec(name), name

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
one = sm.Mesh(tp=1)
move = smt.compile(sm.plan(sm.Layout((6, 4), one, "(tp n) h"), sm.Layout((6, 4), one, "n (tp h)")))
weight, out = torch.rand(6, 4), torch.empty(6, 4)
move(weight, out=out, check="digest")
assert out.equal(weight)
move.close()
dist.destroy_process_group()
print("torch", torch.__version__)
"""
RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]+\)")


def check_readme(wheel: Path) -> None:
    """Exit with a message if the page of an index would have a link that leads nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        page = archive.read(name).decode().partition("\n\n")[2]
    # Code in fences and in backquotes is no link.
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)
    broken = RELATIVE.findall(prose)
    if broken or "https://raw.githubusercontent.com" not in prose:
        sys.exit(f"the README of {wheel.name} has relative links: {broken}")


def run(python: Path, *arguments: str) -> str:
    """Run a program in an environment, outside of the repository; its output."""
    done = subprocess.run(
        [python, *arguments], cwd=python.parent, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def make_environment(folder: Path, requirements: Sequence[str]) -> Path:
    """The Python of a new environment with these requirements, and no others."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "--disable-pip-version-check", "-qq", "install", *requirements)
    run(python, "-m", "pip", "--disable-pip-version-check", "check")
    return python


def main() -> None:
    """Try the wheel in the folder that is the first argument."""
    (wheel,) = Path(sys.argv[1]).resolve().glob("*.whl")
    check_readme(wheel)
    pinned = ["-c", str(CONSTRAINTS)]
    with tempfile.TemporaryDirectory() as scratch:
        core = make_environment(Path(scratch) / "core", [str(wheel)])
        print("core:", run(core, "-c", CORE))
        print(run(core, "-m", "shardmath", "verify", "tp=4", "tp=2", "9,4", "(tp n) h", "n (tp h)"))
        for name, options in {"pinned": pinned, "newest": []}.items():
            python = make_environment(Path(scratch) / name, [*options, f"{wheel}[torch]"])
            print(f"{name}:", run(python, "-c", TORCH))


if __name__ == "__main__":
    main()
