"""Mixtures of experts against a loop over rows."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.model.measured_sums import assert_alike
from worker.ops.backends import TORCH
from worker.ops.experts import Experts
from worker.ops.linear import make_linear

HIDDEN, INNER, COUNT = 1056, 48, 6


def draw(*shape: int, seed: int, scale: float = 0.1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


ROUTER = draw(COUNT, HIDDEN, seed=1)
GATE_UP = draw(COUNT, 2 * INNER, HIDDEN, seed=2)
DOWN = draw(COUNT, HIDDEN, INNER, seed=3)


def experts(per_token: int, normalized: bool) -> Experts:
    return Experts(
        make_linear(ROUTER),
        tuple(make_linear(weight) for weight in GATE_UP),
        tuple(make_linear(weight) for weight in DOWN),
        per_token,
        normalized,
    )


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, 6])
def test_a_row_is_the_sum_of_its_likeliest_experts(per_token: int, normalized: bool) -> None:
    x = draw(11, HIDDEN, seed=4, scale=1.0)
    wanted = []
    for row in x.double():
        shares = (ROUTER.double() @ row).softmax(-1)
        chosen = shares.argsort(descending=True)[:per_token].tolist()
        whole = shares[chosen].sum() if normalized else 1.0
        parts = []
        for n in chosen:
            gate, up = (GATE_UP[n].double() @ row).chunk(2)
            parts.append(DOWN[n].double() @ (functional.silu(gate) * up) * shares[n] / whole)
        wanted.append(sum(parts))
    found = TORCH.mix_experts(x, experts(per_token, normalized))
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_its_batch() -> None:
    x, mixture = draw(40, HIDDEN, seed=5, scale=1.0), experts(2, True)
    together = TORCH.mix_experts(x, mixture)
    for count in (1, 2, 7, 33):
        assert_alike(TORCH.mix_experts(x[3 : 3 + count], mixture), together[3 : 3 + count])
