"""Steps of a person in the dashboard, in a real browser: open every view and read it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.harness import browser
from tests.harness.browser import Browser

# An element that a view has once its data is there.
FILLED = {
    "overview": ".figures .figure b",
    "curves": ".chart .uplot, .grid .empty",
    "timeline": ".lane canvas, .lanes .empty",
    "weights": ".chart",
    "rollouts": ".rollouts a",
    "faults": ".events li",
    "system": "table.data td",
    "config": "table.config td",
}
TAB = "#tabs a[href$='/%s']"
DRAWN = "[...document.querySelectorAll('.chart')].every(one => one.querySelector('.uplot, .empty'))"
SIZES = (1280, 375)
# Texts that overlap or leave the window: elements of text whose box ends beyond the page, unless a parent scrolls.
TOO_WIDE = """[...document.querySelectorAll("main *")].filter(node => {
  const box = node.getBoundingClientRect();
  if (!box.width || box.right <= %d + 1) return false;
  for (let up = node; up; up = up.parentElement) {
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX)) return false;
  }
  return true;
}).map(node => node.tagName + "." + node.className + " " + node.textContent.slice(0, 60)).slice(0, 5)"""
UNNAMED = """[...document.querySelectorAll("button, select, input, a, [role=img], [tabindex='0']")].filter(node =>
  node.offsetParent && !(node.getAttribute("aria-label") || node.textContent.trim() || node.closest("label")
  || node.labels?.length)).map(node => node.outerHTML.slice(0, 120))"""
SMALL_TEXT = """[...document.querySelectorAll("main *")].filter(node => node.offsetParent &&
  [...node.childNodes].some(one => one.nodeType === 3 && one.data.trim()) &&
  parseFloat(getComputedStyle(node).fontSize) < 11.5).map(node => node.textContent.slice(0, 40)).slice(0, 5)"""


def needs_browser() -> None:
    """Skip the test where there is no Chromium; fail in CI, which installs it (.ci/run)."""
    if browser.program() is None:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say("no Chromium is installed, so nothing was seen (Debian, Ubuntu: apt-get install chromium)")


def click(page: Browser, element: str) -> None:
    """Press and release the left button in the middle of an element, given in JavaScript, as far as it is in reach."""
    page.run(f"{element}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}}), true")
    x, y = page.run(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({element}.getBoundingClientRect())")
    hit = f"{element}.contains(document.elementFromPoint({x}, {y}))"
    assert page.run(hit), f"{element} is covered at {x}, {y} or out of the window"
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def open_view(page: Browser, run: str, view: str, *more: str) -> None:
    """Go to a view of a run, by a click on its tab if the page shows the run, and wait until it shows data."""
    tab, path = f"document.querySelector({TAB % view!r})", "/".join(quote(one, safe="") for one in (run, view, *more))
    here = f"decodeURIComponent(location.hash.split('/')[1] ?? '') === {json.dumps(run)}"
    if not more and page.run(f"{here} && !!{tab}"):
        click(page, tab)
    else:
        page.run(f"location.hash = '#/{path}'")
    shown = f"document.querySelector('#tabs [aria-current]')?.getAttribute('href')?.endsWith('/{view}')"
    page.until(
        f"{shown} && !!document.querySelector({FILLED[view]!r}) && !document.querySelector('#toast:not([hidden])')"
    )


def check_view(page: Browser, where: str) -> None:
    """Fail if something leaves the window, has no name for a screen reader, or is too small to read."""
    # Not innerWidth: a phone's window grows with what does not fit.
    assert page.run(TOO_WIDE % page.width) == [], where
    assert page.run(f"document.documentElement.scrollWidth <= {page.width} + 1"), where
    assert page.run(UNNAMED) == [], where
    assert page.run(SMALL_TEXT) == [], where
    assert page.run("document.querySelectorAll('main h1').length") >= 1, where


def tour(
    page: Browser, run: str, pictures: Path, *, sizes: Sequence[int] = SIZES, dark: Sequence[bool] = (False, True)
) -> int:
    """Open and check every view in every size and theme; the number of pictures that were written."""
    written = 0
    for width in sizes:
        for is_dark in dark:
            page.size(width, 900, dark=is_dark)
            for view in FILLED:
                open_view(page, run, view)
                page.until(DRAWN)
                name = f"{re.sub('[^a-z0-9-]', '_', run)}-{view}-{width}-{'dark' if is_dark else 'light'}.png"
                page.picture(pictures / name)
                check_view(page, name)
                written += 1
    return written
