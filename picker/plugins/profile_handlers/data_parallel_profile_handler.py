"""data-parallel-profile-handler: reach a pod's data-parallel rank by way of the pod's sidecar.

    destination = picked ip : primaryPort,   x-data-parallel-host-port = picked ip:port

Runs the only profile. The sidecar listens at `primaryPort` (8000) of each pod and hands the request
over to the rank that the header names; one that another pod's sidecar gets is refused there, so
only the best endpoint is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Port, configured
from picker.plugins._shared.stages import Results, only_result, through_primary_port
from picker.types import InferenceRequest, SchedulingResult


class DataParallelProfileHandlerParameters(Parameters, frozen=True):
    primary_port: Port = 8000


class DataParallelProfileHandler:
    """Runs one profile once. Stateless."""

    max_profiles: int | None = 1

    def __init__(self, parameters: DataParallelProfileHandlerParameters) -> None:
        self._port = parameters.primary_port

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        return () if results else profiles[:1]

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The sidecar of the picked rank. Raises `RefusedError` 429 when none was picked."""
        decided = only_result(results)
        # Another pod's sidecar would refuse the header, so only the best endpoint is named.
        return through_primary_port(decided, self._port)


PLUGIN = PluginType(
    "data-parallel-profile-handler",
    DataParallelProfileHandlerParameters,
    configured(DataParallelProfileHandler),
)
