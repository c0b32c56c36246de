"""What the API page needs beside mkdocstrings: sessions of Python in docstrings become blocks of code.

A doctest begins with `>>>` and ends at a blank line; in Markdown it would be three nested quotations.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.M)


class Fenced(Extension):
    """Puts fences around the doctests of every object that is loaded."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SESSION.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
