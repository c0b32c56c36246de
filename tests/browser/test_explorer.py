"""The explorer in a real browser: Chromium, headless, driven by playwright."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import shardmath as sm
from shardmath.display.explorer.server import Explorer

LIMIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "make test-browser installs it"
    with sync_playwright() as playwright:
        # Root has no sandbox; the pages are our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Explorer() as served:
        thread = threading.Thread(target=served.serve)
        thread.start()
        yield served.url
        served.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab, in which no script may fail and nothing may come from the network."""
    errors: list[str] = []
    tab = browser.new_page(viewport={"width": 1300, "height": 1400})
    tab.set_default_timeout(LIMIT_MS)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.on("request", lambda request: errors.append(request.url) if is_far(request.url) else None)
    yield tab
    tab.close()
    assert errors == []


def is_far(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "file:", "data:", "about:"))


def wait(page: Page, condition: str) -> None:
    """Until the answer is whole, and the condition holds."""
    page.wait_for_function(f"answer && answer.done && ({condition})")


def open_page(page: Page, url: str, state: str = "") -> None:
    page.goto("about:blank")
    page.goto(url + state)
    wait(page, "answer.cost")


def test_what_is_typed_is_planned(page: Page, url: str) -> None:
    open_page(page, url)
    page.fill("#src", "(tp n) h")
    wait(page, "answer.plan && answer.src.text.includes('(tp n) h on dp=4 tp=2')")
    assert page.locator("#verdict").inner_text().startswith("proved the destination holds every")
    expected = sm.plan(
        sm.Layout((9, 4), sm.Mesh(dp=4, tp=2), "(tp n) h", dtype="bfloat16"),
        sm.Layout((9, 4), sm.Mesh(tp=2, ranks=(8, 9)), "(tp n) h", dtype="bfloat16"),
        topology=sm.Topology(ranks_per_node=8),
    )
    listed = page.locator("#transfers td.mono").all_inner_texts()
    assert listed == [str(transfer) for transfer in expected.transfers()]


def test_an_error_stands_at_its_field_and_the_other_side_stays(page: Page, url: str) -> None:
    open_page(page, url)
    page.fill("#src", "(tp dp n h")
    wait(page, "answer.faults.src")
    assert "close the group" in page.locator("#src-fault").inner_text()
    family = page.locator("#src-fault").evaluate("element => getComputedStyle(element).fontFamily")
    assert "mono" in family
    assert "stale" in page.locator("#src-about").get_attribute("class")
    # The caret stands under the end of the text.
    *_, text, caret, _ = page.locator("#src-fault").inner_text().split("\n")
    assert caret.index("^") == len(text)
    assert page.locator("#src").get_attribute("aria-invalid") == "true"
    assert page.locator("#picture svg").count() == 1
    page.fill("#src", "(tp dp n) h")
    wait(page, "answer.plan")
    assert page.locator("#src-fault").inner_text() == ""


def test_every_example_has_a_plan(page: Page, url: str) -> None:
    open_page(page, url)
    buttons = page.locator("#presets button")
    assert buttons.count() >= 6
    for number in range(buttons.count()):
        buttons.nth(number).click()
        layout = page.input_value("#src_mesh")
        wait(page, f"answer.plan && answer.cost && $('src_mesh').value === {layout!r}")
        assert page.locator("#refused").inner_text() == ""


