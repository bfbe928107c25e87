"""The pools of a picker together: begun, drained and shown as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from picker.admin.merged_metrics import merged
from picker.admin.server import AdminServer
from picker.admin.several_pools import SeveralPools
from picker.app.served_pool import ServedPool
from picker.metrics.picker_metrics import PickerMetrics

log = logging.getLogger(__name__)

# For pools of which nothing can be heard, not even that there are none, once something is known of
# another; then the others go on.
PATIENCE_SECONDS: Final = 10.0


class PoolGroup:
    """Knows all pools by their keys; a picker of one pool has one with an empty key.

    `metrics` are of the process. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, pools: Mapping[str, ServedPool], metrics: PickerMetrics, clock: Callable[[], float]
    ) -> None:
        self._keys, self._pools = tuple(pools), tuple(pools.values())
        self._metrics, self._clock = metrics, clock
        self._patient_until: float | None = None  # None: nothing is known of any pool yet
        self._has_begun = False  # somebody was told that requests may come
        for pool in self._pools:
            pool.datastore.watch(self._look)

    @property
    def unfinished(self) -> int:
        """How many requests are under way or wait."""
        return sum(pool.unfinished for pool in self._pools)

    @property
    def waiting(self) -> int:
        """How many requests wait to be let in."""
        return sum(pool.waiting for pool in self._pools)

    @property
    def decisions(self) -> int:
        """How many requests were decided so far."""
        return sum(pool.decisions for pool in self._pools)

    def is_known(self) -> bool:
        """Whether there are endpoints to speak of: at the start of each pool that there is, as
        long as it may be heard of soon, and then of at least one, whatever pools appear.
        """
        if not any(pool.is_known() for pool in self._pools):
            return False
        self._has_begun = self._has_begun or self._is_patience_over()
        return self._has_begun

    def load(self) -> None:
        """Find out for the first time which endpoints exist. Raises `ConfigError`."""
        for key, pool in zip(self._keys, self._pools, strict=True):
            for warning in pool.warnings:
                where = f" of pool {key}" if key else ""
                log.warning("configuration%s: %s", where, warning)
            pool.load()
            pool.peers.load()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin what goes on beside the requests, until these are cancelled."""
        return [task for pool in self._pools for task in pool.start(group)]

    def refuse_waiting(self) -> bool:
        """Let nobody in any more; whether any waited, who has to be told."""
        return sum(pool.refuse_waiting() for pool in self._pools) > 0  # by each of them

    async def close(self) -> None:
        """Hand over and write what was gathered."""
        await asyncio.gather(*(pool.close() for pool in self._pools))

    def admin(
        self, ready: Mapping[str, Callable[[], bool]], is_ready: Callable[[], bool]
    ) -> AdminServer:
        """The HTTP port of a picker of several pools; `ready` is about each of them."""
        metrics = {key: one.metrics for key, one in zip(self._keys, self._pools, strict=True)}
        faces = {
            key: (one.face, ready[key]) for key, one in zip(self._keys, self._pools, strict=True)
        }

        async def page() -> bytes:
            return await merged(self._metrics, metrics)

        several = SeveralPools(faces, page, is_ready, self._problem)
        return several.server(self._metrics.admin_failures_total)

    def _look(self) -> None:
        """A replica that may know nothing until it leads has to wait for the others then."""
        if self._patient_until is None and any(pool.is_known() for pool in self._pools):
            self._patient_until = self._clock() + PATIENCE_SECONDS

    def _is_patience_over(self) -> bool:
        if all(pool.is_known() or pool.is_absent() for pool in self._pools):
            return True
        return self._patient_until is not None and self._clock() >= self._patient_until

    def _problem(self) -> str | None:
        told = []
        for key, pool in zip(self._keys, self._pools, strict=True):
            problem = pool.problem()
            if problem is not None:
                told.append(f"{key}: {problem}")
        return "; ".join(told) or None
