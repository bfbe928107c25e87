"""The source of a pool's endpoints and rules: a file, or Kubernetes."""

from typing import Protocol


class PoolSource(Protocol):
    """Synchronizes a datastore and the rules of requests with a file or a cluster."""

    def load(self) -> None:
        """Load what is available at once, before the picker serves. Raises `ConfigError`."""

    async def run(self) -> None:
        """Follow the source until cancelled. Does not fail for temporary errors."""

    def is_absent(self) -> bool:
        """Return whether the pool is known not to exist."""

    def problem(self) -> str | None:
        """Return why the pool may be outdated, as a sentence; None: it is current."""
