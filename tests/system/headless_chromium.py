"""Headless Chromium over its debugging pipe: opens a page, runs script in it, presses keys, takes
pictures.

The pipe needs no port and no websocket: JSON messages that end in a zero byte, on file descriptors
3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Chromium:
    """One browser with one page. Use as a context manager."""

    def __init__(self, profile: Path, *, deadline_s: float = 60.0):
        self._deadline_s = deadline_s
        self._buffer = b""
        self._next_id = 0
        self.console: list[str] = []  # errors and uncaught exceptions of the page
        self.requests: list[str] = []  # everything that the page asked for
        self.bodies: list[str] = []  # that it sent
        commands_read, self._write = os.pipe()
        self._read, replies_write = os.pipe()
        shell = f'exec "$0" "$@" 3<&{commands_read} 4>&{replies_write}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                shell,
                str(CHROMIUM),
                *FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(commands_read, replies_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_read)
        os.close(replies_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, path: Path, **view: Any) -> None:
        """Show a file, in a window as `visit` takes it."""
        self.visit(path.resolve().as_uri(), **view)

    def visit(
        self, url: str, *, width: int, height: int, dark: bool = False, scale: float = 1.0
    ) -> None:
        self.page(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.page("Emulation.setEmulatedMedia", features=[scheme])
        # a document of its own, also where only the fragment differs
        self.page("Page.navigate", url="about:blank")
        self.until("location.protocol === 'about:'")
        self.page("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.protocol !== 'about:'")
        self.settle()

    def settle(self) -> None:
        """Return when what was asked to be drawn has been."""
        frame = (
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "setTimeout(done, 60))))"
        )
        self.script(frame)

    def script(self, expression: str) -> Any:
        """Return the value of an expression, promises awaited."""
        answer = self.page(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + self._deadline_s
        while not self.script(expression):
            assert time.monotonic() < end, f"waited {self._deadline_s} s for {expression}"
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.page("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str, *, shift: bool = False) -> None:
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        more: dict[str, Any] = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes.get(key, 0),
            "modifiers": 8 if shift else 0,
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "rawKeyDown"} if text is None else {"type": "keyDown", "text": text}
        self.page("Input.dispatchKeyEvent", **down, **more)
        self.page("Input.dispatchKeyEvent", type="keyUp", **more)

    def type(self, text: str) -> None:
        """Enter text where the focus is."""
        self.page("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        more: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.page("Page.getLayoutMetrics")["cssContentSize"]
            more["clip"] = {
                "x": 0,
                "y": 0,
                "width": size["width"],
                "height": size["height"],
                "scale": 1,
            }
        path.write_bytes(
            base64.b64decode(self.page("Page.captureScreenshot", format="png", **more)["data"])
        )

    def page(self, method: str, **params: Any) -> dict[str, Any]:
        return self.call(method, session=self._session, **params)

    def call(self, method: str, *, session: str = "", **params: Any) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._next_id:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _receive(self, method: str) -> dict[str, Any]:
        end = time.monotonic() + self._deadline_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer {method} within {self._deadline_s} s"
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self.bodies += filter(None, [params["request"].get("postData")])
