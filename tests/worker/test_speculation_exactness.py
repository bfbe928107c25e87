"""Speculation does not change distributions: requests against the enumeration of all outcomes.

A toy language of five tokens, three tokens of output, 125 outcomes whose exact probabilities come
from production's own `scores`. The requests' random numbers are the production ones, and single
requests are replayed through `answer` with equal tokens. With coupling, output equals that of plain
decoding token for token; with rejection it has the same distribution. The same statistic catches
mistakes known from other implementations.
"""

from typing import Any

import pytest
import torch

from tests.depth import by_depth
from tests.support.model.reference_ops import probabilities
from tests.support.model.toy_speculation import VOCAB, Chance, Drafting, Rules, Toy, fit
from worker.ops import rejection_torch
from worker.ops.drafted import AcceptedPrefixes, DraftBatch
from worker.ops.noise import Purpose, gumbel_noise, uniforms
from worker.ops.rejection import BLOCK, METHODS, STANDARD, accept, thresholds
from worker.ops.rejection_torch import log_normalizers, residuals
from worker.types import SamplingParams

REQUESTS = by_depth(20_000, 60_000)
REPLAYED = by_depth(3, 30)
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2, "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "bias": {"logit_bias": ((1, 1.0),), "bad_words": ((3, 0), (2,)), "min_tokens": 2},
    "everything": {
        "temperature": 0.9,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.03,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "logit_bias": ((0, 0.5),),
        "bad_words": ((1, 1),),
        "min_tokens": 3,
    },
}
PLAIN = Drafting("none", num_drafts=0)
# A lookup drafter's q is 1 at its draft, so rejection can verify it too.
REJECTION = [
    *((case, Drafting("probabilistic", m)) for case in CASES for m in METHODS),
    *(("everything", Drafting("probabilistic", m, k)) for m in METHODS for k in (1, 2)),
    *(("penalties", Drafting("lookup", m)) for m in METHODS),
]


@pytest.fixture(scope="module")
def chance() -> Chance:
    return Chance(REQUESTS)


@pytest.fixture(scope="module")
def toys(chance: Chance) -> dict[str, Toy]:
    return {
        case: Toy(SamplingParams(max_tokens=3, **changes), chance)
        for case, changes in CASES.items()
    }


def assert_replayed(toy: Toy, output: torch.Tensor, how: Drafting) -> None:
    for index in range(REPLAYED):
        assert toy.replay(index, how) == output[index].tolist()


def test_the_random_numbers_are_the_production_ones(chance: Chance) -> None:
    for index in (0, 77, REQUESTS - 1):
        seed = int(chance.seeds[index])
        for purpose in Purpose:
            for offset in (0, 2):
                expected = gumbel_noise(seed, 5, VOCAB, purpose, offset=offset)
                assert torch.equal(chance.gumbel(5, purpose, offset)[index], expected)
            expected_draws = uniforms(seed, 5, purpose, 4).tolist()
            assert chance.uniforms(5, purpose)[index].tolist() == expected_draws


@pytest.mark.parametrize("case", CASES)
def test_the_enumeration_matches_the_definitions(toys: dict[str, Toy], case: str) -> None:
    toy = toys[case]
    rows = toy.scores.softmax(-1)
    for number, context in enumerate([(), (0,), (3,), (1, 1), (3, 4)]):
        node = sum(VOCAB**i for i in range(len(context)))
        for place, token in enumerate(reversed(context)):
            node += token * VOCAB**place
        expected = probabilities(toy.raw(context), toy.spec(context))
        assert rows[node].tolist() == pytest.approx(expected, abs=1e-6), number
    assert sum(toy.exact()) == pytest.approx(1.0)


@pytest.mark.parametrize("case", CASES)
def test_coupled_output_is_plain_and_exactly_distributed(toys: dict[str, Toy], case: str) -> None:
    toy = toys[case]
    plain = toy.simulate(PLAIN)
    found = fit(plain, toy.exact())
    assert found.p_value > 0.01
    assert found.variation < found.bound
    assert_replayed(toy, plain, PLAIN)
    lengths = (1, 2, 3) if case == "everything" else (3,)
    for drafter in ("lookup", "greedy", "gumbel"):
        for num_drafts in lengths:
            how = Drafting(drafter, num_drafts=num_drafts)
            assert torch.equal(toy.simulate(how), plain)
        assert_replayed(toy, plain, how)


@pytest.mark.parametrize(("case", "how"), REJECTION)
def test_rejection_is_exactly_distributed(toys: dict[str, Toy], case: str, how: Drafting) -> None:
    toy = toys[case]
    output = toy.simulate(how)
    found = fit(output, toy.exact())
    assert found.p_value > 0.01
    assert found.variation < found.bound
    assert_replayed(toy, output, how)


def accepts_when_likelier(batch: DraftBatch, draws: torch.Tensor, method: str) -> AcceptedPrefixes:
    """Accept a draft only if p is at least q."""
    sure = (thresholds(batch, method).values < 1).double()
    return accept(batch, sure.to(draws.dtype), method)


def recovers_from_the_target(
    batch: DraftBatch, acceptance: AcceptedPrefixes, noise: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Replace a rejected draft by a draw from p, not from the residual."""
    nothing = torch.zeros_like(batch.proposals)
    whole = DraftBatch(batch.drafts, batch.scores, nothing, batch.num_drafts)
    return rejection_torch.last_tokens(whole, acceptance, noise)


def recovers_by_the_number_that_rejected(
    batch: DraftBatch, acceptance: AcceptedPrefixes, noise: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Draw from the residual, but with the uniform number that decided the rejection."""
    tokens = rejection_torch.last_tokens(batch, acceptance, noise)
    [rows] = (acceptance.num_accepted < batch.num_drafts).nonzero(as_tuple=True)
    places = acceptance.num_accepted[rows]
    own = batch.scores[rows, places]
    shifts = acceptance.log_weights[rows] - log_normalizers(own[:, None])[:, 0]
    shares = residuals(own, batch.proposals[rows, places], shifts).cumsum(-1)
    levels = draws[rows, places] * shares[:, -1]
    tokens[rows] = (shares <= levels[:, None]).sum(-1).clamp(max=VOCAB - 1)
    return tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "rules",
    [
        Rules(accept=accepts_when_likelier),
        Rules(last=recovers_from_the_target),
        Rules(last=recovers_by_the_number_that_rejected),
        Rules(judges_likely=True),
    ],
    ids=["accept-if-likelier", "recover-from-p", "reuse-the-uniform", "judge-the-likely"],
)
def test_wrong_rules_are_caught(toys: dict[str, Toy], rules: Rules, method: str) -> None:
    toy = toys["temperature"]
    found = fit(toy.simulate(Drafting("probabilistic", method), rules), toy.exact())
    assert found.p_value < 1e-9
    assert found.variation > found.bound


@pytest.mark.full
def test_block_verification_needs_fresh_noise_for_every_run(toys: dict[str, Toy]) -> None:
    """The result of a run depends on the noise of all its positions, so a later run that reuses it
    is biased; standard verification, by single positions, may reuse it.
    """
    toy, rules = toys["temperature"], Rules(reuses_noise=True)
    found = fit(toy.simulate(Drafting("probabilistic", BLOCK), rules), toy.exact())
    assert found.p_value < 1e-9
    assert found.variation > found.bound
    harmless = fit(toy.simulate(Drafting("probabilistic", STANDARD), rules), toy.exact())
    assert harmless.p_value > 0.01
