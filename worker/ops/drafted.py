"""What verification by rejection takes and gives, as tensors: see `rejection`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts of B sequences, padded to K, and what target and drafter say of them.

    drafts [B, K] int64, of which the first num_drafts[b] (0 to K) count. scores [B, K + 1, V]
    float32: row i of a sequence is the target's, as `sample.scores` gives it, after its first i
    drafts. proposals [B, K, V] float32: row i is the q from which draft i was drawn. What pads
    drafts must be ids; what pads the others may be any finite number. All on one device.
    """

    drafts: Tensor
    scores: Tensor
    proposals: Tensor
    num_drafts: Tensor


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a uniform number must be below to accept: [B, K] float64, column i for the first i + 1
    drafts. `log_weights` [B, K + 1]: log wᵢ after i drafts, 0 everywhere in "standard".
    """

    values: Tensor
    log_weights: Tensor


@dataclass(frozen=True, slots=True)
class AcceptedPrefixes:
    """How many drafts of each sequence were accepted, [B] int64, and the log weight [B] float64
    with which the target counts in the residual after them.
    """

    num_accepted: Tensor
    log_weights: Tensor
