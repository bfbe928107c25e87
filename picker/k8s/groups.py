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
    REWRITES,
    KubernetesApi,
    Resource,
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
    return None


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
