"""The vocabulary of requests whose encode, prefill and decode stages run on different endpoints:
labels of endpoints, headers of requests, and what a profile handler decided.

The decode endpoint gets the request; its sidecar asks the others, which it finds in the headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from picker.framework.attributes import DataKey

ROLE_LABEL = "llm-d.ai/role"
DECODE_ROLES = frozenset(("decode", "prefill-decode", "both", "encode-prefill-decode"))
PREFILL_ROLES = frozenset(
    ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
)
ENCODE_ROLES = frozenset(("encode", "encode-prefill", "encode-prefill-decode"))

PREFILLER_HEADER = "x-prefiller-host-port"
ENCODERS_HEADER = "x-encoder-hosts-ports"
DATA_PARALLEL_HEADER = "x-data-parallel-host-port"


class DisaggregationDecision(Enum):
    """Which stages of a request got an endpoint of their own; the word of the decision metrics."""

    DECODE_ONLY = "decode-only"
    PREFILL_DECODE = "prefill-decode"
    ENCODE_DECODE = "encode-decode"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


# What the profile handler decided, for metrics; written when the request leaves.
DISAGGREGATION_DECISION_KEY: DataKey[DisaggregationDecision] = DataKey(
    "DisaggregationDecision", "disagg-profile-handler"
)

# Why stages were left out, by the names of their profiles; shown to people.
SKIPPED_STAGES = "SkippedStages"
SKIPPED_STAGES_KEY: DataKey[Mapping[str, str]] = DataKey(SKIPPED_STAGES, "disagg-profile-handler")
