"""Follows the objects of a kind that a cluster may lack, in whichever group it has them.

What is followed is given up for less only when it is missing twice in a row: an API server that
starts may not know its kinds yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from picker.k8s.api import ApiError, KubernetesApi, Resource, UnreachableError
from picker.k8s.groups import Kind, installed, tell
from picker.k8s.reflector import Reflector

R = TypeVar("R")
ASK_AGAIN_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0


class KindFollower(Generic[R]):
    """Tells `use` of all records of a kind, whenever they change; of none where there is no such
    kind. `reflect` makes what follows a resource.
    """

    def __init__(
        self,
        kind: Kind,
        reflect: Callable[[Resource], Reflector[R]],
        use: Callable[[Iterable[R]], None],
    ) -> None:
        self._kind, self._reflect, self._use = kind, reflect, use
        self._reflector: Reflector[R] | None = None
        self._failure: str | None = None

    def problem(self) -> str | None:
        """Why what is known may be old; None: it is current, or there is no such kind."""
        if self._failure is not None:
            return self._failure
        reflector = self._reflector
        return reflector.problem() if reflector is not None and reflector.installed else None

    async def run(self, api: KubernetesApi) -> None:
        """Follow until cancelled."""
        following: Resource | None = None
        is_first, was_missing = True, False
        async with asyncio.TaskGroup() as group:
            task: asyncio.Task[None] | None = None
            while True:
                try:
                    found = await installed(api, self._kind)
                except (ApiError, UnreachableError) as error:
                    # What is followed tells of the same by itself.
                    plural = self._kind.current.plural
                    self._failure = f"{plural}: {error}" if self._reflector is None else None
                    await asyncio.sleep(RETRY_SECONDS if is_first else ASK_AGAIN_SECONDS)
                    continue
                self._failure = None
                is_missing = following is not None and found not in (following, self._kind.current)
                if is_missing and not was_missing:
                    found = following
                was_missing = is_missing
                tell(self._kind, following, found, is_first=is_first)
                if is_first or found != following:
                    if task is not None:
                        task.cancel()
                        await asyncio.wait({task})  # does not swallow a cancellation of this
                    task = self._begin(group, found)
                following, is_first = found, False
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _begin(self, group: asyncio.TaskGroup, found: Resource | None) -> asyncio.Task[None] | None:
        if found is None:
            self._reflector = None
            self._use(())
            return None
        reflector = self._reflector = self._reflect(found)
        reflector.subscribe(lambda view, _: self._use(view.values()))
        return group.create_task(reflector.run(), name=f"reflector {found.qualified}")
