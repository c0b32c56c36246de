"""Completion: scripts with which shells complete the commands of `python -m shardmath`, and their options.

The options are those that each command's own `--help` lists, so that commands of backends need nothing for it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence

from shardmath.base.arguments import known
from shardmath.base.errors import ShardError
from shardmath.base.text import shown

__all__ = ["SHELLS", "write_completion"]

OPTION = re.compile(r"^\s+(?:-\w, )?(--[a-z][a-z-]*)", re.MULTILINE)
"""An option where `--help` explains it."""


def list_options(command: Callable[[Sequence[str]], int]) -> list[str]:
    """The long options of a command; [] if it cannot be imported here."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        command(["--help"])
    return list(dict.fromkeys(OPTION.findall(said.getvalue())))


def _write_bash(options: Mapping[str, Sequence[str]]) -> str:
    """Bash completes commands, then options, and files where neither is asked for."""
    cases = [f"    {name}) words='{' '.join(words)}' ;;" for name, words in options.items()]
    lines = [
        "_shardmath() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} words=''",
        "  case $COMP_CWORD:${COMP_WORDS[1]} in",
        f"    1:*) COMPREPLY=($(compgen -W '{' '.join(options)}' -- \"$current\")); return ;;",
        "  esac",
        "  case ${COMP_WORDS[1]} in",
        *cases,
        "  esac",
        "  case $current in",
        '    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;',
        # Names of files may have spaces.
        '    *) mapfile -t COMPREPLY < <(compgen -f -- "$current"); compopt -o filenames 2>/dev/null ;;',
        "  esac",
        "}",
        "complete -F _shardmath shardmath",
    ]
    return "\n".join(lines)


def _write_zsh(options: Mapping[str, Sequence[str]]) -> str:
    """Zsh runs bash's completions."""
    return f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{_write_bash(options)}"


def _write_fish(options: Mapping[str, Sequence[str]]) -> str:
    lines = []
    for name, words in options.items():
        lines.append(f"complete -c shardmath -n __fish_use_subcommand -a {name}")
        for word in words:
            seen = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c shardmath -n {seen} -l {word.removeprefix('--')}")
    return "\n".join(lines)


SHELLS = {"bash": _write_bash, "zsh": _write_zsh, "fish": _write_fish}


def write_completion(shell: str, commands: Mapping[str, Callable[[Sequence[str]], int]]) -> str:
    """Return a script that makes `shell` ("bash", "zsh" or "fish") complete `shardmath` and the options of `commands`.

    Raises ShardError for another shell.
    """
    write = known(shell, tuple(SHELLS)) and SHELLS[shell]
    if not write:
        raise ShardError(f"shell {shown(shell)} is unknown; write bash, zsh or fish")
    return write({name: list_options(command) for name, command in sorted(commands.items())})
