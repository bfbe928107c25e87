"""A file is read again when it may have changed, with or without a notification."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from watchfiles import Change

from picker.file_changes import moments_to_look


async def test_without_watches_there_is_still_a_moment_every_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine has a limited number of watches; the picker serves without them, too."""

    async def no_watches(*_paths: Path, **_how: object) -> AsyncIterator[object]:
        for _ in range(len(_paths)):
            raise OSError(28, "OS file watch limit reached")
        yield 1

    async with aclosing(moments_to_look(tmp_path, "f", watch=no_watches)) as moments:
        await anext(moments)
        await anext(moments)
    assert "watch limit" in caplog.text


async def test_the_watch_is_ended_with_the_looking(tmp_path: Path) -> None:
    stops: list[asyncio.Event] = []

    async def watch(*_paths: Path, stop_event: asyncio.Event, **_how: object) -> AsyncIterator[int]:
        stops.append(stop_event)
        while True:
            yield 1

    async with aclosing(moments_to_look(tmp_path, "f", watch=watch)) as moments:
        await anext(moments)
        assert not stops[0].is_set()
    assert stops[0].is_set()


async def test_only_changes_of_the_file_and_of_volumes_count(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}

    async def watch(folder: Path, **how: object) -> AsyncIterator[int]:
        concerns = how["watch_filter"]
        assert callable(concerns)
        for name in ("f", "..data", "g", "f.swp"):
            seen[name] = concerns(Change.modified, str(folder / name))
        yield 1

    async with aclosing(moments_to_look(tmp_path, "f", watch=watch)) as moments:
        await anext(moments)
    assert seen == {"f": True, "..data": True, "g": False, "f.swp": False}
