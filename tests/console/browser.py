"""A headless Chromium, driven over its DevTools protocol: opens pages, clicks, presses keys, takes pictures."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.traces.test_page import FLAGS

DEADLINE_S = 30.0
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Home": 36, "End": 35}
_CLICKS = 10
# The middle of a node once it is still for two frames: groups get their real height only after they came into view, at
# times later than that. So a click that would hit something else is kept from it, and told.
_STILL_BOX = """async (node) => {
  window.clickMissed = false;
  window.addEventListener('click', (event) => {
    window.clickMissed = !node.contains(event.target);
    if (!window.clickMissed) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, {capture: true, once: true});
  for (let last = null; ; ) {
    node.scrollIntoView({block: 'center'});
    const box = node.getBoundingClientRect();
    const middle = [box.x + box.width / 2, box.y + box.height / 2];
    if (String(middle) === last) return middle;
    last = String(middle);
    await new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)));
  }
}"""


class Browser:
    """One tab. `with Browser(folder) as browser:`"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._ids = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self.problems: list[str] = []
        """Uncaught errors, and what the page or its policy wrote as an error."""

    def __enter__(self) -> Self:
        command = ["chromium", *FLAGS, f"--user-data-dir={self._folder}", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._loop.run_until_complete(self._connect())
        except BaseException:
            self._stop()
            raise
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._reading)
        self._loop.run_until_complete(self._http.close())
        self._loop.close()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """The result of a command of the protocol."""
        return self._loop.run_until_complete(self._call(method, parameters))

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"].get("description", script))
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression in the page once it is true."""
        return self.until(lambda: self.evaluate(script), script)

    def until(self, condition: Callable[[], Any], words: str = "the condition") -> Any:
        """The value of the condition once it is true."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body?.innerText.slice(0, 2000)")
                raise AssertionError(f"{words} did not become true; problems: {self.problems}; the page: {shown}")
            self._loop.run_until_complete(asyncio.sleep(0.02))

    def open(self, url: str) -> None:
        """Go to an address, and wait until its view is shown."""
        self.call("Page.navigate", url=url)
        self.settled(lambda: self.wait(f"location.href === {json.dumps(url)}"))

    def settled(self, action: Callable[[], object]) -> float:
        """Do something that may change the address, and wait for the view. Returns the seconds until it was shown."""
        started = time.monotonic()
        action()
        self.wait("document.getElementById('main')?.dataset.ready === location.hash")
        return time.monotonic() - started

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that the selector finds, again if it moved away meanwhile."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"!!{found}")
        for _ in range(_CLICKS):
            box = self.evaluate(f"({_STILL_BOX})({found})")
            for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
                pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
                self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **pressed)
            if not self.evaluate("window.clickMissed"):
                return
        raise AssertionError(f"{_CLICKS} clicks did not hit {selector}: what is above it?")

    def press(self, key: str) -> None:
        """Press and release a key: one of `_KEYS`, or a letter."""
        number = _KEYS.get(key) or ord(key.upper())
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number)
        if key == "Enter":
            self.call("Input.dispatchKeyEvent", type="char", text="\r")

    def write(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.click(selector)
        self.call("Input.insertText", text=text)

    def text(self) -> str:
        """What is visible."""
        return self.evaluate("document.getElementById('main').innerText")

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path) -> None:
        """Save what the whole page looks like."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, **self._whole())
        file.write_bytes(base64.b64decode(shot["data"]))

    def _whole(self) -> dict[str, Any]:
        size = self.evaluate("[innerWidth, Math.min(document.documentElement.scrollHeight, 3000)]")
        return {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}}

    async def _connect(self) -> None:
        port_file = self._folder / "DevToolsActivePort"
        deadline = time.monotonic() + DEADLINE_S
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            assert time.monotonic() < deadline, "Chromium did not open its port"
            await asyncio.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        self._http = aiohttp.ClientSession()
        async with self._http.get(f"http://127.0.0.1:{port}/json") as reply:
            [target] = [target for target in await reply.json() if target["type"] == "page"]
        self._socket = await self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = asyncio.ensure_future(self._read())

    async def _call(self, method: str, parameters: dict[str, object]) -> dict[str, Any]:
        self._ids += 1
        answer = self._answers[self._ids] = self._loop.create_future()
        await self._socket.send_json({"id": self._ids, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, DEADLINE_S)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if "error" in event:
                    answer.set_exception(AssertionError(event["error"]["message"]))
                else:
                    answer.set_result(event["result"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.problems.append(f"{event['params']['entry']['text']} {event['params']['entry'].get('url', '')}")

    def _stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=DEADLINE_S)
