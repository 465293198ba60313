"""A real browser without a window, driven over the DevTools protocol through a pipe: no port, no further package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)
SECONDS = 300.0
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
    "PageDown": 34,
    "PageUp": 33,
    "Escape": 27,
    "Tab": 9,
    "Enter": 13,
}


def find_browser() -> str | None:
    """The path of a browser, or None."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One browser process. Calls wait for their answer; events are kept in `events`."""

    def __init__(self, path: str, profile: Path) -> None:
        here_reads, browser_writes = os.pipe()
        browser_reads, here_writes = os.pipe()
        # The protocol's pipe is at the file descriptors 3 and 4.
        script = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        command = ["sh", "-c", script, "sh", path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", *command[1:]],
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        self._from, self._to = here_reads, here_writes
        self._rest, self._count, self.events = b"", 0, list[dict[str, Any]]()

    def close(self) -> None:
        """Ends the browser and waits for it."""
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self._from)
        os.close(self._to)

    def call(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        """One command of the protocol, and its result.

        Raises:
            RuntimeError: the browser refuses it, or has ended.
            TimeoutError: there is no answer.
        """
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": arguments}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number, deadline = self._count, time.monotonic() + SECONDS
        while True:
            found = self._next(deadline)
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        if "method" in found:
            self.events.append(found)
        return found

    def wait_for(self, method: str, session: str) -> None:
        """Reads until an event has come."""
        deadline = time.monotonic() + SECONDS
        while not any(one["method"] == method and one.get("sessionId") == session for one in self.events):
            self._next(deadline)


class Page:
    """A tab that shows a file at a size, in light or dark."""

    def __init__(
        self, browser: Browser, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.media("screen", dark=dark)
        start = time.monotonic()
        self.call("Page.navigate", url=file.as_uri())
        browser.wait_for("Page.loadEventFired", self.session)
        self.seconds = time.monotonic() - start

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command for this tab."""
        return self.browser.call(method, self.session, **arguments)

    def media(self, medium: str, *, dark: bool) -> None:
        """Shows the page on screen or as printed."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[scheme])

    def value(self, expression: str) -> Any:
        """What an expression of the page's script is.

        Raises:
            AssertionError: it throws.
        """
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Presses the mouse at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        """Presses keys one after the other."""
        for key in keys:
            common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """A screenshot as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        more = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))

    def own(self, method: str) -> Iterator[dict[str, Any]]:
        """The events of this tab."""
        for one in self.browser.events:
            if one["method"] == method and one.get("sessionId") == self.session:
                yield one["params"]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page: exceptions, the console, refused loads."""
        thrown = [str(one["exceptionDetails"]) for one in self.own("Runtime.exceptionThrown")]
        printed = [
            str(one["args"]) for one in self.own("Runtime.consoleAPICalled") if one["type"] in ("error", "warning")
        ]
        logged = [one["entry"]["text"] for one in self.own("Log.entryAdded") if one["entry"]["level"] != "verbose"]
        return [*thrown, *printed, *logged]

    @property
    def requests(self) -> list[str]:
        """Everything that was asked for, the page itself too."""
        return [one["request"]["url"] for one in self.own("Network.requestWillBeSent")]

    def close(self) -> None:
        """Closes the tab."""
        self.browser.call("Target.closeTarget", targetId=self.target)
