"""Arguments: what the commands of `python -m shardmath` share: parsers, JSON, errors, and a word if one takes long.

1. With `--json` a command prints one JSON object, whose `schema` names its form, and no other line on stdout. An error
   is an object, too: `shardmath.error/1`.
2. The form of a schema changes only by new keys; any other change is a new number.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardmath.base.errors import ShardError
from shardmath.base.text import message_of

__all__ = [
    "INTERRUPTED",
    "add_json",
    "make_parser",
    "name_program",
    "print_json",
    "write_svg",
    "report_error",
    "working",
]

INTERRUPTED = 130
"""Exit status, as shells have it: 128 and the number of SIGINT."""

PATIENCE_S = 1.0
"""The seconds after which a command says what it is doing."""


def name_program() -> str:
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
    prog = f"{name_program()} {command}"
    # An abbreviated --json would not be known where errors are printed.
    return argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, also for an error"
    )


def print_json(name: str, facts: Mapping[str, Any]) -> None:
    """Print `facts` as one JSON object, of the schema `shardmath.<name>/1`."""
    print(json.dumps({"schema": f"shardmath.{name}/1", **facts}, indent=2))


def write_svg(path: str, text: str) -> None:
    """Write a picture to the file `path`. Raises ShardError if it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fix = "give a path in an existing folder in which you may write"
        raise ShardError(f"cannot write {path}: {error.strerror or error}; {fix}") from error


def report_error(error: ShardError, command: str, *, as_json: bool) -> None:
    """Print an error: a line on stderr that begins with `command`, or, if `as_json`, an object on stdout."""
    if not as_json:
        print(f"{command}: {error}", file=sys.stderr)
        return
    facts = {"code": error.code, "class": type(error).__name__, "message": message_of(error)}
    print_json("error", facts)


@contextmanager
def working(what: str) -> Iterator[None]:
    """While the `with` block runs, say `what` it does on stderr if it takes longer than a second and a person reads."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(PATIENCE_S, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
