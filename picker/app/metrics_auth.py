"""Who may read the HTTP port of a picker in a cluster, if that was asked for."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack

from picker.admin.server import AdminServer
from picker.app.kubernetes_side import ClusterAccess
from picker.cli.options import Options
from picker.k8s.reviews import AccessReviews, Authorization, ReviewError

log = logging.getLogger(__name__)

_STATUSES = {Authorization.UNKNOWN: 401, Authorization.FORBIDDEN: 403}


class MetricsAuthSide:
    """Owns the connection that is asked who somebody is; where nobody asks, nothing."""

    def __init__(self, options: Options) -> None:
        """Asks nobody."""
        self._access: ClusterAccess | None = None
        if options.metrics_auth and options.kubernetes is not None:
            self._access = ClusterAccess(options.kubernetes)
            self._is_plain = options.metrics_tls is None

    async def open(self, stack: AsyncExitStack, admin: AdminServer) -> None:
        """Protect `admin` until `stack` is closed. Raises `ConfigError` for bad credentials."""
        if self._access is None:
            return
        self._access.load()
        if self._is_plain:
            log.warning(
                "--metrics-endpoint-auth without --metrics-cert-dir: tokens travel in plain"
            )
        reviews = AccessReviews(
            await stack.enter_async_context(self._access.open()), time.monotonic
        )

        async def authorize(token: str, path: str) -> tuple[int, str] | None:
            try:
                found = await reviews.authorize(token, path)
            except ReviewError as error:
                return 503, str(error)
            return None if found is Authorization.ALLOWED else (_STATUSES[found], found.value)

        admin.protect(authorize)
