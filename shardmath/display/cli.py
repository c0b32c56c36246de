"""The command line: `python -m shardmath COMMAND ...`.

    python -m shardmath show "dp=4 tp=2" 9,4 "(tp dp n) h"
    python -m shardmath plan "tp=4" "tp=2 ranks=4:6" 8,4 "(tp n) h" "n (tp h)"

The commands in this file need only the core. Backends add commands through the entry point group
`shardmath.commands`; each is a function of the remaining arguments that returns an exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points

import shardmath
from shardmath.base.errors import LayoutError, ShardError
from shardmath.display.explorer.question import parse_shape
from shardmath.display.pictures.text import show
from shardmath.layouts.layout import Layout
from shardmath.models.systems.rules import parse_mesh
from shardmath.plans.plan import Plan, plan
from shardmath.plans.uncovered import first_unheld
from shardmath.proofs.verify import verify

__all__ = ["INTERRUPTED", "Command", "main", "make_parser", "run"]

Command = Callable[[Sequence[str]], int]

INTERRUPTED = 130
"""Exit status, as shells have it: 128 and the number of SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, and return its exit status: 1 for a ShardError, 2 for an unknown command, 130 on
    SIGINT."""
    commands = dict(BUILT_IN)
    for point in entry_points(group="shardmath.commands"):
        commands[point.name] = _defer_import(point)
    return run(commands, sys.argv[1:] if argv is None else argv)


def run(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run the command in `commands` that `arguments` begins with; return an exit status as `main` does."""
    try:
        status = _run(commands, arguments)
        sys.stdout.flush()
    except ShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; at exit, Python would flush the rest and fail again.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        return 0
    return status


