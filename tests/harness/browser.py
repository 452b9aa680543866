"""Chromium without a window, driven over its debugging pipe (the DevTools protocol), so that no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The path of the browser; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser. `errors` holds exceptions and messages of its console that are errors."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process, self._out, self._in = process, to_browser, from_browser
        self._read, self._id, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.width = 0  # as `size` has set it
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._in], [], [], left_s)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.errors.append(str([one.get("description") or one.get("value") for one in params["args"]]))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", script))
        return found["result"].get("value")

    def until(self, script: str, deadline_s: float = DEADLINE_S) -> Any:
        """The value of the expression as soon as it is true; TimeoutError names it otherwise."""
        end_s = time.monotonic() + deadline_s
        while True:
            try:
                if value := self.run(script):
                    return value
            except RuntimeError as error:  # a page that is being replaced
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{script}: {error}") from error
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {deadline_s:g} s: {script}; the page: {self.text()[:2000]}")
            time.sleep(0.05)

    def go(self, url: str) -> None:
        """Load the address."""
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        """The text of the page."""
        return self.run("document.body.innerText") or ""

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the preferred colors; narrow windows are those of a phone."""
        self.width = width
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            ],
        )

    def picture(self, path: Path, *, full: bool = True) -> None:
        """Write a PNG of the page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))


def _high(fd: int) -> int:
    """The same pipe at a number that the browser's descriptors 3 and 4 do not replace."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return copy


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser with an empty profile; it is ended afterwards."""
    path = program()
    assert path, "no Chromium is installed (Debian, Ubuntu: apt-get install chromium)"
    theirs_in, ours_out = (_high(fd) for fd in os.pipe())
    ours_in, theirs_out = (_high(fd) for fd in os.pipe())
    with tempfile.TemporaryDirectory(prefix="jaxroll-browser-") as profile:
        words = [
            path,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words]
        process = subprocess.Popen(
            shell,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            browser = Browser(process, ours_out, ours_in)
            yield browser
            browser._session = ""
            browser.call("Browser.close")
            process.wait(DEADLINE_S)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.kill()
            process.wait()
