"""Which API group has a kind, where two may have it: the current one first, then the legacy one.

Definitions may be installed after the picker was started, and may be taken away: whoever follows a
kind asks again from time to time. The question goes to discovery, which every service account may
ask, so that nothing is listed that may be forbidden for being in no role.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from picker.k8s.api import (
    LEGACY_OBJECTIVES,
    LEGACY_REWRITES,
    OBJECTIVES,
    PODS,
    REWRITES,
    KubernetesApi,
    Resource,
    UnreachableError,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the picker can do without, in its current and in its deprecated group."""

    current: Resource
    legacy: Resource


OBJECTIVE_KIND: Final = Kind(OBJECTIVES, LEGACY_OBJECTIVES)
REWRITE_KIND: Final = Kind(REWRITES, LEGACY_REWRITES)


async def installed(api: KubernetesApi, kind: Kind) -> Resource | None:
    """The resource to follow; None: the server knows neither. Raises as `KubernetesApi` does."""
    for one in (kind.current, kind.legacy):
        if await api.has(one):
            return one
    await _check_server(api)
    return None


async def is_missing(api: KubernetesApi, resource: Resource) -> bool:
    """Whether a server knows no such kind. Raises as `KubernetesApi` does."""
    if await api.has(resource):
        return False
    await _check_server(api)
    return True


async def _check_server(api: KubernetesApi) -> None:
    """Every API server has Pods; a proxy without one behind it answers 404 to everything."""
    if not await api.has(PODS):
        raise UnreachableError("what answers knows no Pods, so it is no API server: 404")


def tell(kind: Kind, before: Resource | None, now: Resource | None, *, is_first: bool) -> None:
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
