"""A headless Chromium, controlled over a pipe: gives the page's state, its errors and its network requests."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE_S = 60.0
# The browser reads from its descriptor 3 and writes to 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def _high_pipe() -> tuple[int, int]:
    """Returns the ends of a pipe for reading and writing; their numbers are above 4, which the browser expects."""
    low = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return reading, writing


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None if none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page in one browser; `complaints` are its errors, `requests` its requests for other resources."""

    def __init__(self, path: str, home: Path, size: tuple[int, int] = (1400, 1000)):
        to_browser, self._write = _high_pipe()
        self._read, theirs = _high_pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        flags += [f"--user-data-dir={home}", f"--window-size={size[0]},{size[1]}", "--remote-debugging-pipe"]
        flags += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--force-device-scale-factor=1"]
        command = [sys.executable, "-c", _START, str(to_browser), str(theirs), path, *flags, "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(to_browser, theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(theirs)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.call("Performance.enable", timeDomain="threadTicks")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

    def open(self, page: Path) -> float:
        """Opens a file and returns the seconds until it says that it is drawn."""
        begun_s = time.monotonic()
        self.call("Page.navigate", url=page.as_uri())
        drawn = "document.body !== null && document.body.dataset.drawn === 'yes'"
        while not (self.ask("document.readyState") == "complete" and self.ask(drawn)):
            if time.monotonic() - begun_s > _PATIENCE_S or self.complaints:
                raise AssertionError(f"the page was not drawn: {self.complaints}")
            time.sleep(0.02)
        return time.monotonic() - begun_s

    def work_s(self) -> float:
        """Returns the processor time in seconds that the page's main thread has used so far."""
        found = self.call("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")

    def ask(self, expression: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Waits until an expression in the page is true, and returns its value."""
        until_s = time.monotonic() + _PATIENCE_S
        while not (found := self.ask(expression)):
            assert time.monotonic() < until_s, f"never came true: {expression}"
            time.sleep(0.02)
        return found

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse to a point, in two steps so that the page sees a movement."""
        for nudge in (0.0, 0.5):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + nudge, y=y)

    def prefer(self, scheme: str) -> None:
        """Sets the colour scheme that the page finds preferred, ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window; below 600 pixels it is that of a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Writes a picture of the page as PNG."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the browser's protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._next(until_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded":
            self.complaints.append(str(parameters["entry"]["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["args"])[:2000])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.requests.append(url)
