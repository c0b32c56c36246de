"""What the API page needs beside mkdocstrings, as an extension of griffe, which reads the sources.

1. A doctest begins with `>>>` and ends at a blank line; in Markdown it would be three nested quotations.
2. A text indented by four blanks is literal; after a numbered list Markdown takes it for a part of the list.
3. A class that is called through `__new__` has the arguments of that.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Class, Extension, Function, Object

SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.M)
LITERAL = re.compile(r"(?<=\n\n)    .*(?:\n+    .*)*")


class Fenced(Extension):
    """Rewrites what is loaded, before it is shown."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = LITERAL.sub(_literal, obj.docstring.value)
            obj.docstring.value = SESSION.sub(r"```pycon\n\g<0>\n```", text)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        new = cls.members.get("__new__")
        if isinstance(new, Function) and "__init__" not in cls.members:
            cls.set_member("__init__", Function("__init__", parameters=new.parameters))


def _literal(found: re.Match[str]) -> str:
    return f"```text\n{textwrap.dedent(found[0])}\n```"
