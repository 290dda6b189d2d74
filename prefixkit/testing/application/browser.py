"""Chromium, controlled by its DevTools protocol over two pipes: JSON messages, each ended by a NUL."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LIMIT = 60.0  # most seconds of an answer


class Browser:
    """One headless browser with one page, without a network."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp()
        theirs, self._to = os.pipe()
        self._from, other = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={self._profile}"]
        # Chromium reads from descriptor 3, and writes to descriptor 4.
        shell = f'exec "$0" "$@" 3<&{theirs} 4>&{other}'
        command = ["/bin/bash", "-c", shell, CHROMIUM, *options, "--remote-debugging-pipe", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(theirs, other), stdout=quiet, stderr=quiet)
        os.close(theirs)
        os.close(other)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._open: Path | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; events that arrive before it are stored."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Show a file at a width, and wait until it is loaded."""
        self.resize(width)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        # Chromium does not load a page again that is already open.
        for url in ("about:blank", path.as_uri()) if path == self._open else (path.as_uri(),):
            self.events.clear()
            self.ask("Page.navigate", url=url)
            while not self.seen("Page.loadEventFired"):
                self.events.append(self._next())
        self._open = path

    def resize(self, width: int) -> None:
        """Show the open page at another width."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)

    def value(self, expression: str) -> Any:
        """The value of an expression on the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path: Path, height: int = 900) -> None:
        """Write the visible part of the page, from its scroll position on, as PNG."""
        clip = {"x": 0, "y": self.value("scrollY"), "width": self.value("innerWidth"), "height": height, "scale": 1}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def seen(self, method: str) -> list[dict[str, Any]]:
        """The events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def close(self) -> None:
        os.close(self._to)  # Chromium ends when the pipe is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._from, 1 << 16)
            if not read:
                raise OSError("the browser ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        return event
