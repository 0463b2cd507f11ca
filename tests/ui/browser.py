"""A headless Chromium, driven over the DevTools protocol; no driver program and no browser download needed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Self

import aiohttp

START_SECONDS = 60.0
WAIT_SECONDS = 30.0


def find_chromium() -> str | None:
    """The browser's program, if this machine has one (Debian: ``apt-get install chromium``)."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future] = {}
        self._reader = asyncio.ensure_future(self._read())
        self.messages: list[str] = []
        """What the page wrote to its console, and its uncaught errors."""
        self.requests: list[str] = []
        """URLs that it asked for."""

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._replies.pop(data["id"]).set_result(data)
                continue
            params = data.get("params", {})
            match data["method"]:
                case "Runtime.exceptionThrown":
                    self.messages.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    self.messages.append(str(params["args"]))
                case "Log.entryAdded":
                    self.messages.append(str(params["entry"]["text"]))
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])

    async def send(self, method: str, **params):
        """One command of the protocol."""
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        data = await asyncio.wait_for(reply, WAIT_SECONDS)
        if "error" in data:
            raise AssertionError(f"{method}: {data['error']['message']}")
        return data["result"]

    async def open(self, url: str) -> None:
        """Go to a page."""
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)

    async def js(self, expression: str):
        """The value of an expression in the page."""
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str):
        """Wait until an expression is true in the page."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while not (value := await self.js(expression)):
            assert loop.time() < deadline, f"{expression} never came true; the page: {await self.text()}"
            await asyncio.sleep(0.05)
        return value

    async def text(self) -> str:
        """What a reader sees."""
        return await self.js("document.body.innerText")

    async def key(self, name: str, code: int) -> None:
        """Press and release a key."""
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        if name == "Enter":
            common["text"] = "\r"
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Become a screen of this size."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        result = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(result["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()


class Browser:
    """A browser process with a profile of its own."""

    def __init__(self, program: str) -> None:
        self._program = program

    async def __aenter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(prefix="fleetgate-ui-", ignore_cleanup_errors=True)
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
            "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={self._profile.name}", "about:blank",
        ]  # fmt: skip
        self._process = await asyncio.create_subprocess_exec(
            self._program, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        told = Path(self._profile.name) / "DevToolsActivePort"
        async with asyncio.timeout(START_SECONDS):
            while not (told.exists() and "\n" in told.read_text()):
                assert self._process.returncode is None, "the browser ended at once"
                await asyncio.sleep(0.05)
        self._port = int(told.read_text().split()[0])
        self._session = aiohttp.ClientSession()
        return self

    async def page(self) -> Page:
        """A new tab."""
        async with self._session.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as answer:
            data = await answer.json(content_type=None)
        return Page(await self._session.ws_connect(data["webSocketDebuggerUrl"], max_msg_size=64 << 20))

    async def __aexit__(self, *error) -> None:
        await self._session.close()
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._profile.cleanup()
