"""This replica's part in the election of a leader, if there is an election."""

import asyncio
import time
from datetime import UTC, datetime
from random import Random

from picker.app.cluster import ClusterAccess
from picker.cli.options import Options
from picker.config.schema import STANDBY_GATE, EndpointPickerConfig, gate_settings
from picker.k8s.lease import Clocks, LeaseKeeper
from picker.metrics.picker_metrics import PickerMetrics


class Leadership:
    """Owns the candidacy for the Lease; without an election every replica leads."""

    def __init__(self, options: Options, metrics: PickerMetrics) -> None:
        self._keeper: LeaseKeeper | None = None
        if options.election is None or options.kubernetes is None:
            return
        flags = options.election
        self._access = ClusterAccess(options.kubernetes)
        self._keeper = LeaseKeeper(
            self._access.open,
            flags.lease,
            flags.identity,
            flags.timings,
            metrics.kubernetes.election,
            clocks=Clocks(steady_seconds, lambda: datetime.now(UTC)),
            rng=Random(),
        )

    def load(self) -> None:
        if self._keeper is not None:
            self._access.load()

    def is_leader(self) -> bool:
        return self._keeper is None or self._keeper.is_leader()

    async def may_follow(self, config: EndpointPickerConfig) -> None:
        """Return at once, or, without the gate `haPopulateNonLeaderDatastore`, as the leader."""
        if self._keeper is not None and not gate_settings(config)[STANDBY_GATE]:
            await self._keeper.led()

    def problem(self) -> str | None:
        """Explain why this replica does not lead, or may soon lose the lead; None: it leads."""
        keeper = self._keeper
        if keeper is None:
            return None
        problem = keeper.problem()
        if problem is not None or keeper.is_leader():
            return problem
        return f"on standby; the leader is {keeper.holder or 'unknown'}"

    def resign(self) -> None:
        if self._keeper is not None:
            self._keeper.resign()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Take part until `resign`; the task ends once the lease is released."""
        if self._keeper is not None:
            group.create_task(self._keeper.run(), name="leader election")


def steady_seconds() -> float:
    """Read a clock that also counts while the machine sleeps, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
