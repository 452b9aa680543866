"""The dashboard in a real browser (Chromium): every view is filled and readable, and no text becomes markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxroll.report import page as report
from jaxroll.report import record, summary
from tests.harness import browser, dashboard
from tests.harness.browser import Browser
from tests.harness.dashboard import check_view, open_view, tour
from tests.ui.conftest import HOSTILE, HOSTILE_NAME, serving

pytestmark = pytest.mark.process
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
FOREIGN = "[...document.querySelectorAll('img')].filter(one => one.getAttribute('src') !== '/static/icon.svg').length"


@pytest.fixture(scope="module")
def page(runs_dir: Path) -> Iterator[Browser]:
    """A browser that has opened the printed link of a dashboard of `runs_dir`."""
    dashboard.needs_browser()
    with serving(runs_dir) as (made, url), browser.opened() as opened:
        opened.size(1280, 900)
        opened.go(f"{url}/#code={made.code}")
        opened.until("!!document.querySelector('#view table')")
        opened.errors.clear()  # the answer 401 that brought the login page
        assert opened.run("location.href") == f"{url}/"
        yield opened


def test_a_link_leaves_no_code_in_the_address(page: Browser) -> None:
    page.run("location.hash = '#code=used-before'")
    page.until("location.hash === ''")
    assert page.run("document.cookie") == ""  # HttpOnly


def test_texts_of_a_run_are_text(page: Browser) -> None:
    views = [[view] for view in dashboard.FILLED] + [["rollouts", "1"], ["rollouts", "0"]]
    page.size(375, 800, dark=True)
    for view in views:
        open_view(page, HOSTILE_NAME, view[0])
        if len(view) > 1:
            page.run(f"location.hash += '/{view[1]}'")
            page.until("!!document.querySelector('.member .token')")
            assert "<img src=x" in page.text() and "question " in page.text()
        check_view(page, "/".join(view))
        page.picture(PICTURES / f"hostile-{'-'.join(view)}.png")
        assert page.run(FOREIGN) == 0 and page.run("document.querySelectorAll('main script').length") == 0, view
        assert page.run("document.title") == f"{HOSTILE_NAME} · JaxRoll"
    open_view(page, HOSTILE_NAME, "faults")
    assert HOSTILE.split("'\u202e")[0] in page.text()
    assert page.errors == []


@pytest.mark.soak
def test_every_view_is_readable_on_a_desk_and_on_a_phone(page: Browser) -> None:
    assert tour(page, "a", PICTURES) == 4 * len(dashboard.FILLED)
    assert page.errors == []


SMALL_IN_PLOT = """[...document.querySelectorAll(".plot text")].filter(one => one.getBoundingClientRect().width &&
  parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getScreenCTM().a < 10.5).map(one =>
  one.textContent)"""
OVERLAPS = """[...document.querySelectorAll(".plot")].flatMap(plot => {
  const boxes = [...plot.querySelectorAll(".tick.mid")].map(one => [one.textContent, one.getBoundingClientRect()]);
  return boxes.filter(([, a], i) => a.width && boxes.some(([, b], j) => j > i && b.width && a.left < b.right - 1 &&
    b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).map(([text]) => text);
})"""
FIRST = "document.querySelector('.plot')"
SPAN = "+document.querySelector('.detail svg').getAttribute('viewBox').split(' ')[2]"


def touch(page: Browser, kind: str, *points: tuple[float, float]) -> None:
    page.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x, y in points])


@pytest.mark.soak
def test_the_report_is_readable_and_shows_values_by_pointer_touch_and_key(runs_dir: Path) -> None:
    dashboard.needs_browser()
    written = report.write_page(run := record.load(runs_dir / "a"), summary.summary(run))
    with browser.opened() as page:
        for width in dashboard.SIZES:
            for dark in (False, True):
                page.size(width, 900, dark=dark)
                page.go(written.as_uri())
                page.until(f"document.readyState === 'complete' && !!{FIRST}.parentNode.querySelector('.values')")
                page.picture(PICTURES / f"report-{width}-{'dark' if dark else 'light'}.png")
                assert page.run(f"document.documentElement.scrollWidth <= {width} + 1")
                assert page.run(SMALL_IN_PLOT) == []
                assert page.run(OVERLAPS) == []
        said = f"{FIRST}.parentNode.querySelector('.values').textContent"
        x, y = page.run(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({FIRST}.getBoundingClientRect())")
        assert page.run(f"window.scrollTo(0, {y} - 300), true")
        y = page.run(f"(b => b.top + b.height / 2)({FIRST}.getBoundingClientRect())")
        touch(page, "touchStart", (x, y))
        touch(page, "touchEnd")
        page.until(f"/^step 1[0-9]: reward [0-9.]+ %, moving mean [0-9.]+ %, held-out accuracy/.test({said})")
        page.size(1280, 900)
        page.run(f"{FIRST}.focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        page.until(f"{said}.startsWith('step 1:')")
        assert page.run("document.querySelector('.timeline').scrollIntoView({block: 'center'}), true")
        box = "document.querySelector('.detail').getBoundingClientRect()"
        left, top, wide = page.run(f"(b => [b.left, b.top + b.height / 2, b.width])({box})")
        span, scrolled = page.run(SPAN), page.run("scrollY")
        page.call("Input.dispatchMouseEvent", type="mouseWheel", x=left + wide / 2, y=top, deltaX=0, deltaY=-120)
        page.until(f"scrollY < {scrolled}")  # the wheel scrolls the page
        assert page.run(SPAN) == span
        page.run("document.querySelector('.timeline').scrollIntoView({block: 'center'})")
        top = page.run(f"(b => b.top + b.height / 2)({box})")
        touch(page, "touchStart", (left + 0.4 * wide, top), (left + 0.6 * wide, top))
        touch(page, "touchMove", (left + 0.3 * wide, top), (left + 0.7 * wide, top))
        touch(page, "touchEnd")
        page.until(f"Math.abs({SPAN} - {span} / 2) < 0.05 * {span}")
        assert page.errors == []


def test_curves_show_values_by_pointer_and_by_key_and_other_runs(page: Browser) -> None:
    page.size(1280, 900)
    open_view(page, "a", "curves")
    chart = "document.querySelector('.chart')"
    page.until(f"!!{chart}.querySelector('.u-over')")
    assert "latest" in page.run(f"{chart}.querySelector('.values').textContent")
    page.run(f"{chart}.querySelector('.plot').focus()")
    for key in ("Home", "ArrowRight"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    page.until(f"{chart}.querySelector('.values').textContent.startsWith('step 2')")
    box = page.run(
        f"(b => [b.left + b.width / 2, b.top + 20])({chart}.querySelector('.u-over').getBoundingClientRect())"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    page.until(f"/^step 1[4-7]/.test({chart}.querySelector('.values').textContent)")
    page.run("document.querySelector('.choose summary').click(); document.querySelector('.menu input').click()")
    page.until("document.querySelector('.choose summary').textContent.includes('1 more')")


def test_rollouts_are_found_by_typing(page: Browser) -> None:
    open_view(page, "a", "rollouts")
    page.run("document.querySelector('input[name=text]').focus()")
    page.call("Input.insertText", text="word 7")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)
    page.until("document.querySelector('.pages [role=status]').textContent.includes('of 11 groups')")
    assert page.run("document.querySelector('.rollouts .id').textContent") == "#79"
    page.run("document.querySelector('.rollouts a').click()")
    page.until("document.querySelector('main').innerText.includes('Group 79')")
