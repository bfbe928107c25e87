"""The exchange between a plugin that learns from decisions and its peers in other replicas.

A plugin receives a function to report what it learns (`None` if there is no other replica), and is
called with what the plugin of the same name learned in another replica. Reports from other replicas
are never forwarded.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from picker.framework.attributes import EndpointLoad

# The block hashes of a prompt (little-endian uint64, first block first) went to an endpoint with
# room for `capacity` blocks: (endpoint key, hashes, capacity).
ReportPlacement: TypeAlias = Callable[[str, bytes, int], None]
# A session was bound to an endpoint by its n-th binding: (session, endpoint key, n).
ReportBinding: TypeAlias = Callable[[str, str, int], None]


@runtime_checkable
class SharesPlacements(Protocol):
    """Records where prompts were sent, by hashes that depend on a seed."""

    @property
    def hash_seed(self) -> int:
        """The current seed of its hashes."""

    def use_hash_seed(self, seed: int) -> None:
        """Hash with this seed, and drop all earlier hashes, unless the parameters name one."""

    def report_placements(self, report: ReportPlacement | None) -> None:
        """Call `report` with every later placement."""

    def placed_elsewhere(self, key: str, hashes: bytes, capacity: int) -> None:
        """Record the prompt that another replica sent to endpoint `key`, which is in the pool."""


class SessionMemory(Protocol):
    """The bindings of sessions to endpoints."""

    def report_bindings(self, report: ReportBinding | None) -> None:
        """Call `report` with every later binding of this replica."""

    def bound_elsewhere(
        self, session: str, endpoint: str, moves: int, age_seconds: float, now_seconds: float
    ) -> None:
        """Record a binding that another replica made `age_seconds` ago."""


@runtime_checkable
class SharesSessions(Protocol):
    """Binds sessions to endpoints."""

    @property
    def session_bindings(self) -> SessionMemory | None:
        """Its bindings; None if it stores none."""


@runtime_checkable
class SharesLoads(Protocol):
    """Counts the load in flight at endpoints."""

    @property
    def own_loads(self) -> Mapping[str, EndpointLoad] | None:
        """This replica's load by endpoint key; None if it is not shared."""

    def set_loads_elsewhere(self, loads: Mapping[str, EndpointLoad]) -> None:
        """Replace the sum of the loads of all other replicas."""
