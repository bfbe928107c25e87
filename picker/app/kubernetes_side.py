"""What a picker does to follow a cluster: the way to it, and what is followed there."""

from __future__ import annotations

import time
from random import Random

from picker.cli.options import KubernetesFlags
from picker.errors import ConfigError
from picker.k8s.client import KubernetesClient
from picker.k8s.credentials import Credentials, find_credentials
from picker.k8s.discovery import KubernetesDiscovery, Target, selected_pods
from picker.k8s.objects import PoolName
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import RequestRules


class ClusterAccess:
    """The way to the API server that the flags name; owns the credentials."""

    def __init__(self, flags: KubernetesFlags) -> None:
        self._flags = flags
        self._credentials: Credentials | None = None

    def load(self) -> None:
        """Find the credentials; files are read and plugins run. Raises `ConfigError`."""
        if self._credentials is None:
            path = self._flags.kubeconfig
            self._credentials = find_credentials(
                "" if path is None else str(path),
                self._flags.context or None,
                clock=time.monotonic,
            )

    def open(self) -> KubernetesClient:
        """A client, to be used as a context manager. Raises `ConfigError` before `load`."""
        if self._credentials is None:
            raise ConfigError("the credentials of the cluster were not loaded")
        return KubernetesClient(self._credentials, rng=Random())


class KubernetesSource:
    """A `PoolSource`: the discovery, and the credentials that it needs first."""

    def __init__(
        self,
        flags: KubernetesFlags,
        datastore: Datastore,
        rules: RequestRules,
        metrics: PickerMetrics,
    ) -> None:
        self._access = ClusterAccess(flags)
        target = target_of(flags)
        self._discovery = KubernetesDiscovery(target, self._access.open, datastore, rules, metrics)

    def load(self) -> None:
        """Find the credentials. Raises `ConfigError`."""
        self._access.load()
        self._discovery.load()

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        await self._discovery.run()

    def is_absent(self) -> bool:
        """Whether the cluster has no such pool, as far as is known."""
        return self._discovery.is_absent()

    def problem(self) -> str | None:
        """Why what is known may be old, in a sentence for people."""
        return self._discovery.problem()


def target_of(flags: KubernetesFlags) -> Target:
    """What the flags ask to follow."""
    pool = PoolName(flags.pool_name, flags.pool_namespace, flags.pool_group)
    if not flags.endpoint_selector:
        return Target(pool)
    return Target(pool, selected_pods(flags.endpoint_selector, flags.endpoint_target_ports))
