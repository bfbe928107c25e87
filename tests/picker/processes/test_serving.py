"""Asking a serving process that is stuck."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from picker.processes.messages import Subject
from picker.processes.serving import Serving

pytestmark = pytest.mark.looptime


class _Full:
    """A channel to a process that does not read, and that holds no more."""

    async def send(self, _: object) -> None:
        """Never done."""
        await asyncio.Event().wait()


async def test_a_process_that_does_not_even_read_is_not_waited_for() -> None:
    """People get an answer without it, and it is found out to be stuck."""
    process: Any = SimpleNamespace(pid=1, returncode=None)
    channel: Any = _Full()
    serving = Serving(0, process, channel)
    serving.revision = 0
    async with asyncio.timeout(60):
        assert await serving.answer(Subject.HEALTH, "") is None
        assert await serving.tell() is None
    assert serving.unanswered == 1
    assert not serving._waiting