def test_a_rank_that_is_pointed_at_lights_up(page: Page, url: str) -> None:
    open_page(page, url)
    page.locator("tr[data-rank='2'] td").nth(3).hover()
    lit = page.locator("#picture [data-ranks].on").all()
    assert [box.get_attribute("data-ranks") for box in lit] == ["2"]
    pairs = page.locator("#picture [data-src].on").all()
    assert {box.get_attribute("data-src") for box in pairs} == {"2"}
    # One of the pairs lights up alone, with what its two ranks hold.
    page.locator("#picture [data-src='5'][data-dst='9']").hover()
    assert page.locator("#picture [data-src].on").count() == 1
    lit = page.locator("#picture [data-ranks].on").all()
    assert {box.get_attribute("data-ranks") for box in lit} == {"5", "9"}
    # A box of the picture lights up the rows of its ranks, and the transfers.
    page.locator("#picture [data-ranks='9']").hover()
    rows = page.locator("tr[data-rank].on").all()
    assert [row.get_attribute("data-rank") for row in rows] == ["9"]
    assert (
        page.locator("tr[data-dst-rank='9'].on").count()
        == page.locator("tr[data-dst-rank='9']").count()
    )
    page.locator("h1").hover()
    assert page.locator(".on").count() == 0


def test_a_rank_or_a_box_that_is_clicked_filters(page: Page, url: str) -> None:
    open_page(page, url)
    page.locator("tr[data-rank='3'] button").click()
    page.wait_for_function("document.querySelectorAll('#transfers td.mono').length === 1")
    assert page.locator("#transfers td.mono").inner_text().startswith("3 -> 9 copy [6:7, 0:4]")
    page.keyboard.press("Escape")
    page.wait_for_function("document.querySelectorAll('#transfers td.mono').length === 7")
    page.locator("#picture [data-src='5'][data-dst='9']").click()
    assert page.locator("#chosen button").all_inner_texts() == ["5 -> 9 ×"]
    assert page.locator("#transfers td.mono").count() == 1
    page.locator("#chosen button").click()
    assert not page.locator("#chosen").is_visible()
    page.locator("#picture [data-ranks='8']").click()
    assert page.locator("#chosen button").all_inner_texts() == ["rank 8 ×", "[0:5, 0:4] ×"]
    assert page.locator("#transfers td.mono").count() == 3
    # The ranks that the chosen rows come from are lit, too.
    page.locator("h1").hover()
    lit = page.locator("tr[data-rank].on").all()
    assert [row.get_attribute("data-rank") for row in lit] == ["0", "2", "4", "8"]


def test_a_link_holds_the_state(page: Page, url: str, browser: Browser) -> None:
    open_page(page, url)
    page.fill("#shape", "12,6")
    page.fill("#dst", "n (tp h)")
    wait(page, "answer.plan && answer.dst.text.includes('[12, 6] n (tp h)')")
    page.locator("tr[data-rank='1'] button").click()
    page.wait_for_function("location.hash.includes('rank=1')")
    link = page.url
    shown = page.locator("#transfers").inner_text()
    other = browser.new_page()
    other.goto(link)
    wait(other, "answer.cost")
    assert other.locator("#transfers").inner_text() == shown
    assert other.input_value("#shape") == "12,6" and other.input_value("#dst") == "n (tp h)"
    other.close()


def test_a_link_that_is_opened_in_the_same_tab(page: Page, url: str) -> None:
    open_page(page, url)
    page.evaluate(
        "location.hash = '#shape=8%2C4&src_mesh=tp%3D2&src=%28tp+n%29+h&pair=0-8&box=abc'"
    )
    wait(page, "answer.src.text.includes('[8, 4] (tp n) h on tp=2')")
    assert page.input_value("#shape") == "8,4"
    assert page.locator("#chosen button").all_inner_texts() == ["0 -> 8 ×"]


def test_parts_of_the_question_before_are_gray(page: Page, url: str) -> None:
    """Here the answer has the plan, and its cost takes long: the cost before is not that of this plan."""
    open_page(page, url)
    held: list[Any] = []

    def delay(route: Any) -> None:
        answer = route.fetch().json()
        if "wait=" in route.request.url:
            held.append(route)
            return
        route.fulfill(json={**{k: v for k, v in answer.items() if k != "cost"}, "done": False})

    page.route("**/answer?*", delay)
    page.fill("#dst", "n (tp h)")
    page.wait_for_function("answer.dst && answer.dst.text.includes('n (tp h)')")
    assert "stale" in page.locator("#cost").get_attribute("class")
    assert "stale" not in page.locator("#verdict").get_attribute("class")
    page.unroute_all(behavior="ignoreErrors")


