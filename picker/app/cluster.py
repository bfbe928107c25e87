"""The connection to a cluster, and the HTTP port's access control by that cluster."""

import logging
import time
from contextlib import AsyncExitStack
from random import Random

from picker.admin.server import AdminServer
from picker.cli.options import KubernetesFlags, Options
from picker.errors import ConfigError
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Credentials, find_credentials
from picker.k8s.discovery import WatchedPool, selected_pods
from picker.k8s.objects import PoolName
from picker.k8s.reviews import AccessReviews, Authorization, ReviewError

log = logging.getLogger(__name__)

_STATUSES = {Authorization.UNKNOWN: 401, Authorization.FORBIDDEN: 403}


class ClusterAccess:
    def __init__(self, flags: KubernetesFlags) -> None:
        self._flags = flags
        self._credentials: Credentials | None = None

    def load(self) -> None:
        if self._credentials is None:
            path = self._flags.kubeconfig
            self._credentials = find_credentials(
                "" if path is None else str(path),
                self._flags.context or None,
                clock=time.monotonic,
            )

    def open(self) -> KubernetesClient:
        if self._credentials is None:
            raise ConfigError("the credentials of the cluster were not loaded")
        return KubernetesClient(self._credentials, rng=Random())


def target_of(flags: KubernetesFlags) -> WatchedPool:
    pool = PoolName(flags.pool_name, flags.pool_namespace, flags.pool_group)
    if not flags.endpoint_selector:
        return WatchedPool(pool)
    return WatchedPool(pool, selected_pods(flags.endpoint_selector, flags.endpoint_target_ports))


async def protect(admin: AdminServer, options: Options, stack: AsyncExitStack) -> None:
    """Restrict the HTTP port, if the options say so, to clients that the cluster authorizes."""
    if not options.metrics_auth or options.kubernetes is None:
        return
    access = ClusterAccess(options.kubernetes)
    access.load()
    if options.metrics_tls is None:
        log.warning("--metrics-endpoint-auth without --metrics-cert-dir: tokens are not encrypted")
    reviews = AccessReviews(await stack.enter_async_context(access.open()), time.monotonic)

    async def authorize(token: str, path: str) -> tuple[int, str] | None:
        try:
            found = await reviews.authorize(token, path)
        except ReviewError as error:
            return 503, str(error)
        return None if found is Authorization.ALLOWED else (_STATUSES[found], found.value)

    admin.protect(authorize)
