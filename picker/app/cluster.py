"""The connection to a cluster, which controls access and holds the election of a leader."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from random import Random

from picker.admin.server import AdminServer
from picker.cli.options import KubernetesFlags, Options
from picker.config.schema import STANDBY_GATE, EndpointPickerConfig, gate_settings
from picker.errors import ConfigError
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Credentials, find_credentials
from picker.k8s.discovery import WatchedPool, selected_pods
from picker.k8s.lease import Clocks, LeaseKeeper
from picker.k8s.objects import PoolName
from picker.k8s.reviews import AccessReviews, Authorization, ReviewError
from picker.metrics.picker_metrics import PickerMetrics

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
                "" if path is None else str(path), self._flags.context or None, clock=time.monotonic
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


class Leadership:
    """Owns the candidacy for the Lease; without an election every replica leads."""

    def __init__(self, options: Options, metrics: PickerMetrics) -> None:
        self._keeper: LeaseKeeper | None = None
        if options.election is None or options.kubernetes is None:
            return
        flags = options.election
        self._access = ClusterAccess(options.kubernetes)
        self._keeper = LeaseKeeper(
            self._access.open,
            flags.lease,
            flags.identity,
            flags.timings,
            metrics.kubernetes.election,
            clocks=Clocks(steady_seconds, lambda: datetime.now(UTC)),
            rng=Random(),
        )

    def load(self) -> None:
        if self._keeper is not None:
            self._access.load()

    def is_leader(self) -> bool:
        return self._keeper is None or self._keeper.is_leader()

    async def may_follow(self, config: EndpointPickerConfig) -> None:
        """Wait until this replica leads, unless the gate `haPopulateNonLeaderDatastore` is on."""
        if self._keeper is not None and not gate_settings(config)[STANDBY_GATE]:
            await self._keeper.led()

    def problem(self) -> str | None:
        """Return why this replica does not lead or may soon lose the lead; None if it leads."""
        keeper = self._keeper
        if keeper is None:
            return None
        problem = keeper.problem()
        if problem is not None or keeper.is_leader():
            return problem
        return f"on standby; the leader is {keeper.holder or 'unknown'}"

    def resign(self) -> None:
        if self._keeper is not None:
            self._keeper.resign()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Take part in the election until `resign`; the task ends once the lease is released."""
        if self._keeper is not None:
            group.create_task(self._keeper.run(), name="leader election")


def steady_seconds() -> float:
    """Return the time of a clock that also runs while the machine sleeps, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
