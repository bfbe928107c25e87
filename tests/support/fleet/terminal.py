"""A program in a terminal of its own, which the test reads and types into."""

import asyncio
import codecs
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

LIMIT_SECONDS = 120


class Terminal:
    def __init__(self, master: int, slave: int) -> None:
        self._master, self._slave = master, slave
        self.modes_before = self.modes()
        self.process: asyncio.subprocess.Process
        self.output = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def read(self) -> None:
        """Take in what was written so far, which may end within a character."""
        self.output += self._decode(os.read(self._master, 65536))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    async def until(self, condition: Callable[[str], object]) -> None:
        """Wait for something about the output; fail when it does not come."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not condition(self.output):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"never came; the end of what did: {self.output[-2000:]!r}")


@asynccontextmanager
async def terminal(
    *argv: str, columns: int = 80, lines: int = 24, **environment: str
) -> AsyncIterator[Terminal]:
    """Run `python argv …` at a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    one = Terminal(master, slave)  # before the program, which changes the modes as it starts
    one.process = process = await asyncio.create_subprocess_exec(
        *(sys.executable, *argv),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        # The terminal of the session, so that Ctrl-C is a signal.
        preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
        env={**own, "TERM": "xterm-256color", **environment},
    )
    loop = asyncio.get_running_loop()
    loop.add_reader(master, one.read)
    try:
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        loop.remove_reader(master)
        os.close(master)
        os.close(slave)
