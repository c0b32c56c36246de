"""The command line: `python -m shardmath COMMAND ...`.

    python -m shardmath show "dp=4 tp=2" 9,4 "(tp dp n) h"
    python -m shardmath plan "tp=4" "tp=2 ranks=4:6" 8,4 "(tp n) h" "n (tp h)"

`show` and `plan` need the core alone; backends add commands through the entry point group `shardmath.commands`, each a
function of the remaining arguments that returns an exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

import shardmath
from shardmath.base.errors import ShardError
from shardmath.families.rules import parse_mesh
from shardmath.layouts.layout import Layout
from shardmath.pictures.text import show
from shardmath.plans.cover import first_unheld
from shardmath.plans.plan import Plan, plan
from shardmath.proofs.verify import verify

__all__ = ["main"]

Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for an error of ours, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {
        **BUILT_IN,
        **{point.name: _loaded(point) for point in entry_points(group="shardmath.commands")},
    }
    try:
        status = _run(commands, arguments)
        sys.stdout.flush()
        return status
    except ShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (
        BrokenPipeError
    ):  # whoever reads has had enough, as `head`; what is left is not to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(commands))
        return 0
    if arguments[0] == "--version":
        print(f"shardmath {shardmath.__version__}")
        return 0
    if arguments[0] not in commands:
        print(f"unknown command {arguments[0]!r}\n\n{_help(commands)}", file=sys.stderr)
        return 2
    return commands[arguments[0]](arguments[1:])


SUMMARIES = {
    "buffers": "lay out a model's flat buffers, and show them",
    "plan": "plan a move between two layouts, prove it, and print who sends what",
    "refit": "move a model's weights between local processes, and check every byte",
    "show": "print what each rank holds of a layout",
}
"""A line for each command of this project; looking into those of backends would import them."""


def _help(commands: Iterable[str]) -> str:
    """The usage, and a line for each command."""
    lines = [f"  {name:10}{SUMMARIES.get(name, 'of another package')}" for name in sorted(commands)]
    head = "usage: python -m shardmath COMMAND ...   (COMMAND --help says more, --version which this is)"
    return "\n".join([head, "", "commands:", *lines])


def _loaded(point: EntryPoint) -> Command:
    def command(argv: Sequence[str]) -> int:
        try:
            run: Command = point.load()
        except ImportError as error:
            print(
                f"error: {point.name} needs {error.name}; install shardmath[torch]", file=sys.stderr
            )
            return 1
        return run(argv)

    return command


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split(",") if n.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; write sizes with commas: 9,4"
        ) from None


def _show(argv: Sequence[str]) -> int:
    """Print what each rank holds."""
    parser = argparse.ArgumentParser(prog="python -m shardmath show", description=_show.__doc__)
    parser.add_argument("mesh", help='axes and sizes: "dp=4 tp=2"')
    parser.add_argument("shape", type=_shape, help="global shape: 9,4")
    parser.add_argument("layout", help='notation: "(tp dp n) h"')
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args(argv)
    print(show(Layout(given.shape, parse_mesh(given.mesh), given.layout, dtype=given.dtype)))
    return 0


def _plan(argv: Sequence[str]) -> int:
    """Plan a move between two layouts, prove it, and print who sends what."""
    parser = argparse.ArgumentParser(prog="python -m shardmath plan", description=_plan.__doc__)
    parser.add_argument("src_mesh", help='axes and sizes of the source: "tp=4"')
    parser.add_argument("dst_mesh", help='of the destination: "tp=2 ranks=4:6"')
    parser.add_argument("shape", type=_shape, help="global shape: 8,4")
    parser.add_argument("src", help='layout at the source: "(tp n) h"')
    parser.add_argument("dst", help='layout at the destination: "n (tp h)"')
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--window", action="store_true", help="the destination may hold less than the tensor"
    )
    given = parser.parse_args(argv)
    sides = ((given.src_mesh, given.src), (given.dst_mesh, given.dst))
    src, dst = (
        Layout(given.shape, parse_mesh(mesh), text, dtype=given.dtype) for mesh, text in sides
    )
    p = plan(src, dst, window=given.window)
    verify(p)
    print(f"{show(p)}\n{_proved(p)}; digest {p.digest[:16]}")
    return 0


def _proved(p: Plan) -> str:
    """What `verify` has found of a plan of one tensor."""
    if not p.in_part:
        return "proved: the destination holds every element, and each arrives exactly once wherever it is held"
    missing = first_unheld(p.dst[""])
    return f"proved: what the destination holds arrives exactly once; element {missing} is not held there"


BUILT_IN: dict[str, Command] = {"show": _show, "plan": _plan}
