"""Verification of drafted tokens that leaves the target's distribution exactly unchanged.

p(· | x₁…xᵢ) is the target's distribution of the next token, with all of a request's parameters
applied; the drafter has guessed x₁…x_d. docs/decisions/0017 has the proofs of both ways to verify
them.

*Coupled* (`verify_coupled`), for any drafter: the target draws at each position exactly as it draws
without drafts; drafts are accepted while they equal the drawn tokens, so the output equals plain
decoding token for token.

*By rejection*, for drafts that were drawn from known distributions q(· | x₁…xᵢ). Each draft has a
threshold h; its uniform number passes if it is below h, and the numbers that pass accept a prefix.

- "standard" (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318): hᵢ = min(1,
  p(xᵢ)/q(xᵢ)); the drafts before the first that does not pass are accepted. The token after them
  is recovered, from the residual max(p - q, 0), normalised.
- "block" (Sun et al., arXiv:2403.10444): with w₀ = 1 and wᵢ = min(1, wᵢ₋₁ p(xᵢ)/q(xᵢ)), a prefix
  of i drafts passes if its number is below hᵢ = mᵢ/(mᵢ + 1 - wᵢ), mᵢ = Σ max(wᵢ p - q, 0) over the
  next tokens; all d of them if it is below w_d. The longest prefix that passes is accepted, and
  the token after it is recovered from max(w p - q, 0), normalised. It accepts at least as many.

When all are accepted, the target's next row gives a bonus token, by the sampler's own noise. A
random number that took part in the outcome of an earlier step must not be used again: the uniforms
of a run belong to the position where the run starts, the noise of drafts to the position and the
index in the run, and a recovered token has separate noise.

Sums over the vocabulary, and the choice of the last token, are in `rejection_torch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.ops.drafted import AcceptedPrefixes, DraftBatch, Thresholds
from worker.ops.noise import Purpose, gumbel_noise, uniforms
from worker.ops.rejection_torch import excess, last_tokens, log_normalizers
from worker.ops.sample import DrawState

STANDARD, BLOCK = "standard", "block"
METHODS = (STANDARD, BLOCK)


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """The first `num_accepted` drafts and one more token, a recovered or a bonus one."""

    token_ids: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


class CoupledRuns(NamedTuple):
    """The accepted runs of n sequences. A run ends with draw number `ends` [n]; if the state of
    that draw, in `states` [n], is not `DRAWN`, it ends one draw earlier. `lasts` [n] are the draws
    at `ends`. All int32.
    """

    ends: Tensor
    states: Tensor
    lasts: Tensor


def verify_coupled(
    tokens: Tensor, states: Tensor, drafts: Tensor, num_drafts: Tensor
) -> CoupledRuns:
    """Find the accepted drafts of n sequences, on their device. Twin: `reference_ops.coupled_run`.

    The last 1 + `num_drafts[i]` of row i of tokens and `DrawState`s [n, W] int32 are the draws of
    plain sampling after 0, 1, … of its drafts; the drafts are the last entries of drafts [n, W -
    1]. A run ends at the first draft that differs from its draw, or at the first failed draw.
    """
    width = tokens.shape[1]
    first = width - 1 - num_drafts
    places = torch.arange(width - 1, dtype=torch.int32, device=tokens.device)
    stands = (tokens[:, :-1] == drafts) & (states[:, :-1] == DrawState.DRAWN)
    stands |= places < first[:, None]
    ends = stands.int().cumprod(1, dtype=torch.int32).sum(1, keepdim=True)
    state, last = states.gather(1, ends), tokens.gather(1, ends)
    return CoupledRuns(ends[:, 0].int(), state[:, 0], last[:, 0])


def verify_batch(
    batch: DraftBatch, seeds: Sequence[int], positions: Sequence[int], method: str
) -> list[DraftVerdict]:
    """Verify many sequences, each with the result of the sequence alone, bit for bit (on a CPU)."""
    size = batch.drafts.shape[1]
    draws = np.stack(
        [uniforms(s, p, Purpose.ACCEPT, size) for s, p in zip(seeds, positions, strict=True)]
    )
    acceptance = accept(batch, torch.from_numpy(draws), method)
    accepted: list[int] = acceptance.num_accepted.tolist()
    vocab_size = batch.scores.shape[-1]
    noise = [
        gumbel_noise(
            seed,
            position + count,
            vocab_size,
            Purpose.RESIDUAL if count < total else Purpose.SAMPLE,
        )
        for seed, position, count, total in zip(
            seeds, positions, accepted, batch.num_drafts.tolist(), strict=True
        )
    ]
    stacked = torch.stack(noise).to(batch.scores.device)
    lasts = last_tokens(batch, acceptance, stacked).tolist()
    drafts = batch.drafts.tolist()
    return [
        DraftVerdict((*own[:count], last))
        for own, count, last in zip(drafts, accepted, lasts, strict=True)
    ]


def certain(drafts: Tensor, vocab_size: int) -> Tensor:
    """Return the proposals [..., V] of a drafter that is certain of its drafts [...] int64."""
    proposals = torch.zeros(*drafts.shape, vocab_size, device=drafts.device)
    return proposals.scatter_(-1, drafts.unsqueeze(-1), 1.0)


def accept(batch: DraftBatch, draws: Tensor, method: str) -> AcceptedPrefixes:
    """Count each sequence's accepted drafts, given uniform draws [B, K] float64 in [0, 1)."""
    limits = thresholds(batch, method)
    counts = torch.arange(1, draws.shape[1] + 1, device=batch.drafts.device)
    passed = (draws.to(counts.device) < limits.values) & (counts <= batch.num_drafts[:, None])
    if method == STANDARD:
        num_accepted = passed.cumprod(dim=1).sum(dim=1)
    else:
        num_accepted = torch.cat((counts.new_zeros(len(passed), 1), counts * passed), 1).amax(dim=1)
    log_weights = limits.log_weights.gather(1, num_accepted[:, None])[:, 0]
    return AcceptedPrefixes(num_accepted, log_weights)


