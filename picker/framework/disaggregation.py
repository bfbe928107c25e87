"""The vocabulary of requests whose encode, prefill and decode stages run on different endpoints:
labels of endpoints, headers of requests, and the decision of a profile handler.

The decode endpoint receives the request; its sidecar calls the others, which the headers name.
"""

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
    """The stages of a request that have their own endpoints, as the decision metrics spell them."""

    DECODE_ONLY = "decode-only"
    PREFILL_DECODE = "prefill-decode"
    ENCODE_DECODE = "encode-decode"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


# The decision of the profile handler, for metrics; written when the request leaves.
DISAGGREGATION_DECISION_KEY: DataKey[DisaggregationDecision] = DataKey(
    "DisaggregationDecision", "disagg-profile-handler"
)

# The reasons for skipping stages, by the names of their profiles; for `explain`.
SKIPPED_STAGES = "SkippedStages"
SKIPPED_STAGES_KEY: DataKey[Mapping[str, str]] = DataKey(SKIPPED_STAGES, "disagg-profile-handler")
