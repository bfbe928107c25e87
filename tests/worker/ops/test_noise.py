"""Random numbers: pure functions of seed, position and purpose, of the right distributions."""

import math

import numpy as np
import pytest
import torch

from worker.ops.noise import Purpose, gumbel_noise, uniforms


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1])
def test_noise_is_a_pure_function_of_seed_and_position(seed: int) -> None:
    noise = gumbel_noise(seed, 5, 1001)
    assert torch.equal(noise, gumbel_noise(seed, 5, 1001))
    assert not torch.equal(noise, gumbel_noise(seed, 6, 1001))
    assert torch.equal(noise, gumbel_noise(seed, 5, 2001)[:1001])
    assert bool(noise.isfinite().all())


def test_sampling_noise_is_philox_as_it_always_was() -> None:
    """Seeded answers so far depend on a counter that starts at position · 2^128."""
    words = np.random.Philox(key=42, counter=9 << 128).random_raw(50).view(np.uint32)
    u = torch.from_numpy((words.astype(np.float64) + 0.5) * 2.0**-32)
    expected = -(-(-u).log1p()).log()
    assert torch.allclose(gumbel_noise(42, 9, 100).double(), expected, rtol=1e-4, atol=1e-6)


def test_noise_at_some_ids_is_the_noise_of_those_ids() -> None:
    ids = torch.tensor([0, 3, 4, 77, 998])
    assert torch.equal(gumbel_noise(5, 6, 1001, ids=ids), gumbel_noise(5, 6, 1001)[ids])


def test_purposes_have_streams_of_their_own() -> None:
    rows = torch.stack([gumbel_noise(1, 2, 4000, purpose) for purpose in Purpose]).double()
    correlations = torch.corrcoef(rows) - torch.eye(len(Purpose))
    assert float(correlations.abs().max()) < 0.08


def test_offsets_have_streams_of_their_own() -> None:
    rows = [gumbel_noise(1, 2, 4000, Purpose.DRAFT, offset=offset) for offset in range(4)]
    rows.append(gumbel_noise(1, 3, 4000, Purpose.DRAFT))
    correlations = torch.corrcoef(torch.stack(rows).double()) - torch.eye(len(rows))
    assert float(correlations.abs().max()) < 0.08
    assert torch.equal(rows[0], gumbel_noise(1, 2, 4000, Purpose.DRAFT))


def test_more_uniforms_change_none_of_the_first() -> None:
    many = uniforms(3, 7, Purpose.ACCEPT, 5).tolist()
    assert uniforms(3, 7, Purpose.ACCEPT, 0).tolist() == []
    assert many[:2] == uniforms(3, 7, Purpose.ACCEPT, 2).tolist()
    assert len(set(many)) == 5


def test_noise_has_the_moments_of_a_gumbel() -> None:
    noise = torch.cat([gumbel_noise(3, position, 20_000) for position in range(10)]).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.012)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    for draws in (
        [uniforms(3, position, Purpose.ACCEPT, 1)[0] for position in range(3000)],
        [uniforms(seed, 3, Purpose.ACCEPT, 1)[0] for seed in range(3000)],
    ):
        assert all(0 <= draw < 1 for draw in draws)
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert float(((counts - 300) ** 2 / 300).sum()) < 33.7  # 9 degrees of freedom, p = 1e-4
