"""The source of a pool's endpoints and rules: a file, or Kubernetes."""

from __future__ import annotations

from typing import Protocol


class PoolSource(Protocol):
    """Makes a datastore and the rules of requests follow a file or a cluster."""

    def load(self) -> None:
        """Called once before anything is served. What can be known at once is known then; raises
        `ConfigError` for what can never work.
        """
        ...

    async def run(self) -> None:
        """Follow until cancelled. Fails for nothing that may pass."""
        ...

    def is_absent(self) -> bool:
        """Whether there is known to be no such pool."""
        ...

    def problem(self) -> str | None:
        """Why what is known may be old, in a sentence for people; None: it is current."""
        ...
