"""Make the pictures of docs/pictures: the page, the reports of `bench` and `simulate`, and `top`.

    python scripts/make_pictures.py [SECONDS]

Four simulated workers get chats that share beginnings for the given number of seconds (default 60),
more than they can serve at once, so that some wait in the picker. What a browser shows (the extra
`browser`) is taken on a desk and on a phone, light and dark; `top` is what it draws in a terminal
of 110 by 32 characters. Pictures have a small palette, which makes them four times smaller.
"""

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import openai  # noqa: E402
from PySide6.QtGui import QImage  # noqa: E402
from rich.console import Console  # noqa: E402

from fleet.commands.top import DECISIONS  # noqa: E402
from fleet.commands.top_frame import Room, Title, Wishes, frame  # noqa: E402
from fleet.commands.top_text import Glyphs  # noqa: E402
from fleet.picker_views import PickerViews  # noqa: E402
from picker.admin.history import SAMPLES  # noqa: E402
from tests.support.fleet.browser import browser  # noqa: E402
from tests.support.fleet.running_fleet import Fleet, free_base_port, running_fleet  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
COLUMNS, LINES = 110, 32
SIZES = ((1400, 900), (375, 812))
SCHEMES = ("light", "dark")
COLOURS, MIN_DISTANCE = 20, 9
MAX_LINES = 2_600  # of pixels, of a report
CLIENTS, THINK_SECONDS = 20, 0.8
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 3}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
flowControl:
  maxRequests: "12"
  saturationDetector: {pluginRef: concurrency-detector}
"""
REPORTS = {
    "bench": (
        *("bench", "--rate", "2,4,8", "--duration", "15", "--input-tokens", "200"),
        *("--output-tokens", "60", "--slo", "ttft<100ms,itl<20ms"),
    ),
    "simulate": (
        *("simulate", "--fast", "--workers", "8", "--rate", "28", "--duration", "25"),
        *("--prefix-groups", "64", "--prefix-tokens", "6000"),
        *("--policies", "default", "round-robin", "random", "--slo", "ttft_p95<1s"),
    ),
}
# Not from other hosts: a reader of the documentation has a font.
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


async def chat(fleet: Fleet, number: int) -> None:
    """One client, who asks about one of four documents again and again."""
    rng = Random(number)
    while True:
        document = f"fact {rng.randrange(4)} of the handbook. " * 60
        with contextlib.suppress(openai.APIError):
            stream = await fleet.openai.chat.completions.create(
                model="sim",
                max_tokens=rng.randrange(20, 120),
                stream=True,
                messages=[
                    {"role": "system", "content": document},
                    {"role": "user", "content": f"question {rng.random()}"},
                ],
            )
            async for _ in stream:
                pass
        await asyncio.sleep(rng.uniform(0, 2 * THINK_SECONDS))


@contextlib.asynccontextmanager
async def asked(fleet: Fleet, seconds: float) -> AsyncIterator[None]:
    """The fleet has been asked for so long, and still is."""
    clients = [asyncio.create_task(chat(fleet, number)) for number in range(CLIENTS)]
    try:
        await asyncio.sleep(seconds)
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def take(name: str, url: str, ready: str, *, whole: bool) -> None:
    """Pictures of a page in all sizes and schemes; `whole` also of what is below the window."""
    async with browser() as window:
        await window.command("Emulation.setScrollbarsHidden", hidden=True)
        for (width, height), scheme in product(SIZES, SCHEMES):
            await window.look(width, height, scheme)
            await window.open(url)
            await window.until(ready)
            if whole:
                high: int = await window.run("document.documentElement.scrollHeight")
                await window.look(width, min(high, MAX_LINES), scheme)
            await window.run("document.fonts.ready.then(() => 0)")
            save(await window.screenshot(), PICTURES / f"{name}-{width}-{scheme}.png")


def save(picture: bytes, path: Path) -> None:
    """Write a PNG with its most frequent colours, and for the others the nearest of them."""
    image = QImage.fromData(picture).convertToFormat(QImage.Format.Format_RGB32)
    wide, high = image.width(), image.height()
    pixels = np.frombuffer(image.constBits(), np.uint32).reshape(high, wide) & 0xFFFFFF
    colours, places, times = np.unique(pixels, return_inverse=True, return_counts=True)
    parts = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.int32)
    palette = list[int]()
    for index in np.argsort(-times.astype(np.int64), kind="stable"):
        distances = np.abs(parts[palette] - parts[index]).max(axis=1)
        if len(palette) < COLOURS and (not palette or distances.min() >= MIN_DISTANCE):
            palette.append(int(index))
    nearest = np.array(
        [((parts[palette] - one) ** 2).sum(axis=1).argmin() for one in parts], np.uint8
    )
    rows = np.zeros((high, -(-wide // 4) * 4), np.uint8)  # each begins at a multiple of four
    rows[:, :wide] = nearest[places.reshape(high, wide)]
    few = QImage(rows.tobytes(), wide, high, rows.shape[1], QImage.Format.Format_Indexed8)
    few.setColorTable([0xFF000000 | int(colours[index]) for index in palette])
    few.save(str(path), "PNG", 0)  # type: ignore[call-overload]


def top(url: str) -> str:
    """Render the screen of `pointsman top` as SVG."""
    seen = PickerViews(url).look(SAMPLES, DECISIONS)
    console = Console(
        record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True
    )
    for line in frame(seen, Title(url), Room(COLUMNS, LINES, Glyphs()), Wishes()):
        console.print(line)
    return FONT_FACE.sub("", console.export_svg(title="pointsman top"))


def report(folder: Path, name: str, *more: str) -> str:
    """Run a command that writes a report into `folder`; returns its address."""
    file = f"{name}.html"
    command = (sys.executable, "-m", "pointsman", *REPORTS[name], *more, "--html", file)
    # The exit status is that of its objectives.
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    return (folder / file).as_uri()


async def main(seconds: float) -> None:
    """Write all of them."""
    PICTURES.mkdir(exist_ok=True)
    drawn = "document.querySelectorAll('svg.plot .line').length > 8"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG)
        flags = ("--workers", "4", "--config", str(folder / "config.yaml"))
        async with running_fleet(free_base_port(), *flags) as fleet:
            await fleet.ready()
            url = await asyncio.to_thread(report, folder, "bench", "--url", fleet.url)
            await take("bench", url, drawn, whole=True)
            async with asked(fleet, seconds):
                picker = fleet.picker_url
                (PICTURES / "top.svg").write_text(await asyncio.to_thread(top, picker))
                rows = "document.querySelectorAll('#requests-rows > tr').length > 5"
                await take("page", picker, f"{rows} && {drawn}", whole=False)
        url = await asyncio.to_thread(report, folder, "simulate")
        await take("simulate", url, drawn, whole=True)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60))
