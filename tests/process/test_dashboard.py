"""The dashboard of a live run: a browser follows it while roles are killed, and a person controls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness import browser, dashboard
from tests.harness.train_process import LEARNING, ROOT, START_S, Train, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
PICTURES = ROOT / "build" / "screenshots"
BUSY = ("LEASED", "CLAIMED")  # states of groups that end without new leases


def waited(seen: Callable[[], Any], what: str) -> Any:
    """The first true value of `seen()`."""
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while time.monotonic() < deadline:
        if found := seen():
            return found
        pause.wait(0.1)
    pytest.fail(f"waited {START_S:g} s for {what}", pytrace=False)


@contextmanager
def shown(runs: Path) -> Iterator[tuple[str, str]]:
    """The printed link and the token of `jaxroll ui RUNS`."""
    output, token = runs / "ui.out", runs / "ui.token"
    with output.open("w") as out:
        serving = subprocess.Popen(
            [sys.executable, "-m", "jaxroll", "ui", str(runs), "--port=0", f"--token-file={token}"],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=out,
            stderr=out,
        )
    try:
        line = waited(lambda: [row for row in output.read_text().splitlines() if row.startswith("open ")], "the link")
        yield line[0].split()[1], token.read_text().strip()
    finally:
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 0, output.read_text()
        assert "Traceback" not in output.read_text(), output.read_text()


def test_a_live_run_is_followed_through_kills_paused_resumed_and_stopped(free_run_dir: Path) -> None:
    dashboard.needs_browser()
    runs, name = free_run_dir.parent, free_run_dir.name
    overrides = ("--config.schedule.steps=100000", "--config.learner.checkpoint_every=100000")
    with Train(free_run_dir, *LEARNING, *overrides) as train, shown(runs) as (link, token), browser.opened() as page:
        url = link.split("/#")[0]
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}", "X-JaxRoll": "1"}, timeout=60)

        def control(action: str) -> None:
            answer = client.post("/api/control", json={"run": name, "action": action})
            assert answer.status_code == 200, answer.text

        def step() -> int:
            train.rows += train._rows.rows()
            return last_step(train.rows)

        def store() -> dict:
            return client.get("/api/run", params={"run": name}).json()["latest"]["store/store"]

        train.until_step(2)
        page.size(1280, 900)
        page.go(link)
        page.until("!!document.querySelector('#view table')")
        page.errors.clear()  # the answer 401 that brought the login page
        dashboard.open_view(page, name, "overview")
        page.until("document.getElementById('live').textContent === 'live'")
        before = page.run("document.querySelector('.figure b').textContent")
        page.until(f"document.querySelector('.figure b').textContent !== {before!r}")  # without a reload

        for role, width in (("sampler", 1280), ("learner", 375)):
            train.role(role).send_signal(signal.SIGKILL)
            for dark in (False, True):
                dashboard.tour(page, name, PICTURES, sizes=(width,), dark=(dark,))
        dashboard.open_view(page, name, "faults")
        page.until("document.querySelector('main').innerText.includes('died (signal 9)')")
        train.until_step(step() + 2)
        assert page.errors == []

        page.size(1280, 900)
        dashboard.open_view(page, name, "overview")
        button = "[...document.querySelectorAll('.controls button')].find(one => one.textContent === '{}')"
        dashboard.click(page, button.format("Pause"))
        page.until("!document.querySelector('.controls .primary').hidden")  # Resume
        waited(lambda: (row := store()).get("paused") and not any(row["counts"][state] for state in BUSY), "a pause")
        still = step()
        dashboard.click(page, button.format("Resume"))
        train.until_step(still + 2)
        assert not list((free_run_dir / "checkpoints").glob("0.[1-9]*"))
        control("checkpoint")
        waited(lambda: store()["durable"] > 0, "a checkpoint")
        dashboard.click(page, button.format("Stop …"))
        dashboard.click(page, button.format("Really stop the run?"))
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        page.until("document.getElementById('live').textContent === 'stopped'")
