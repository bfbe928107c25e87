"""A real browser without a screen, driven by the DevTools protocol."""

import asyncio
import base64
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.fleet.browser_window import MISSING
from tests.support.local_ports import free_port

WINDOW = Path(__file__).parent / "browser_window.py"
LIMIT_SECONDS = 120
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}
_COUNT_COLOURS = """
(async () => {
  const picture = new Image();
  picture.src = "data:image/png;base64,PICTURE";
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.width, picture.height];
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = `${data[at]},${data[at + 1]},${data[at + 2]}`;
    counts[colour] = (counts[colour] ?? 0) + 1;
  }
  return counts;
})()
"""
# Texts of a drawing that leave it, and pairs of texts that cover each other. A pixel is forgiven:
# boxes are as high as the tallest letter of the font.
_FIND_CROWDED = """
[...document.querySelectorAll("svg.plot")].flatMap((drawing) => {
  const frame = drawing.getBoundingClientRect();
  const texts = [...drawing.querySelectorAll("text")]
    .map((one) => [one.textContent, one.getBoundingClientRect()]);
  const cut = texts.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
    || box.top < frame.top - 3 || box.bottom > frame.bottom + 3);
  const covered = texts.flatMap(([text, a], index) => texts.slice(index + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
    .map(([other]) => `${text} / ${other}`));
  return [...cut.map(([text]) => `cut: ${text}`), ...covered];
})
"""
_LOG_EVENTS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One window. `complaints` collects the errors of its page."""

    def __init__(self, socket_: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket_
        self._last = 0
        self.complaints: list[str] = []

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(LIMIT_SECONDS)).data)
            if message.get("method") in _LOG_EVENTS:
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == self._last:
                assert "error" not in message, (method, message)
                result: dict[str, Any] = message["result"]
                return result

    async def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        likes = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.command("Emulation.setEmulatedMedia", features=likes)

    async def open(self, url: str) -> None:
        """Load a page anew, even if it differs from the present one by its fragment only."""
        await self.command("Page.navigate", url="about:blank")
        await self.until("location.href === 'about:blank'")
        self.complaints.clear()
        await self.command("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise, in the page."""
        result = await self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    async def read(self, selector: str, member: str = "innerText") -> Any:
        return await self.run(f"document.querySelector({json.dumps(selector)}).{member}")

    async def read_all(self, selector: str, member: str = "innerText") -> list[Any]:
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found: list[Any] = await self.run(f"{every}.map((one) => one.{member})")
        return found

    async def until(self, condition: str) -> None:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not await self._holds(condition):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.run("document.body.innerText")
            pytest.fail(f"never came true: {condition}\n{self.complaints}\n{shown}")

    async def _holds(self, condition: str) -> bool:
        # While a page is being replaced there is nothing to evaluate in.
        result = await self.command(
            "Runtime.evaluate", expression=f"Boolean({condition})", returnByValue=True
        )
        return result["result"].get("value") is True

    async def press(self, key: str) -> None:
        code = _KEYS[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            await self.command(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **more,
            )

    async def faults(self) -> list[Any]:
        axe = files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        await self.run(f"{axe};0")
        found: list[Any] = await self.run(
            "axe.run(document, { resultTypes: ['violations'] }).then((result) => result.violations"
            ".map((one) => [one.id, one.help, one.nodes.map((node) => node.html)]))"
        )
        wide = await self.run("[document.documentElement.scrollWidth, innerWidth]")
        return found if wide[0] <= wide[1] else [*found, f"wider than its window: {wide}"]

    async def crowded(self) -> list[str]:
        """The texts of charts that are cut or cover each other."""
        found: list[str] = await self.run(_FIND_CROWDED)
        return found

    async def screenshot(self) -> bytes:
        result = await self.command("Page.captureScreenshot", format="png")
        return base64.b64decode(result["data"])

    async def colours(self) -> Counter[tuple[int, int, int]]:
        """Count the pixels of the window by colour. Leaves the page."""
        picture = base64.b64encode(await self.screenshot()).decode()
        await self.command("Page.navigate", url="about:blank")
        await self.until("location.href === 'about:blank'")
        counted = await self.run(_COUNT_COLOURS.replace("PICTURE", picture))
        colours: Counter[tuple[int, int, int]] = Counter()
        for rgb, count in counted.items():
            red, green, blue = map(int, rgb.split(","))
            colours[red, green, blue] = count
        return colours


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Open a window, or skip the test without the extra `browser` or a library of the system."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(WINDOW), str(port)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address(session, port, process)
            async with session.ws_connect(address, max_msg_size=0) as socket_:
                window = Browser(socket_)
                for domain in ("Page", "Runtime", "Log"):
                    await window.command(f"{domain}.enable")
                yield window
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _address(
    session: aiohttp.ClientSession, port: int, process: asyncio.subprocess.Process
) -> str:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            if process.returncode == MISSING and process.stdout is not None:
                pytest.skip(f"no browser: {(await process.stdout.read()).decode().strip()}")
            assert process.returncode is None, f"the browser ended with {process.returncode}"
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    windows = await response.json(content_type=None)
                if windows:
                    return str(windows[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
