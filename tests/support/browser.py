"""A real headless Chromium, driven over its own debugging pipe: no driver program, no port, no package.

Debian's `chromium` is taken where it lies; `.ci/run` installs it. A test asks for the fixture `browser` of the root
conftest, which skips with a clear line where there is none.
"""

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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-extensions", "--mute-audio",
    "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication", "--metrics-recording-only",
    "--no-default-browser-check", "--password-store=basic", "--force-color-profile=srgb",
)  # fmt: skip


def executable() -> str | None:
    """The browser's path; None where none is installed. ``TEST_CHROMIUM`` in the environment names another."""
    named = os.environ.get("TEST_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser said no, or the page threw."""


class Browser:
    """One browser process; :meth:`page` opens a fresh page with nothing in it."""

    def __init__(self, path: str, size: tuple[int, int] = (1400, 1000)) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        self._number = 0
        self._buffer = b""
        self._pages: dict[str, Page] = {}

        def place() -> None:  # the browser reads commands from 3 and answers on 4
            low, high = os.dup(to_child), os.dup(from_child)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [path, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}",
             f"--window-size={size[0]},{size[1]}", "about:blank"],
            pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)

    def close(self) -> None:
        """Ends the process and all of its children."""
        try:
            self.call("Browser.close", timeout=10)
        except (BrowserError, OSError, TimeoutError):
            pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def page(self, dark: bool = False) -> Page:
        """A new page in a context of its own, watched from the start."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        )
        return page

    def call(self, method: str, session: str | None = None, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result

    def pump(self, seconds: float) -> None:
        """Takes what the browser says for a while."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._next(deadline)
        except TimeoutError:
            pass

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise BrowserError(f"the browser ended (status {self._process.poll()})")
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.take(message["method"], message["params"])
        return message


class Page:
    """One page.

    Attributes:
        errors: what was written to the console as an error or thrown, and what the browser refused.
        requests: addresses that the page asked for, its own first; ``refused`` those that the page's policy stopped.
    """

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.refused: list[str] = []
        self._asked: dict[str, str] = {}

    def take(self, method: str, params: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(arg.get("value", arg.get("description", ""))) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self._asked[params["requestId"]] = params["request"]["url"]
        elif method == "Network.loadingFailed" and params.get("blockedReason") == "csp":
            self.refused.append(self._asked.get(params["requestId"], ""))

    def call(self, method: str, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """One command of the protocol, to this page."""
        return self._browser.call(method, self._session, timeout, **params)

    def open(self, url: str | Path, timeout: float = 60) -> None:
        """Goes to an address or file and waits until it is loaded."""
        address = url.resolve().as_uri() if isinstance(url, Path) else url
        result = self.call("Page.navigate", url=address)
        if result.get("errorText"):
            raise BrowserError(f"{address}: {result['errorText']}")
        self.wait("document.readyState === 'complete'", timeout)

    def js(self, expression: str, timeout: float = 60) -> Any:
        """The value of an expression, promises waited for.

        Raises:
            BrowserError: it threw.
        """
        done = self.call("Runtime.evaluate", timeout, expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise BrowserError(str(details.get("exception", {}).get("description") or details["text"]))
        return done["result"].get("value")

    def wait(self, expression: str, timeout: float = 30) -> Any:
        """Asks again until the expression is true; its value.

        Raises:
            TimeoutError: it did not come true.
        """
        deadline = time.monotonic() + timeout
        while True:
            value = self.js(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}; console: {self.errors}")
            self._browser.pump(0.05)

    def click(self, selector: str) -> None:
        """A click with the mouse in the middle of an element."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.mouse(*box)

    def mouse(self, x: float, y: float, *kinds: str) -> None:
        """Mouse events at a point: pressed and released, if nothing else is said."""
        for kind in kinds or ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=int(button == "left"))

    def type(self, selector: str, text: str) -> None:
        """Puts text into a field, as a keyboard does."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def key(self, key: str) -> None:
        """One key pressed and released."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key if len(key) > 1 else f"Key{key.upper()}", **extra)

    def size(self, width: int, height: int) -> None:
        """Sets the size of what is seen, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, full: bool = False) -> None:
        """What is seen (or the whole page) as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Closes the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)
