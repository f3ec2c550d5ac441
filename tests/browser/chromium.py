"""A headless Chromium driven through a pipe (its DevTools protocol): nothing to install beside the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
WAIT = 60  # seconds for an answer


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser with a profile of its own. `complaints`: what its console and its log said; `requests`:
    every address that it asked for."""

    def __init__(self, size: tuple[int, int] = (1200, 1600)):
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()

        def place() -> None:  # the browser reads 3 and writes 4
            spare = os.dup(from_child)
            os.dup2(to_child, 3)
            os.dup2(spare, 4)

        width, height = size
        self.process = subprocess.Popen(
            [
                find_chromium(),
                *FLAGS,
                f"--user-data-dir={self.profile}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._buffer, self._number, self._session = b"", 0, None
        page = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self.profile, ignore_errors=True)

    def __call__(self, method: str, **values) -> dict:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
        raise TimeoutError(method)

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(text)
        values = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"].get("exception", values)))
        elif event.get("method") == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(values["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(values["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        return event

    def open(self, path: Path) -> float:
        """Opens a file; seconds until the figures that show are drawn."""
        began = time.monotonic()
        self("Page.navigate", url=path.resolve().as_uri())
        self.until("document.documentElement?.dataset.drawn")
        return time.monotonic() - began

    def value(self, script: str):
        """What a JavaScript expression comes to."""
        found = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, f"{script} did not come true; {self.complaints}"
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        found = self("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
