"""The project's instruments: `python -m bench refit-table`, `python -m bench storage-check FILE`, in a checkout."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence

from bench.mappings import find_rows
from bench.recorded import compare
from bench.table import measure, show
from shardmath.display.arguments import make_parser
from shardmath.display.cli import Command, run

__all__ = ["COMMANDS", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status, as that of `python -m shardmath`."""
    return run(COMMANDS, sys.argv[1:] if argv is None else argv)


@contextlib.contextmanager
def _show_progress() -> Iterator[Callable[[int, int, str], None]]:
    """While inside, what is called with (number, of how many, name) names on stderr what is worked on.

    It is one line that changes, and is gone in the end; nothing where stderr is no terminal.
    """
    # One short of the width, so that the cursor stays on the line.
    width = shutil.get_terminal_size().columns - 1
    is_seen = sys.stderr.isatty()

    def write(line: str) -> None:
        if is_seen:
            print(f"\r{line[:width]:{width}}\r", end="", file=sys.stderr, flush=True)

    try:
        yield lambda number, count, name: write(f"{number} of {count}: {name}")
    finally:
        write("")


def _check_storage(argv: Sequence[str]) -> int:
    """Compare what rows say that ranks store with a file of what ranks stored."""
    parser = make_parser("storage-check", _check_storage.__doc__)
    parser.add_argument("file", help="recorded vectors, JSON or gzipped JSON")
    parser.add_argument("models", nargs="*", help="of the file; all without any")
    given = parser.parse_args(argv)
    with _show_progress() as started:
        found = compare(given.file, given.models, started=started)
    print(found)
    return 0 if not found.differences else 1


def _show_refits(argv: Sequence[str]) -> int:
    """Plan, prove and certify refits of real models, and print them beside what was published."""
    parser = make_parser("refit-table", _show_refits.__doc__)
    parser.add_argument("--model", help="rows of this model alone")
    parser.add_argument("--row", type=int, help="this row alone, from 0, of those of --model")
    no_programs = "plans alone: programs take longest"
    parser.add_argument("--no-programs", action="store_true", help=no_programs)
    parser.add_argument("--json", action="store_true", help="a list of rows")
    given = parser.parse_args(argv)
    rows = find_rows(given.model, given.row)
    measured = []
    with _show_progress() as started:
        for number, row in enumerate(rows, 1):
            started(number, len(rows), f"{row.model} {row.mapping}")
            measured.append(measure(row, program=not given.no_programs))
    if given.json:
        print(json.dumps([one.as_json() for one in measured], indent=2))
    else:
        print(show(measured))
    return 0


COMMANDS: dict[str, Command] = {"refit-table": _show_refits, "storage-check": _check_storage}

if __name__ == "__main__":
    sys.exit(main())
