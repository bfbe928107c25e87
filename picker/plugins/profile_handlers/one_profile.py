"""Profile handlers that run one profile for each request.

single-profile-handler: run the only profile; its result is primary.

data-parallel-profile-handler: reach a pod's data-parallel rank through its sidecar.

    destination = picked ip : primaryPort,   x-data-parallel-host-port = picked ip:port

The sidecar listens at `primaryPort` of each pod and forwards the request to the rank that the
header names.

header-profile-handler: a request header names the profile to run.

    profile = the only one, when there is one
              headers[headerName] without blanks around it, else defaultProfile

The request is refused (429) when that is not a profile. The handler is meant for several pickers in
a row, each of which decides one stage of a disaggregated request.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Port, Stability
from picker.plugins._shared.stages import DECODE_PROFILE, Results, only_result, through_primary_port
from picker.types import InferenceRequest, SchedulingResult


class SingleProfileHandler:
    max_profiles: int | None = 1

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        return () if results else profiles[:1]

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        return only_result(results)


class DataParallelProfileHandlerParameters(Parameters, frozen=True):
    primary_port: Port = 8000


class DataParallelProfileHandler(SingleProfileHandler):
    def __init__(self, parameters: DataParallelProfileHandlerParameters) -> None:
        self._port = parameters.primary_port

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        decided = super().process_results(request, results)
        # Only the best endpoint is named: another pod's sidecar would refuse the header.
        return through_primary_port(decided, self._port)


DEFAULT_HEADER = "EPP-Profile"


class HeaderProfileHandlerParameters(Parameters, frozen=True):
    header_name: str = DEFAULT_HEADER
    default_profile: str = DECODE_PROFILE


class HeaderProfileHandler:
    max_profiles: int | None = None
    required_profiles: Mapping[str, str] = MappingProxyType({})  # a request may name any

    def __init__(self, parameters: HeaderProfileHandlerParameters) -> None:
        self._header = (parameters.header_name.strip() or DEFAULT_HEADER).lower()
        self._default = parameters.default_profile.strip() or DECODE_PROFILE
        is_chosen = self._default != DECODE_PROFILE
        self.optional_profiles = {"defaultProfile": self._default} if is_chosen else {}

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Results,
        attributes: Attributes,
    ) -> Sequence[str]:
        if results:
            return ()
        if len(profiles) == 1:
            return profiles
        name = request.headers.get(self._header, "").strip() or self._default
        return (name,) if name in profiles else ()

    def process_results(self, request: InferenceRequest, results: Results) -> SchedulingResult:
        return only_result(results)


PLUGINS = (
    PluginType("single-profile-handler", SingleProfileHandler),
    PluginType("data-parallel-profile-handler", DataParallelProfileHandler),
    PluginType("header-profile-handler", HeaderProfileHandler, Stability.ALPHA),
)
