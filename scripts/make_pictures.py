"""Make docs/pictures/page.png and docs/pictures/top.svg from a fleet that serves requests.

    python scripts/make_pictures.py [SECONDS]

Four simulated workers get chats that share beginnings for so many seconds (60 without a number).
The page is what a browser shows (the extra `browser`), `top` what it draws in a terminal of 110 by
32 characters.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import openai  # noqa: E402
from rich.console import Console  # noqa: E402

from fleet.picker_views import PickerViews  # noqa: E402
from fleet.top import DECISIONS  # noqa: E402
from fleet.top_frame import Room, Title, Wishes, frame  # noqa: E402
from fleet.top_text import Glyphs  # noqa: E402
from picker.admin.history import SAMPLES  # noqa: E402
from tests.support.fleet.browser import browser  # noqa: E402
from tests.support.fleet.running_fleet import (  # noqa: E402
    Fleet,
    free_base_port,
    running_fleet,
)

PICTURES = ROOT / "docs" / "pictures"
COLUMNS, LINES = 110, 32
WIDTH, HEIGHT = 1280, 860
CLIENTS, THINK_SECONDS = 12, 0.8
# Not from other hosts: whoever reads the documentation has a font.
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
async def busy_fleet(seconds: float) -> AsyncIterator[Fleet]:
    """Four workers that have been asked for so long, and still are."""
    async with running_fleet(free_base_port(), "--workers", "4") as fleet:
        await fleet.ready()
        clients = [asyncio.create_task(chat(fleet, number)) for number in range(CLIENTS)]
        try:
            await asyncio.sleep(seconds)
            yield fleet
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def page(url: str) -> bytes:
    """The page, as PNG."""
    async with browser() as window:
        await window.look(WIDTH, HEIGHT)
        await window.open(url)
        await window.until("document.querySelectorAll('#requests-rows > tr').length > 5")
        picture: bytes = await window.screenshot()
        return picture


def top(url: str) -> str:
    """What `pointsman top` draws, as SVG."""
    seen = PickerViews(url).look(SAMPLES, DECISIONS)
    console = Console(
        record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True
    )
    for line in frame(seen, Title(url), Room(COLUMNS, LINES, Glyphs()), Wishes()):
        console.print(line)
    return FONT_FACE.sub("", console.export_svg(title="pointsman top"))


async def main(seconds: float) -> None:
    """Write both."""
    PICTURES.mkdir(exist_ok=True)
    async with busy_fleet(seconds) as fleet:
        (PICTURES / "top.svg").write_text(await asyncio.to_thread(top, fleet.picker_url))
        (PICTURES / "page.png").write_bytes(await page(fleet.picker_url))


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60))
