"""The functions over the vocabulary of verification by rejection, in torch.

They compute in float64, and a row's results do not depend on its neighbours: sums run in the order
of the ids, or inside one row's log-softmax.
"""

import torch
from torch import Tensor

from worker.ops.drafted import AcceptedPrefixes, DraftBatch


def log_normalizers(scores: Tensor) -> Tensor:
    # One position at a time: float64 takes twice the memory of the scores.
    columns = [_log_normalizers(row) for row in scores.unbind(1)]
    return torch.stack(columns, 1) if columns else scores.new_zeros(len(scores), 0).double()


def _log_normalizers(scores: Tensor) -> Tensor:
    wide = scores.double()
    # The log-softmax of the largest score is that score minus the normalizer.
    return wide.amax(dim=-1) - wide.log_softmax(dim=-1).amax(dim=-1)


def excess(batch: DraftBatch, normalizers: Tensor, log_weights: Tensor) -> Tensor:
    masses = torch.zeros_like(normalizers)
    for index in range(masses.shape[1]):
        shift = log_weights[:, index] - normalizers[:, index]
        rest = residuals(batch.scores[:, index], batch.proposals[:, index], shift)
        # cumsum adds in the order of ids in any batch; sum does not.
        masses[:, index] = rest.cumsum(dim=-1)[:, -1]
    return masses


def residuals(scores: Tensor, proposals: Tensor, shifts: Tensor) -> Tensor:
    """Return max(w p - q, 0) [B, V] float64, where log(w p) is scores [B, V] + shifts [B]. A q that
    is not a number counts as zero.
    """
    weighted = (scores.double() + shifts[:, None]).exp()
    return (weighted - proposals.double().nan_to_num(nan=0.0, posinf=0.0)).clamp_(min=0.0)


def last_tokens(batch: DraftBatch, acceptance: AcceptedPrefixes, noise: Tensor) -> Tensor:
    accepted = acceptance.num_accepted
    everyone = torch.arange(len(accepted), device=accepted.device)
    rows = batch.scores[everyone, accepted]
    # In float32, as in the sampler.
    chosen = (rows + noise).argmax(dim=-1)
    [rejected] = (accepted < batch.num_drafts).nonzero(as_tuple=True)
    if len(rejected):
        own = rows[rejected]
        proposals = batch.proposals[rejected, accepted[rejected]]
        shifts = acceptance.log_weights[rejected] - _log_normalizers(own)
        rest = residuals(own, proposals, shifts)
        nothing = rest.amax(dim=-1, keepdim=True) == 0
        logs = torch.where(nothing, own.double(), rest.log())
        chosen[rejected] = (logs + noise[rejected]).argmax(dim=-1)
    return chosen
