"""data-parallel-profile-handler: reach a pod's data-parallel rank by way of the pod's sidecar.

    destination = picked ip : primaryPort,   x-data-parallel-host-port = picked ip:port

Runs the only profile. The sidecar listens at `primaryPort` (8000) of each pod and hands the request
over to the rank that the header names; one that another pod's sidecar gets is refused there, so
only the best endpoint is named.
"""

from __future__ import annotations

from picker.framework.registry import Parameters, PluginType, Port, configured
from picker.plugins._shared.stages import Results, through_primary_port
from picker.plugins.profile_handlers.single_profile_handler import SingleProfileHandler
from picker.types import InferenceRequest, SchedulingResult


class DataParallelProfileHandlerParameters(Parameters, frozen=True):
    primary_port: Port = 8000


class DataParallelProfileHandler(SingleProfileHandler):
    """Runs one profile once. Stateless."""

    def __init__(self, parameters: DataParallelProfileHandlerParameters) -> None:
        self._port = parameters.primary_port

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        """The sidecar of the picked rank. Raises `RefusedError` 429 when none was picked."""
        decided = super().process_results(request, results)
        # Another pod's sidecar would refuse the header, so only the best endpoint is named.
        return through_primary_port(decided, self._port)


PLUGIN = PluginType(
    "data-parallel-profile-handler",
    DataParallelProfileHandlerParameters,
    configured(DataParallelProfileHandler),
)
