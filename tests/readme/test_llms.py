"""llms.txt: it has what pages say, and links that lead to pages."""

from __future__ import annotations

import re
import sys

from tests.readme.test_readme import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import llms


def test_the_short_file_is_current_and_links_to_pages() -> None:
    text = llms.write_short()
    assert (ROOT / "llms.txt").read_text() == text
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 40
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert missing == []
    # All that is listed is copied whole: code blocks come in pairs.
    assert text.count("```") % 2 == 0 and "## More ranks than key heads" in text


def test_the_full_file_has_every_page() -> None:
    full = llms.write_full()
    pages = sorted((ROOT / "docs").glob("*.md"))
    heads = [
        page.read_text().splitlines()[0]
        for page in pages
        if page.name not in ("api.md", "index.md")
    ]
    assert [head for head in heads if head not in full] == []
