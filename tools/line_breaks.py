"""Where a table's cells may break, as a hook of mkdocs.

1. A long name may break after a slash, a comma, an opening parenthesis, an underscore and an equals sign. Otherwise a
   browser breaks it at any letter, or makes the table wider than the page.
2. A number and its unit stay together.
"""

from __future__ import annotations

import re
from typing import Any

LONG = 20
"""Letters above which a name may break."""

CELL = re.compile(r"<td.*?</td>", re.S)
CODE = re.compile(rf"(?<=<code>)[^<]{{{LONG + 1},}}(?=</code>)")
AFTER = re.compile(r"(?<=\w)[/_,(=]+(?=\w)")
AMOUNT = re.compile(r"(?<=>)([\d.,]+) (\w+|%)(?=</td>)")


def on_page_content(html: str, **_: Any) -> str:
    """The page, with possible breaks in long names in tables, and none inside amounts."""
    return CELL.sub(_cell, html)


def _cell(found: re.Match[str]) -> str:
    parted = CODE.sub(lambda code: AFTER.sub(r"\g<0><wbr>", code[0]), found[0])
    return AMOUNT.sub(r"\1&nbsp;\2", parted)
