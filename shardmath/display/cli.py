"""The command line: `python -m shardmath COMMAND ...`.

    python -m shardmath show "dp=4 tp=2" 9,4 "(tp dp n) h"
    python -m shardmath plan "tp=4" "tp=2 ranks=4:6" 8,4 "(tp n) h" "n (tp h)"

The commands of `commands` need only the core. Backends add commands through the entry point group
`shardmath.commands`; each is a function of the remaining arguments that returns an exit status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

import shardmath
from shardmath.base.errors import ShardError
from shardmath.display.arguments import INTERRUPTED, make_parser, name_program, report_error
from shardmath.display.commands import BUILT_IN, Command
from shardmath.display.completion import SHELLS, write_completion

__all__ = ["INTERRUPTED", "Command", "main", "make_parser", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, and return its exit status: 1 for a ShardError, 2 for an unknown command, 130 on
    SIGINT."""
    commands = dict(BUILT_IN)
    commands["completion"] = lambda arguments: _complete(commands, arguments)
    for point in entry_points(group="shardmath.commands"):
        commands[point.name] = _defer_import(point)
    return run(commands, sys.argv[1:] if argv is None else argv)


def run(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run the command in `commands` that `arguments` begins with; return an exit status as `main` does."""
    try:
        status = _run(commands, arguments)
        sys.stdout.flush()
    except ShardError as error:
        report_error(error, "error", as_json="--json" in arguments)
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
    "completion": "print a script with which bash, zsh or fish completes commands and options",
    "buffers": "lay out a model's flat buffers, and show them",
    "formats": "list the quantized formats, their scales and where they may be cut",
    "plan": "plan a move between two layouts, prove it, and print who sends what",
    "prove": "decide for all sizes whether a layout or a move loses nothing",
    "refit": "move a model's weights between local processes, and check every byte",
    "show": "print what each rank holds of a layout",
    "trace": "merge the traces of a move's ranks into one file, and draw it",
    "verify": "plan a move between two layouts, and prove it",
}
"""A line per command of this project: reading the docstrings of backends' commands would import them."""


def _help(commands: Mapping[str, Command]) -> str:
    """The usage, and a line per command."""
    usage = f"usage: {name_program()} COMMAND ..."
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


def _complete(commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """Print a script with which a shell completes commands and options."""
    parser = make_parser("completion", _complete.__doc__)
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    given = parser.parse_args(argv)
    print(write_completion(given.shell, commands))
    return 0
