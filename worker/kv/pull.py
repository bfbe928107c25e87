"""The handle of a transfer of KV, from another engine or from a disk."""

from typing import Protocol

from worker.types import KvPart


class Pull(Protocol):
    """KV on its way from another engine or a disk."""

    @property
    def done(self) -> bool:
        """True if it has arrived, or is known not to."""
        ...

    @property
    def part(self) -> KvPart | None:
        """The KV that has arrived, once it is done; None: the transfer failed."""
        ...

    def close(self) -> None:
        """End it, and give up what has arrived. Idempotent."""
        ...
