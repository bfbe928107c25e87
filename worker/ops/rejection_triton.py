"""The functions over the vocabulary of verification by rejection, as Triton kernels.

Importing this module imports Triton. The kernels compute in float64 like the torch twin,
`rejection_torch`, but sum in another order: a row of the vocabulary is read in tiles.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.drafted import AcceptedPrefixes, DraftBatch

_TILE = 1024


@triton.jit
def _log_normalizer_kernel(
    scores: tl.tensor,
    normalizers: tl.tensor,
    vocab_size: tl.tensor,
    stride_sequence: tl.tensor,
    stride_row: tl.tensor,
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    start = scores + sequence * stride_sequence + row * stride_row
    peak = tl.full((), float("-inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float64)
        highest = tl.maximum(peak, tl.max(values, axis=0))
        # If all scores are -inf, subtract nothing: the difference would be nan.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(values - shift), axis=0)
        peak = highest
    tl.store(normalizers + sequence * tl.num_programs(1) + row, peak + tl.log(total))


@triton.jit
def _residual(values: tl.tensor, proposed: tl.tensor, shift: tl.tensor) -> Any:
    """Return max(w p - q, 0) of a tile; a q that is not a number counts as zero."""
    usable = (proposed == proposed) & (proposed < float("inf"))
    rest = tl.exp(values.to(tl.float64) + shift) - tl.where(usable, proposed, 0.0).to(tl.float64)
    return tl.maximum(rest, 0.0)


@triton.jit
def _excess_kernel(
    scores: tl.tensor,
    proposals: tl.tensor,
    shifts: tl.tensor,
    masses: tl.tensor,
    vocab_size: tl.tensor,
    num_drafts: tl.tensor,
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    place = sequence * num_drafts + row
    shift = tl.load(shifts + place)
    own = scores + (place + sequence) * vocab_size
    others = proposals + place * vocab_size
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        inside = ids < vocab_size
        values = tl.load(own + ids, mask=inside, other=float("-inf"))
        proposed = tl.load(others + ids, mask=inside, other=0.0)
        total += tl.sum(_residual(values, proposed, shift), axis=0)
    tl.store(masses + place, total)


@triton.jit
def _best_kernel(  # noqa: PLR0913, PLR0917
    scores: tl.tensor,
    proposals: tl.tensor,
    noise: tl.tensor,
    shifts: tl.tensor,
    accepted: tl.tensor,
    totals: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    vocab_size: tl.tensor,
    num_drafts: tl.tensor,
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    count = tl.load(accepted + sequence)
    own = scores + (sequence * (num_drafts + 1) + count) * vocab_size
    values = tl.load(own + ids, mask=inside, other=float("-inf"))
    added = tl.load(noise + sequence * vocab_size + ids, mask=inside, other=0.0)
    # In float32, as in the sampler.
    whole = (values + added).to(tl.float64)
    chosen = whole
    if count < tl.load(totals + sequence):
        others = proposals + (sequence * num_drafts + count) * vocab_size
        proposed = tl.load(others + ids, mask=inside, other=0.0)
        rest = _residual(values, proposed, tl.load(shifts + sequence))
        logs = tl.where(rest > 0, tl.log(tl.where(rest > 0, rest, 1.0)), float("-inf"))
        chosen = logs + added.to(tl.float64)
        whole = values.to(tl.float64) + added.to(tl.float64)
    place = sequence * tl.num_programs(1) + tile
    plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(best + place, tl.max(chosen, axis=0))
    tl.store(best_ids + place, tile * TILE + tl.argmax(chosen, axis=0))
    tl.store(best + plane + place, tl.max(whole, axis=0))
    tl.store(best_ids + plane + place, tile * TILE + tl.argmax(whole, axis=0))


def log_normalizers(scores: Tensor) -> Tensor:
    size, rows, vocab_size = scores.shape
    if scores.stride(2) != 1:
        scores = scores.contiguous()
    normalizers = scores.new_empty(size, rows, dtype=torch.float64)
    if size and rows:
        _log_normalizer_kernel[(size, rows)](
            scores,
            normalizers,
            vocab_size,
            scores.stride(0),
            scores.stride(1),
            TILE=_tile(vocab_size),
        )
    return normalizers


def excess(batch: DraftBatch, normalizers: Tensor, log_weights: Tensor) -> Tensor:
    size, num_drafts, vocab_size = batch.proposals.shape
    masses = torch.zeros_like(normalizers)
    if size and num_drafts:
        _excess_kernel[(size, num_drafts)](
            batch.scores.contiguous(),
            batch.proposals.contiguous(),
            (log_weights - normalizers).contiguous(),
            masses,
            vocab_size,
            num_drafts,
            TILE=_tile(vocab_size),
        )
    return masses


def last_tokens(batch: DraftBatch, acceptance: AcceptedPrefixes, noise: Tensor) -> Tensor:
    size, num_drafts, vocab_size = batch.proposals.shape
    accepted = acceptance.num_accepted
    rows = batch.scores[torch.arange(size, device=accepted.device), accepted]
    shifts = acceptance.log_weights - log_normalizers(rows[:, None])[:, 0]
    tile = _tile(vocab_size)
    tiles = triton.cdiv(vocab_size, tile)
    best = noise.new_empty(2, size, tiles, dtype=torch.float64)
    best_ids = accepted.new_empty(2, size, tiles)
    _best_kernel[(size, tiles)](
        batch.scores.contiguous(),
        batch.proposals.contiguous(),
        noise.contiguous(),
        shifts,
        accepted,
        batch.num_drafts,
        best,
        best_ids,
        vocab_size,
        num_drafts,
        TILE=tile,
    )
    largest = best.max(dim=-1, keepdim=True)
    ids = best_ids.gather(-1, largest.indices)[..., 0]
    # If rounding leaves the residual empty, p replaces it.
    return torch.where(largest.values[0, :, 0] > -torch.inf, ids[0], ids[1])


def _tile(vocab_size: int) -> int:
    return int(min(_TILE, triton.next_power_of_2(vocab_size)))
