"""Follows the objects of a kind that a cluster may lack, in whichever group it has them.

What is followed is given up for less only when it is missing twice in a row: an API server that
starts may not know its kinds yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from picker.k8s.api import (
    LEGACY_OBJECTIVES,
    LEGACY_REWRITES,
    OBJECTIVES,
    REWRITES,
    ApiError,
    ApiResource,
    KubernetesApi,
    UnreachableError,
)
from picker.k8s.reflector import Reflector, check_api_server

log = logging.getLogger(__name__)

R = TypeVar("R")
ASK_AGAIN_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the picker can do without, in its current and in its deprecated group."""

    current: ApiResource
    legacy: ApiResource


OBJECTIVE_KIND: Final = Kind(OBJECTIVES, LEGACY_OBJECTIVES)
REWRITE_KIND: Final = Kind(REWRITES, LEGACY_REWRITES)


async def installed(api: KubernetesApi, kind: Kind) -> ApiResource | None:
    """The resource to follow; None: the server knows neither. Raises as `KubernetesApi` does."""
    for one in (kind.current, kind.legacy):
        if await api.has(one):
            return one
    await check_api_server(api)
    return None


class KindFollower(Generic[R]):
    """Tells `use` of all records of a kind, whenever they change; of none where there is no such
    kind. `reflect` makes what follows a resource.
    """

    def __init__(
        self,
        kind: Kind,
        reflect: Callable[[ApiResource], Reflector[R]],
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
        following: ApiResource | None = None
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
                _log_change(self._kind, following, found, is_first=is_first)
                if is_first or found != following:
                    if task is not None:
                        task.cancel()
                        await asyncio.wait({task})  # does not swallow a cancellation of this
                    task = self._begin(group, found)
                following, is_first = found, False
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _begin(
        self, group: asyncio.TaskGroup, found: ApiResource | None
    ) -> asyncio.Task[None] | None:
        if found is None:
            self._reflector = None
            self._use(())
            return None
        reflector = self._reflector = self._reflect(found)
        reflector.subscribe(lambda view, _: self._use(view.values()))
        return group.create_task(reflector.run(), name=f"reflector {found.qualified}")


def _log_change(
    kind: Kind, before: ApiResource | None, now: ApiResource | None, *, is_first: bool
) -> None:
    """Log which resource is followed, when that is new."""
    if now == before and not is_first:
        return
    plural = kind.current.plural
    if now is None:
        log.warning(
            "the cluster knows no %s, so none are followed; install the definitions in crds/ to "
            "use them",
            plural,
        )
    elif now == kind.legacy:
        log.warning(
            "%s of %s are followed, which is deprecated: use %s",
            plural,
            now.api_version,
            kind.current.api_version,
        )
    elif not is_first:
        log.info("%s of %s are followed", plural, now.api_version)
