"""Inputs and results of verification by rejection, as tensors: see `rejection`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts of B sequences, padded to K, with the distributions of target and drafter.

    drafts [B, K] int64, of which the first num_drafts[b] (0 to K) count. scores [B, K + 1, V]
    float32: row i of a sequence is the target's, as `sample.scores` returns it, after its first i
    drafts. proposals [B, K, V] float32: row i is the q from which draft i was drawn. The padding of
    drafts must be valid ids; other padding may be any finite number. All on one device.
    """

    drafts: Tensor
    scores: Tensor
    proposals: Tensor
    num_drafts: Tensor


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A draft is accepted if its uniform number is below its threshold: [B, K] float64, column i
    for the first i + 1 drafts. `log_weights` [B, K + 1]: log wᵢ after i drafts, 0 everywhere in
    "standard".
    """

    values: Tensor
    log_weights: Tensor


@dataclass(frozen=True, slots=True)
class AcceptedPrefixes:
    """The number of accepted drafts of each sequence, [B] int64, and the log weight [B] float64 of
    the target in the residual after them.
    """

    num_accepted: Tensor
    log_weights: Tensor
