"""Names of the headers and metadata keys that the picker owns (Endpoint Picker Protocol v1.0.0)."""

from collections.abc import Mapping

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
DESTINATION_SCORES = "x-gateway-destination-endpoint-scores"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
# The id under which Envoy reports on a response, in the namespace of destinations, and the report.
REPORT_ID = "x-pointsman-report"
REPORT_NAMESPACE = "pointsman"
REPORT = "report"
REQUEST_ID = "x-request-id"
DROP_REASON = "x-llm-d-request-dropped-reason"

FAIRNESS_ID = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
MODEL_REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
SLO_TTFT_MS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
VIDEO_HINTS = ("x-llm-d-video-fps", "x-llm-d-video-duration-seconds", "x-llm-d-video-resolution")
# They direct an endpoint to fetch a part of its work from an address: only a picker may set them.
DISAGGREGATION = (
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)

DEFAULT_PATH = "/v1/completions"

# Names of the system in both directions: an endpoint must not send them to a client.
SYSTEM_OWNED: tuple[str, ...] = (
    DESTINATION,
    DESTINATION_SUBSET,
    DESTINATION_SERVED,
    DESTINATION_SCORES,
    *FAIRNESS_ID,
    *OBJECTIVE,
    *MODEL_REWRITE,
    *SLO_TTFT_MS,
    *SLO_TPOT_MS,
    *VIDEO_HINTS,
    DROP_REASON,
)

# A client must not reach an endpoint with any of these: they steer the fleet, not the model.
PICKER_OWNED: tuple[str, ...] = (*SYSTEM_OWNED, *DISAGGREGATION)


def first_of(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the value of the first of `names` that is present and not empty, else ""."""
    for name in names:
        if value := headers.get(name):
            return value
    return ""


def target_of(headers: Mapping[str, str]) -> str:
    """Return a request's path with its query, or the one that a rewriting proxy sends along."""
    path = headers.get(":path") or headers.get("x-original-path")
    return path or headers.get("x-forwarded-path") or DEFAULT_PATH
