"""A headless Chromium, driven by the DevTools protocol over a web socket: what a page shows, logs and takes.

Not here: a general driver. `Browser.open` loads a page, `Page.value` evaluates an expression in it.
"""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from ..processes import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


class Page:
    """One tab. `events` are what it reported: console messages, exceptions, requests, log entries."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number, self._answers = socket, 0, {}
        self.events: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            else:
                self.events.append(found)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, PATIENCE)
        assert "error" not in found, found
        return found["result"]

    async def value(self, expression: str) -> Any:
        """What an expression is in the page, under the page's own content security policy."""
        options = {"returnByValue": True, "awaitPromise": True, "allowUnsafeEvalBlockedByCSP": False}
        found = await self.ask("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not await self.value(expression):
            assert time.monotonic() < deadline, f"never came true: {expression}"
            await asyncio.sleep(0.02)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path) -> None:
        found = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[dict[str, Any]]:
        """Errors and warnings of any kind."""
        bad = ("error", "warning", "assert")
        return [
            event
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in bad)
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in bad)
        ]

    def asked_for(self) -> list[str]:
        """Addresses of everything that the page requested."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]


@contextlib.asynccontextmanager
async def opened(url: str, *, width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """The page at an address, in a browser of its own."""
    assert CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json(content_type=None)
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with client.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Network", "Page"):
                        await page.ask(f"{domain}.enable")
                    await page.resize(width, height)
                    await page.ask("Page.navigate", url=url)
                    await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
                    yield page
        finally:
            process.kill()
            process.wait()


async def _port(file: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, "Chromium does not start"
        await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
