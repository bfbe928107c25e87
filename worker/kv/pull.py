"""The handle of a transfer of KV, from another engine or from a disk."""

from typing import Protocol

from worker.types import KvPart


class Pull(Protocol):
    @property
    def done(self) -> bool: ...

    @property
    def part(self) -> KvPart | None:
        """The KV that has arrived, once the transfer is done; None: it failed."""

    def close(self) -> None: ...
