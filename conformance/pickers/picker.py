"""The interface of a picker under test."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from conformance.case import Provision


@dataclass(frozen=True, slots=True)
class Implementation:
    """The picker that a report names."""

    name: str
    version: str


class Picker(Protocol):
    """A picker under test.

    `address` is `host:port` of ext_proc and `health_address` that of gRPC health (None: unknown).
    Without `Provision.RESTART` it runs already, and without `Provision.POOL_CHANGES` its pool
    stays as it is; the methods about these are not called then.
    """

    @property
    def address(self) -> str: ...

    @property
    def health_address(self) -> str | None: ...

    @property
    def is_tls(self) -> bool: ...

    @property
    def provides(self) -> frozenset[Provision]: ...

    @property
    def is_running(self) -> bool: ...

    async def start(self) -> None:
        """Start it, unless it runs, and return at once."""

    async def kill(self) -> None:
        """End it without notice, and wait until it is gone."""

    def ask_to_end(self) -> None:
        """Send SIGTERM to the picker."""

    async def end(self, limit_seconds: float) -> int | None:
        """The exit status; None when it runs on after the limit."""

    async def use_pool(self, endpoints: Sequence[str]) -> None:
        """Make these its pool, and return at once; it may take its time to notice."""
