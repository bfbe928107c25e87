"""What follows a kind ends when it is told to, whatever it is about just then."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from picker.k8s.api import ApiResource, KubernetesApi
from picker.k8s.kind_follower import OBJECTIVE_KIND, KindFollower
from picker.k8s.reflector import Reflector


class SlowToEnd:
    """Stands in for a reflector that takes its time when it is cancelled."""

    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()

    def subscribe(self, listener: Any) -> None:
        """Nothing is ever told."""

    async def run(self) -> None:
        """Until cancelled, and then until it may end."""
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()


class Discovery:
    """An API server that has the legacy kind, and later the current one too."""

    def __init__(self) -> None:
        self.kinds = {OBJECTIVE_KIND.legacy}

    async def has(self, resource: ApiResource) -> bool:
        """Whether it has it."""
        return resource in self.kinds


@pytest.mark.looptime
async def test_it_ends_while_it_changes_from_one_group_to_the_other() -> None:
    """A cancellation is not mistaken for the end of what was followed before."""
    api, slow = Discovery(), SlowToEnd()
    follower = KindFollower(
        OBJECTIVE_KIND, lambda _: cast("Reflector[int]", slow), lambda records: None
    )
    task = asyncio.create_task(follower.run(cast("KubernetesApi", api)))
    await asyncio.sleep(1)
    api.kinds.add(OBJECTIVE_KIND.current)
    await slow.ending.wait()
    task.cancel()
    await asyncio.sleep(0)
    slow.may_end.set()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