def thresholds(batch: DraftBatch, method: str) -> Thresholds:
    """Compute the thresholds of the uniform numbers. Columns without a draft are undefined."""
    if method not in METHODS:
        raise ValueError(f"unknown method to verify drafts: {method!r}")
    normalizers = log_normalizers(batch.scores[:, :-1])
    picked = batch.drafts[..., None]
    targets = batch.scores[:, :-1].gather(-1, picked)[..., 0].double() - normalizers
    proposed = batch.proposals.gather(-1, picked)[..., 0].double()
    # A draft without probability in q was not drawn from q, and a q that is not a number has no
    # draws: such a draft is always rejected, so the target alone decides the token.
    ratios = torch.where(proposed > 0, targets - proposed.log(), -torch.inf)
    start = ratios.new_zeros(len(ratios), 1)
    if method == STANDARD:
        return Thresholds(ratios.exp().clamp_(max=1.0), start.expand(-1, ratios.shape[1] + 1))
    weights = [start[:, 0]]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] + ratio).clamp(max=0.0))
    log_weights = torch.stack(weights, 1)
    return Thresholds(_block_thresholds(batch, normalizers, log_weights), log_weights)


def _block_thresholds(batch: DraftBatch, normalizers: Tensor, log_weights: Tensor) -> Tensor:
    masses = excess(batch, normalizers, log_weights[:, :-1])
    # Column i is the mass at the position after i drafts; after all of them it is zero.
    after = torch.cat((masses[:, 1:], masses.new_zeros(len(masses), 1)), 1)
    own = log_weights[:, 1:]
    missing = -own.expm1()
    # Without missing mass and without excess, the next draft always passes.
    inside = torch.where(missing + after > 0, after / (after + missing), 1.0)
    counts = torch.arange(1, own.shape[1] + 1, device=own.device)
    return torch.where(counts == batch.num_drafts[:, None], own.exp(), inside)