def _run(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, with the other arguments. Errors propagate."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(commands))
        return 0
    name, *others = arguments
    if name == "--version":
        print(f"shardmath {shardmath.__version__}")
        return 0
    if name not in commands:
        usage = _help(commands)
        print(f"unknown command {name!r}\n\n{usage}", file=sys.stderr)
        return 2
    return commands[name](others)


SUMMARIES = {
    "explore": "serve a page on which layouts are typed, and their move is drawn and proved",
    "buffers": "lay out a model's flat buffers, and show them",
    "formats": "list the quantized formats, their scales and where they may be cut",
    "plan": "plan a move between two layouts, prove it, and print who sends what",
    "refit": "move a model's weights between local processes, and check every byte",
    "show": "print what each rank holds of a layout",
    "trace": "merge the traces of a move's ranks into one file, and draw it",
}
"""A line per command of this project: reading the docstrings of backends' commands would import them."""


def _name_program() -> str:
    """The program as the user typed it: `shardmath`, or `python -m` and the package's name."""
    folder, file = os.path.split(sys.argv[0])
    if file.startswith("shardmath"):
        return "shardmath"
    # Python runs `-m PACKAGE` as the file PACKAGE/__main__.py.
    package = os.path.basename(folder) if file == "__main__.py" else "shardmath"
    return f"python -m {package}"


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser without arguments so far. Its usage line shows the program, as the user typed it,
    followed by `command`."""
    prog = f"{_name_program()} {command}"
    return argparse.ArgumentParser(prog=prog, description=description)


def _help(commands: Mapping[str, Command]) -> str:
    """The usage, and a line per command."""
    usage = f"usage: {_name_program()} COMMAND ..."
    lines = [f"{usage}   (COMMAND --help says more, --version which this is)", "", "commands:"]
    for name in sorted(commands):
        doc = (commands[name].__doc__ or "provided by another package").splitlines()[0]
        summary = SUMMARIES.get(name, doc)
        lines.append(f"  {name:15}{summary}")
    return "\n".join(lines)


def _defer_import(point: EntryPoint) -> Command:
    """A command that imports its package only when it runs."""

    def command(argv: Sequence[str]) -> int:
        try:
            run: Command = point.load()
        except ImportError as error:
            message = f"error: {point.name} needs {error.name}; install shardmath[torch]"
            print(message, file=sys.stderr)
            return 1
        return run(argv)

    return command


def _read_shape(text: str) -> tuple[int, ...]:
    """Parse sizes with commas between them."""
    try:
        return parse_shape(text)
    except LayoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _show(argv: Sequence[str]) -> int:
    """Print what each rank holds."""
    parser = make_parser("show", _show.__doc__)
    parser.add_argument("mesh", help='axes and sizes: "dp=4 tp=2"')
    parser.add_argument("shape", type=_read_shape, help="global shape: 9,4")
    parser.add_argument("layout", help='notation: "(tp dp n) h"')
    parser.add_argument(
        "--dtype", default="float32", help="dtype of the tensor, by default float32"
    )
    given = parser.parse_args(argv)
    mesh = parse_mesh(given.mesh)
    print(show(Layout(given.shape, mesh, given.layout, dtype=given.dtype)))
    return 0


def _plan(argv: Sequence[str]) -> int:
    """Plan a move between two layouts, prove it, and print who sends what."""
    given = _plan_parser().parse_args(argv)
    src = Layout(given.shape, parse_mesh(given.src_mesh), given.src, dtype=given.dtype)
    dst = Layout(given.shape, parse_mesh(given.dst_mesh), given.dst, dtype=given.dtype)
    p = plan(src, dst, window=given.window)
    verify(p)
    print(f"{show(p)}\n{_describe_proof(p)}; digest {p.digest[:16]}")
    return 0


def _plan_parser() -> argparse.ArgumentParser:
    """The parser of `plan`'s arguments."""
    parser = make_parser("plan", _plan.__doc__)
    parser.add_argument("src_mesh", help='axes and sizes of the source: "tp=4"')
    parser.add_argument("dst_mesh", help='axes and sizes of the destination: "tp=2 ranks=4:6"')
    parser.add_argument("shape", type=_read_shape, help="global shape: 8,4")
    parser.add_argument("src", help='layout at the source: "(tp n) h"')
    parser.add_argument("dst", help='layout at the destination: "n (tp h)"')
    parser.add_argument(
        "--dtype", default="float32", help="dtype of the tensor, by default float32"
    )
    window_help = "the destination may hold less than the tensor"
    parser.add_argument("--window", action="store_true", help=window_help)
    return parser


def _describe_proof(plan: Plan) -> str:
    """What `verify` has proved about a plan of one tensor."""
    if not plan.in_part:
        return (
            "proved: the destination holds every element, "
            "and each arrives exactly once wherever it is held"
        )
    missing = first_unheld(plan.dst[""])
    return (
        f"proved: what the destination holds arrives exactly once; "
        f"element {missing} is not held there"
    )


def _explore(argv: Sequence[str]) -> int:
    """Serve a page on the loopback on which two layouts are typed; their move is planned, proved and drawn as you type.
    Ctrl-C ends it."""
    parser = make_parser("explore", _explore.__doc__)
    parser.add_argument(
        "--port",
        type=int,
        default=8765,
        help="port on 127.0.0.1, by default 8765; 0 for any free one",
    )
    given = parser.parse_args(argv)
    # Only this command needs a server.
    from shardmath.display.explorer.server import Explorer

    try:
        explorer = Explorer(given.port)
    except (OSError, OverflowError) as error:
        print(
            f"error: cannot serve on port {given.port}: {error}; pass another --port",
            file=sys.stderr,
        )
        return 1
    with explorer:
        print(f"open {explorer.url} in a browser; Ctrl-C ends the server", flush=True)
        with suppress(KeyboardInterrupt):
            explorer.serve()
    return 0


def _merge_traces(argv: Sequence[str]) -> int:
    """Merge what `smt.trace` wrote on several ranks into one file, which Perfetto (ui.perfetto.dev) opens."""
    parser = make_parser("trace", _merge_traces.__doc__)
    parser.add_argument("files", nargs="+", help="the trace files, one per rank")
    parser.add_argument("--out", help="path of the file to write with the merged trace")
    parser.add_argument("--svg", help="path of the file to write with a picture of the trace")
    given = parser.parse_args(argv)
    # Only this command needs traces.
    from shardmath.display.traces.chrome import read, write, write_text
    from shardmath.display.traces.drawing import svg
    from shardmath.display.traces.merging import merge

    traces = [read(file) for file in given.files]
    # A single file may be a merged trace already.
    trace = merge(traces) if len(traces) > 1 else traces[0]
    if given.out:
        write(trace, given.out)
    if given.svg:
        write_text(svg(trace), given.svg)
    print(trace)
    return 0


def _list_formats(argv: Sequence[str]) -> int:
    """List the quantized formats: data, scales, shape of the scales of a matrix of M rows and K columns, and cuts."""
    parser = make_parser("formats", _list_formats.__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    given = parser.parse_args(argv)
    # Only this command needs formats.
    from shardmath.values.formats.listing import listing, show_listing

    if given.json:
        print(json.dumps([row._asdict() for row in listing()], indent=2))
    else:
        print(show_listing())
    return 0


BUILT_IN: dict[str, Command] = {
    "explore": _explore,
    "show": _show,
    "formats": _list_formats,
    "plan": _plan,
    "trace": _merge_traces,
}
