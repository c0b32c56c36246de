"""Command line: arguments and exit statuses that all commands share.

1. Exit status 0: success; 1: a ShardError, printed once on stderr; 2, by argparse: wrong usage; 130: interrupted.
2. An argument of a wrong form is wrong usage, found before anything is done.

>>> read_count("3")
3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from shardmath import ShardError
from shardmath.display.arguments import INTERRUPTED, make_parser, report_error

__all__ = ["make_parser", "read_count", "run_command"]


def read_count(text: str) -> int:
    """Return the number in `text`, 1 or more. Raises ArgumentTypeError for other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of 1 or more; give digits, such as 4"
        )
    return int(text)


def run_command(command: str, work: Callable[[], object], *, as_json: bool = False) -> int:
    """Call `work` and return 0. After a ShardError, a missing package or an interrupt, print a message that begins with
    `command` to stderr, and return another number. If `as_json`, a ShardError is an object on stdout."""
    try:
        work()
    except ShardError as error:
        report_error(error, command, as_json=as_json)
        return 1
    except ModuleNotFoundError as error:
        print(f"{command}: needs {error.name}; pip install {error.name}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        # Notes tell what the interrupted work has left behind.
        notes = getattr(error, "__notes__", ())
        print("; ".join((f"{command}: interrupted", *notes)), file=sys.stderr)
        return INTERRUPTED
    return 0
