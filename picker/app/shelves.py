"""The optional parts of a picker: a flag asks for one, and its module is then loaded by name.

The core imports no shelf, so a shelf is removed by deleting its folder and its row here; a picker
without it refuses the flag. The protocol beside the table declares what the core calls in a shelf.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

from base.shelves import load_shelf
from picker.cli.options import KubernetesFlags, XdsFlags
from picker.errors import ConfigError
from picker.framework.replicas import SharesLoads
from picker.metrics.picker_metrics import AutoscaleSeries, XdsSeries
from picker.pool.datastore import Datastore
from picker.types import Candidate

_SHELVES: Final = {
    "--autoscale": "picker.planner.shell.autoscaling",
    "--xds-port": "picker.xds.port",
}


@dataclass(frozen=True, slots=True)
class PoolSight:
    """One of the `pools` of a picker, as a shelf sees it."""

    name: str
    pools: Sequence[str]
    namespace: str
    endpoints: Callable[[], Sequence[Candidate]]
    waiting: Callable[[], int]
    is_leader: Callable[[], bool]
    num_peers: Callable[[], int | None]  # other replicas; None while one does not answer
    clock: Callable[[], float]


class Autoscaler(Protocol):
    """Plans the replicas of one pool (`--autoscale`)."""

    @property
    def watcher(self) -> object: ...

    @property
    def shared(self) -> SharesLoads: ...

    def load(self) -> None: ...

    async def run(self) -> None: ...


class DiscoveryPort(Protocol):
    """Publishes the endpoints of the pools to proxies (`--xds-port`)."""

    @property
    def address(self) -> str: ...

    async def start(self) -> int: ...

    async def stop(self) -> None: ...

    def works(self) -> list[Coroutine[None, None, None]]: ...


@dataclass(frozen=True, slots=True)
class PublishedPool:
    name: str
    datastore: Datastore
    series: XdsSeries


def autoscaler(
    path: Path, sight: PoolSight, cluster: KubernetesFlags | None, series: AutoscaleSeries
) -> Autoscaler | None:
    """Build the autoscaler of a pool from the file at `path`; None if nothing in it is of the pool.

    Raises `ConfigError`.
    """
    build = _builder("--autoscale")
    return cast("Autoscaler | None", build(path, sight, cluster, series))


def discovery_port(
    flags: XdsFlags, pools: Iterable[PublishedPool], series: XdsSeries
) -> DiscoveryPort:
    """Build the port of endpoint discovery with the process's `series`. Raises `ConfigError`."""
    return cast("DiscoveryPort", _builder("--xds-port")(flags, pools, series))


def _builder(flag: str) -> Callable[..., object]:
    name = _SHELVES[flag]
    shelf = load_shelf(name)
    if shelf is None:
        raise ConfigError(f"{flag} needs {name}, which is not installed")
    build: Callable[..., object] = shelf.build
    return build
