"""llms.txt, from which a language model learns to use the library; llms-full.txt, all pages in one file (llmstxt.org).

    python tools/llms.py            write llms.txt
    python tools/llms.py --check    exit 1 if the file is not what would be written

1. llms.txt has what a first program needs: sections of pages, word for word, with their code and its output, which
   tests run. Then it lists all pages with a line each.
2. As a hook of mkdocs it puts both files at the root of the site.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "llms.txt"
DOCS = ROOT / "docs"

HEAD = """# shardmath

> A Python library (`import shardmath as sm`) that answers who holds which pieces of which tensors, and plans and proves
> moves between any two parallel layouts; `import shardmath_torch as smt` runs them on torch.distributed. The core needs
> only numpy. Values are immutable; errors are `sm.ShardError`, and say what to write instead.

Install: `pip install` the wheel, or `pip install -e .` in a clone; with the extra `[torch]` to move tensors. In short:
`sm.Layout(shape, mesh, text)` for each side, `plan = sm.plan(src, dst)`, `sm.verify(plan)`, then on every rank
`move = smt.compile(plan)` once and `move(local_source, out=local_destination)` at each step. Compile and moves are
collective: call them on all ranks in the same order. Look at a layout before you use it:
`print(sm.pictures.show(layout))`.
"""

SECTIONS = {
    "layouts.md": (
        "Layouts and their notation",
        "Three spellings",
        "Placements",
        "The grammar",
        "More ranks than key heads",
    ),
    "plans.md": ("Plans and proofs", "Transfers", "What verify does not prove"),
    "refit.md": ("A whole program", "Fused gate_up"),
    "moving.md": ("What you pass", "What you can ask for"),
    "errors.md": ("Errors",),
}
"""The sections of pages that llms.txt has in full."""


def read_sections(page: str) -> dict[str, str]:
    """The sections of a page by heading, the first one by the page's title. Code stays as it is."""
    text = (DOCS / page).read_text(encoding="utf-8")
    sections: dict[str, list[str]] = {}
    heading = ""
    in_code = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            heading = line.lstrip("# ")
            sections[heading] = []
        else:
            sections[heading].append(line)
    return {heading: "\n".join(lines).strip() for heading, lines in sections.items()}


def write_short() -> str:
    """The text of llms.txt."""
    parts = [HEAD]
    for page, headings in SECTIONS.items():
        sections = read_sections(page)
        for heading in headings:
            parts.append(f"## {heading}\n\n{_link(sections[heading])}\n")
    parts.append("## Pages\n\n" + "\n".join(_list_pages()) + "\n")
    return "\n".join(parts)


LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([\w-]+\.(?:md|svg))?(?:#[\w-]+)?\)")


def _link(text: str) -> str:
    """The text, with links from the root of the repository; a link within its page becomes plain text."""
    return LINK.sub(lambda found: f"[{found[1]}](docs/{found[2]})" if found[2] else found[1], text)


def _list_pages() -> Iterator[str]:
    """The lines about pages of the index, by task."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    tasks = index[index.index("**To learn**") : index.index("## Install")]
    return map(_link, tasks.strip().splitlines())


def write_full() -> str:
    """The text of llms-full.txt: the short one, and every page in the order of the index."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = dict.fromkeys(re.findall(r"\(([\w-]+\.md)", index))
    texts = [(DOCS / page).read_text(encoding="utf-8") for page in pages if page != "api.md"]
    return "\n\n".join([write_short(), *texts])


def on_post_build(config: Any, **_: Any) -> None:
    """Put both files at the root of the site."""
    site = Path(config["site_dir"])
    for name, text in (("llms.txt", write_short()), ("llms-full.txt", write_full())):
        # The site has a page of HTML for each of Markdown.
        linked = re.sub(r"\]\((?:docs/)?([\w-]+)\.md", r"](\1.html", text)
        (site / name).write_text(linked, encoding="utf-8")


def main() -> int:
    text = write_short()
    if "--check" not in sys.argv:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
        print("llms.txt is not what pages say; run python tools/llms.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
