"""Following objects through what stands before an API server and answers in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from reflector_scene import following

from picker.k8s.api import WatchEvent

pytestmark = pytest.mark.looptime


async def test_watches_that_never_tell_anything_are_made_up_for_by_lists() -> None:
    """Something before the server accepts them and closes at once: what changes is seen soon."""

    @asynccontextmanager
    async def barren(*_: object) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async def nothing() -> AsyncIterator[WatchEvent]:
            for event in ():
                yield event

        yield nothing()

    async with following("a") as scene:
        scene.api.watch = barren  # type: ignore[assignment, method-assign]
        scene.server.watches.end()
        await asyncio.sleep(60)
        for number in range(10):
            scene.write("a", str(number))
            await scene.equal(seconds=25)
        before = scene.asked("list")
        await asyncio.sleep(600)
        assert scene.asked("list") - before <= 80


async def test_a_proxy_that_answers_404_takes_nothing_away() -> None:
    """A kind is only missing when discovery says so, and still knows of others."""

    async def none(_: object) -> bool:
        return False

    async with following("a") as scene:
        has = scene.api.has
        scene.api.has = none  # type: ignore[method-assign]
        resources = scene.server.catalogue.remove("configmaps")
        scene.server.watches.end()
        await asyncio.sleep(600)
        assert scene.shown == {"a": "1"}
        assert scene.reflector.installed
        assert "404" in (scene.reflector.problem() or "")
        for resource in resources:
            scene.server.catalogue.serve(resource)
        scene.api.has = has  # type: ignore[method-assign]
        scene.write("a", "2")
        await scene.equal(seconds=16)
