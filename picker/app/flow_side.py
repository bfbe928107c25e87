"""Flow control of a process: its controller, and who tells it of everything but the requests."""

from __future__ import annotations

from collections.abc import Sequence

from picker.config.build import Assembly
from picker.flowcontrol.shell.controller import FlowController
from picker.flowcontrol.views import QueuesView
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import RequestRules
from picker.requestcontrol.candidates import candidates_for
from picker.requestcontrol.pipeline import FlowGate, Surroundings
from picker.types import Candidate


class FlowSide:
    """Owns the one controller, which outlives configurations and lets everyone in without flow
    control.
    """

    def __init__(
        self,
        around: Surroundings,
        datastore: Datastore,
        rules: RequestRules,
        metrics: PickerMetrics,
        pool_name: str,
    ) -> None:
        """Listens to endpoints, metrics and objectives from now on; lets everyone in until `use`.

        `datastore` tells of changes, `around` of what decisions look at.
        """
        self._around = around
        self._controller = FlowController(None, self._pool, around.clock, metrics, pool_name)
        datastore.watch(self._controller.pool_changed)
        rules.subscribe(lambda known: self._controller.set_priorities(known.priorities))
        self._controller.set_priorities(rules.current.priorities)

    @property
    def gate(self) -> FlowGate:
        """Where requests wait, if the configuration wants that."""
        return self._controller

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._controller.num_waiting

    def use(self, assembly: Assembly) -> None:
        """Go on by another configuration; what waits, waits on by that one."""
        self._controller.use(assembly.flow_control)

    def freed(self) -> None:
        """A request that the controller does not know of has left an endpoint."""
        self._controller.pool_changed()

    def queues(self) -> QueuesView:
        """What people are shown."""
        return self._controller.queues()

    def refuse_waiting(self) -> bool:
        """Refuse all that wait, and all that come; whether any waited."""
        waited = self._controller.num_waiting > 0
        self._controller.shut_down()
        return waited

    def _pool(self) -> Sequence[Candidate]:
        """All endpoints that requests may go to, with what this picker has under way there."""
        around = self._around
        pool = around.datastore.snapshot().candidates
        loaded = candidates_for(pool, None, around.inflight.counts, around.loaded)
        return around.health.usable(loaded, around.clock())
