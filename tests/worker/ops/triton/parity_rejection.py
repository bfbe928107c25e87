"""The Triton kernels of verification against their torch twins; see `test_kernels`."""

import pytest
import torch

from worker.ops import rejection, rejection_torch, rejection_triton
from worker.ops.drafted import AcceptedPrefixes, DraftBatch
from worker.ops.rejection import METHODS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Below, at and above a tile, odd and even.
VOCABULARIES = [1, 5, 1024, 2101]


def drafted(vocab_size: int, seed: int, size: int = 5, num_drafts: int = 3) -> DraftBatch:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, num_drafts + 1, vocab_size, generator=generator) * 3
    cut = torch.rand(scores.shape, generator=generator) < 0.4
    cut[..., vocab_size // 2] = False
    cut[0] = False
    scores.masked_fill_(cut, -torch.inf)
    proposals = (
        torch.randn(size, num_drafts, vocab_size, generator=generator) + scores[:, :-1].clamp(-9)
    ).softmax(-1)
    proposals[1, :2] = scores[1, :2].softmax(-1)
    drafts = torch.multinomial(proposals.flatten(0, 1), 1, generator=generator)
    drafts = drafts.view(size, num_drafts)
    proposals[2, 1, drafts[2, 1]] = 0.0
    scores[3, 0] = -torch.inf
    scores[3, 0, drafts[3, 0]] = 1.5
    if size > 4:
        proposals[4, 1] = torch.nan
    counts = torch.tensor([num_drafts, num_drafts, 2, num_drafts, 1][:size])
    return DraftBatch(drafts, scores, proposals, counts)


def on_device(batch: DraftBatch) -> DraftBatch:
    return DraftBatch(
        batch.drafts.to(DEVICE),
        batch.scores.to(DEVICE),
        batch.proposals.to(DEVICE),
        batch.num_drafts.to(DEVICE),
    )


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_normalizers_are_the_twins(vocab_size: int) -> None:
    scores = drafted(vocab_size, 1).scores
    expected = rejection_torch.log_normalizers(scores)
    found = rejection_triton.log_normalizers(scores.to(DEVICE))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
    part = rejection_triton.log_normalizers(scores.to(DEVICE)[1:, ::2])
    torch.testing.assert_close(part.cpu(), expected[1:, ::2], rtol=1e-12, atol=1e-12)


def test_a_row_may_start_with_a_tile_of_nothing() -> None:
    scores = torch.full((1, 2, 3000), -torch.inf)
    scores[0, 0, 2600], scores[0, 1, 1] = 2.5, -1.5
    found = rejection_triton.log_normalizers(scores.to(DEVICE)).tolist()[0]
    assert found == pytest.approx([2.5, -1.5], abs=1e-12)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_masses_are_the_twins(vocab_size: int) -> None:
    batch = drafted(vocab_size, 2)
    normalizers = rejection_torch.log_normalizers(batch.scores[:, :-1])
    weights = -torch.rand(normalizers.shape, dtype=torch.float64)
    weights[0, 0], weights[1, 1] = 0.0, -torch.inf
    expected = rejection_torch.excess(batch, normalizers, weights)
    found = rejection_triton.excess(
        on_device(batch), normalizers.to(DEVICE), weights.to(DEVICE)
    ).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("method", METHODS)
def test_verification_decides_as_the_twin(vocab_size: int, method: str) -> None:
    seen: set[tuple[int, bool]] = set()
    for seed in range(3):
        batch = drafted(vocab_size, seed)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(batch.drafts.shape, generator=generator, dtype=torch.float64)
        noise = -(-torch.rand(5, vocab_size, generator=generator).clamp(1e-6).log()).log()
        expected = rejection.thresholds(batch, method)
        decided = rejection.accept(batch, draws, method)
        tokens = rejection_torch.last_tokens(batch, decided, noise)
        there = on_device(batch)
        found = rejection.thresholds(there, method, rejection_triton)
        made = rejection.accept(there, draws, method, rejection_triton)
        lasts = rejection_triton.last_tokens(there, made, noise.to(DEVICE))
        for b, count in enumerate(batch.num_drafts.tolist()):
            # Where p and q are equal, thresholds are ratios of roundings.
            torch.testing.assert_close(
                found.values[b, :count].cpu(), expected.values[b, :count], rtol=1e-9, atol=1e-6
            )
        assert made.num_accepted.tolist() == decided.num_accepted.tolist()
        assert lasts.tolist() == tokens.tolist()
        counts = zip(made.num_accepted.tolist(), batch.num_drafts.tolist(), strict=True)
        seen |= {(count, count == total) for count, total in counts}
    assert vocab_size == 1 or {full for _, full in seen} == {True, False}


def test_equal_distributions_fall_back_to_the_target() -> None:
    """Rounding rejects and leaves nothing of the residual, so p is drawn from."""
    scores = torch.zeros(1, 2, 1500)
    scores[..., 1400:] = -torch.inf
    proposals = torch.full((1, 1, 1500), 1 / 1400 * (1 + 1e-6))
    batch = DraftBatch(torch.tensor([[3]]), scores, proposals, torch.tensor([1]))
    rejected = AcceptedPrefixes(torch.tensor([0]), torch.zeros(1, dtype=torch.float64))
    noise = torch.zeros(1, 1500)
    noise[0, 1200], noise[0, 1450] = 1.0, 9.0
    assert rejection_torch.last_tokens(batch, rejected, noise).tolist() == [1200]
    there = AcceptedPrefixes(torch.tensor([0], device=DEVICE), rejected.log_weights.to(DEVICE))
    found = rejection_triton.last_tokens(on_device(batch), there, noise.to(DEVICE))
    assert found.tolist() == [1200]


def test_a_step_without_drafts_has_a_bonus_token_alone() -> None:
    scores = torch.randn(2, 1, 1100, generator=torch.Generator().manual_seed(3))
    batch = DraftBatch(
        torch.zeros(2, 0, dtype=torch.int64),
        scores,
        torch.zeros(2, 0, 1100),
        torch.zeros(2, dtype=torch.int64),
    )
    nothing = AcceptedPrefixes(
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, dtype=torch.float64, device=DEVICE),
    )
    noise = torch.randn(2, 1100, generator=torch.Generator().manual_seed(4))
    found = rejection_triton.last_tokens(on_device(batch), nothing, noise.to(DEVICE))
    assert found.tolist() == (scores[:, 0] + noise).argmax(-1).tolist()
