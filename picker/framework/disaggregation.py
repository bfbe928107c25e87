"""What plugins share about requests whose encode, prefill and decode stages run on different
endpoints: roles of endpoints, names of profiles, and the headers that tell the stages' endpoints.

The decode endpoint gets the request; its sidecar asks the others, which it finds in the headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from picker.framework.attributes import DataKey
from picker.types import Candidate, ProfileResult

ROLE_LABEL = "llm-d.ai/role"
DECODE_ROLES = frozenset(("decode", "prefill-decode", "both", "encode-prefill-decode"))
PREFILL_ROLES = frozenset(
    ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
)
ENCODE_ROLES = frozenset(("encode", "encode-prefill", "encode-prefill-decode"))

DECODE_PROFILE = "decode"
PREFILL_PROFILE = "prefill"
ENCODE_PROFILE = "encode"

PREFILLER_HEADER = "x-prefiller-host-port"
ENCODERS_HEADER = "x-encoder-hosts-ports"
DATA_PARALLEL_HEADER = "x-data-parallel-host-port"

Results = Mapping[str, ProfileResult | None]


class DisaggregationDecision(Enum):
    """Which stages of a request got an endpoint of their own; the word of the decision metrics."""

    DECODE_ONLY = "decode-only"
    PREFILL_DECODE = "prefill-decode"
    ENCODE_DECODE = "encode-decode"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


# What the profile handler decided, for whoever counts decisions; written when the request leaves.
DISAGGREGATION_DECISION_KEY: DataKey[DisaggregationDecision] = DataKey(
    "DisaggregationDecision", "disagg-profile-handler"
)


def first_picked(results: Results, profile: str) -> Candidate | None:
    """The best endpoint that `profile` picked; None when it did not run or found nothing."""
    result = results.get(profile)
    return result.picked[0].candidate if result is not None and result.picked else None


def decision(results: Results, prefill: str, encode: str) -> DisaggregationDecision:
    """Which stages found an endpoint, given the names of their profiles."""
    words = [
        word
        for word, profile in (("encode", encode), ("prefill", prefill))
        if first_picked(results, profile) is not None
    ]
    return DisaggregationDecision("-".join((*words, "decode")) if words else "decode-only")


def stage_headers(results: Results, prefill: str, encode: str) -> dict[str, str]:
    """The request's headers: the first prefill endpoint, and all encode endpoints.

    A stage that found nothing has none; whatever a client sent by these names never leaves.
    """
    headers: dict[str, str] = {}
    prefiller = first_picked(results, prefill)
    if prefiller is not None:
        headers[PREFILLER_HEADER] = prefiller.endpoint.host_port
    encoders = results.get(encode)
    if encoders is not None and encoders.picked:
        headers[ENCODERS_HEADER] = ",".join(
            scored.candidate.endpoint.host_port for scored in encoders.picked
        )
    return headers