def test_shards_go_empty_as_a_size_is_dragged(page: Page, url: str) -> None:
    open_page(page, url)
    assert page.locator("tr.empty").count() == 1
    slider = page.locator("#slider0")
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    wait(page, "answer.plan && answer.src.text.includes('[3, 4]')")
    assert page.input_value("#shape") == "3,4"
    assert page.locator("tr.empty").count() == 5


def test_code_runs(page: Page, url: str) -> None:
    open_page(page, url)
    for summary in page.locator("#code summary").all():
        summary.click()
    script, test = page.locator("#code pre").all_inner_texts()
    made: dict[str, Any] = {"print": lambda *lines, sep=" ": None}
    exec(script, made)
    assert made["plan"].digest[:12] in page.locator("#verdict").inner_text()
    exec(test, made)
    made["test_every_element_arrives"]()


def test_a_large_plan(page: Page, url: str) -> None:
    open_page(page, url)
    page.fill("#shape", "16384,8192")
    page.fill("#dst_mesh", "tp=32 ranks=512:544")
    page.fill("#src_mesh", "dp=64 tp=8")
    wait(page, "answer.cost && answer.src.more === 384")
    assert "268.4 MB" in page.locator("#verdict").inner_text()


def test_a_page_of_a_plan_needs_no_server(page: Page, tmp_path: Path) -> None:
    before = sm.Layout((9, 4), sm.Mesh(dp=2, tp=2), "(tp dp n) h")
    after = sm.Layout((9, 4), sm.Mesh(tp=2, ranks=(4, 5)), "n (tp h)")
    plan = sm.plan({"w<b>": before, "v": before}, {"w<b>": after, "v": after})
    plan.html(tmp_path / "plan.html", topology=sm.Topology(ranks_per_node=2))
    page.goto(f"file://{tmp_path}/plan.html")
    assert not page.locator("#form").is_visible()
    assert page.title() == "plan of 2 tensors, 4 to 2 ranks"
    assert page.locator("#transfers td.mono").count() == len(list(plan.transfers()))
    page.locator("#picture [data-ranks='2']").first.hover()
    assert page.locator("tr[data-src-rank='2'].on").count() == 4
    # A box is one of the tensor that is drawn.
    page.locator("#picture [data-ranks='2']").first.click()
    assert page.locator("#transfers td.mono").count() == 2
    shown = page.locator("#transfers td.mono").all_inner_texts()
    assert all(text.startswith(f"{next(iter(plan.src))}: 2 -> ") for text in shown)


def test_a_notebook_s_frame(page: Page) -> None:
    layout = sm.Layout((9, 4), sm.Mesh(dp=2, tp=2), "(tp dp n) h")
    page.set_content(f"<h1>a notebook</h1>{sm.explore(sm.plan(layout, layout))._repr_html_()}")
    frame = page.frame_locator("iframe")
    assert frame.locator("#verdict").inner_text().startswith("proved")
    assert frame.locator("#picture svg").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser: Browser, url: str, scheme: Any) -> None:
    """Text and page differ in brightness, in both schemes, and at a width of a phone nothing overflows."""
    tab = browser.new_page(viewport={"width": 400, "height": 900}, color_scheme=scheme)
    tab.set_default_timeout(LIMIT_MS)
    open_page(tab, url)
    tab.emulate_media(color_scheme=scheme)
    colors = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.querySelector('th')).backgroundColor]"
    )
    text, ground = (
        sum(map(float, color[color.index("(") + 1 : -1].split(",")[:3])) for color in colors
    )
    assert text < 200 and ground > 600 if scheme == "light" else text > 600 and ground < 200
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    tab.close()
