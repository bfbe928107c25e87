"""What a plugin that learns from decisions exchanges with the same plugin of other replicas.

It gets a function to call with what it learns (`None`: there is no other replica), and is called
with what it would have learned by itself, had the other replica's decisions been its own. The same
plugin is the one of the same name. What comes from elsewhere is never passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from picker.framework.attributes import EndpointLoad

# A prompt's block hashes, first block first, were sent to an endpoint with room for so many blocks:
# (endpoint key, hashes, capacity).
ReportPlacement: TypeAlias = Callable[[str, npt.NDArray[np.uint64], int], None]
# A session was sent to an endpoint, the n-th that it has: (session, endpoint key, n).
ReportBinding: TypeAlias = Callable[[str, str, int], None]


@runtime_checkable
class SharesPlacements(Protocol):
    """Remembers which prompts were sent where, by hashes that depend on a seed."""

    @property
    def hash_seed(self) -> int:
        """The seed of its hashes now."""

    def use_hash_seed(self, seed: int) -> None:
        """Hash by another seed, and forget what was hashed by the one before. Has no effect on a
        plugin whose parameters name a seed.
        """

    def report_placements(self, report: ReportPlacement | None) -> None:
        """Call `report` with every placement from now on."""

    def placed_elsewhere(self, key: str, hashes: npt.NDArray[np.uint64], capacity: int) -> None:
        """Another replica sent a prompt to endpoint `key`, which is in the pool."""


class SessionMemory(Protocol):
    """Which endpoint each session is bound to."""

    def report_bindings(self, report: ReportBinding | None) -> None:
        """Call `report` with every session that is bound here from now on."""

    def bound_elsewhere(
        self, session: str, endpoint: str, moves: int, age_seconds: float, now_seconds: float
    ) -> None:
        """Another replica has sent the session there, `age_seconds` ago."""


@runtime_checkable
class SharesSessions(Protocol):
    """Remembers to which endpoint each session belongs."""

    @property
    def session_bindings(self) -> SessionMemory | None:
        """What it remembers; None: it needs no memory."""


@runtime_checkable
class SharesLoads(Protocol):
    """Counts what is under way at endpoints."""

    @property
    def own_loads(self) -> Mapping[str, EndpointLoad] | None:
        """By endpoint key, what this replica has under way; None: it is not to be shared."""

    def set_loads_elsewhere(self, loads: Mapping[str, EndpointLoad]) -> None:
        """What the other replicas have under way now, all of them together."""
