"""A headless Chromium, driven through the protocol of its developer tools."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import PATIENCE, wait_until
from programs import skip_or_fail

PROGRAMS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
OPTIONS = (
    # A container's root has no sandbox, and shares little memory.
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--disable-gpu"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--lang=en", "about:blank"),
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
CONTROL, SHIFT = 2, 8


class Page:
    """A page of the browser: what it shows, and everything that went wrong or was asked for on it.

    Attributes:
        errors: exceptions, errors on its console, and what its policy refused.
        asked: the addresses that it asked for.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _send(self, method: str, **parameters: Any) -> int:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return number

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command; events that come meanwhile are noted."""
        number = self._send(method, **parameters)
        while True:
            told = json.loads(self._socket.recv(PATIENCE))
            if told.get("id") == number:
                assert "error" not in told, f"{method}: {told['error']}"
                return told["result"]
            self._note(told.get("method"), told.get("params", {}))

    def _note(self, event: str, told: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif event == "Page.javascriptDialogOpening":
            self._socket.send(
                json.dumps(
                    {"id": next(self._numbers), "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                )
            )

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, of a promise what it comes to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"]["description"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression holds."""
        wait_until(lambda: self.evaluate(f"Boolean({script})"), f"never came to hold: {script}")

    def open(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def text(self, selector: str) -> str:
        """Return what an element shows; an empty text if there is none."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click an element."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Insert a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Take the size of a window, and a colour scheme."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return what the window shows as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps what it knows in a folder; the test is skipped where there is no browser."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        skip_or_fail("there is no Chromium")
    from websockets.sync.client import connect

    running = subprocess.Popen([program, f"--user-data-dir={folder}", *OPTIONS], stderr=subprocess.DEVNULL)
    try:
        told = folder / "DevToolsActivePort"
        wait_until(lambda: running.poll() is not None or (told.is_file() and len(told.read_text().split()) == 2))
        assert running.poll() is None, f"{program} ended with {running.returncode}"
        port, _ = told.read_text().split()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as listed:
            (address,) = [one["webSocketDebuggerUrl"] for one in json.load(listed) if one["type"] == "page"]
        with connect(address, max_size=None, proxy=None) as socket:
            page = Page(socket)
            yield page
            page.call("Browser.close")
        running.wait(PATIENCE)
    finally:
        running.kill()
        running.wait()
