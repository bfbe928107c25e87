"""What forge-infer promises of speculation and of models, under the names it has there.

The toy model is a deterministic hash of the last 8 tokens over a vocabulary of 64; a draft of it is
the same model with some noise on its logits. The promises about a model itself are asked of the
real one, in the executor's tests, where that makes sense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch

from tests.support.model.reference_ops import coupled_run
from tests.support.model.single_draws import verify
from worker.ops.noise import Purpose, gumbel_noise
from worker.ops.rejection import DraftVerdict
from worker.ops.sample import TORCH_SAMPLER, scores
from worker.types import SampleSpec, SamplingParams

VOCAB = 64
CONTEXT = 8


@dataclass(frozen=True)
class TinyTransformer:
    """Logits [64] as a hash of the last 8 tokens; `noise` of another seed is added to them.

    After the tokens `pin` the model is certain of the last of them.
    """

    seed: int = 1
    noise: float = 0.0
    pin: tuple[int, ...] = ()

    def forward(self, context: Sequence[int]) -> torch.Tensor:
        """Logits of the token after `context`."""
        recent = tuple(context[-CONTEXT:])
        if self.pin and recent[1 - len(self.pin) :] == self.pin[:-1]:
            sure = torch.zeros(VOCAB)
            sure[self.pin[-1]] = 50.0
            return sure
        logits = self._hash(self.seed, recent) * 3
        return logits + self._hash(self.seed + 1000, recent) * self.noise

    @staticmethod
    def _hash(seed: int, tokens: tuple[int, ...]) -> torch.Tensor:
        generator = np.random.default_rng([seed, len(tokens), *tokens])
        return torch.from_numpy(generator.standard_normal(VOCAB).astype(np.float32))


TARGET = TinyTransformer()
DRAFT = TinyTransformer(noise=0.6)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_k=40, seed=5)


def propose(draft: TinyTransformer, tokens: Sequence[int], count: int) -> list[int]:
    drafts: list[int] = []
    while len(drafts) < count:
        drafts.append(int(draft.forward([*tokens, *drafts]).argmax()))
    return drafts


def step(
    target: TinyTransformer, draft: TinyTransformer, tokens: Sequence[int], params: SamplingParams
) -> tuple[int, DraftVerdict]:
    """One step of at most K=5 drafts: how many were drafted, and the verdict, coupled if greedy."""
    drafts = propose(draft, tokens, 5)
    logits = torch.stack([target.forward([*tokens, *drafts[:i]]) for i in range(6)])
    specs = [SampleSpec(params, len(tokens) + i) for i in range(6)]
    if params.temperature == 0:
        outcomes = TORCH_SAMPLER.launch(logits, range(6), specs).collect()
        emitted, fault = coupled_run(drafts, outcomes.__getitem__)
        assert fault is None
        return len(drafts), DraftVerdict(tuple(emitted))
    rows = torch.stack([scores(row, spec) for row, spec in zip(logits, specs, strict=True)])
    return len(drafts), verify(drafts, rows, None, params.seed, len(tokens))


def generate(
    target: TinyTransformer, draft: TinyTransformer, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], float]:
    """`max_tokens` tokens after `prompt`, and the share of drafts that were accepted."""
    tokens = list(prompt)
    drafted = accepted = 0
    while len(tokens) < len(prompt) + params.max_tokens:
        count, verdict = step(target, draft, tokens, params)
        drafted, accepted = drafted + count, accepted + verdict.num_accepted
        tokens += verdict.token_ids
    return tokens[len(prompt) :][: params.max_tokens], accepted / drafted


def plain(model: TinyTransformer, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding one token at a time."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(model.forward(tokens).argmax()))
    return tokens[len(prompt) :]


def prompts(count: int) -> list[list[int]]:
    """Random prompts, always the same."""
    draw = Random(9)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(count)]


def test_full_acceptance_emits_bonus_token() -> None:
    """A draft that is the target itself: every draft accepted, and one token more."""
    count, verdict = step(TARGET, TARGET, [1, 2, 3, 4], GREEDY)
    assert (verdict.num_accepted, len(verdict.token_ids)) == (count, count + 1)
    assert generate(TARGET, TARGET, [1, 2, 3, 4], GREEDY)[1] == 1.0


def test_speculative_output_matches_plain_target_decoding() -> None:
    """Greedy: token for token, whatever the draft is worth."""
    expected = plain(TARGET, [1, 2, 3, 4], 12)
    for draft in (TARGET, DRAFT, TinyTransformer(seed=77)):
        assert generate(TARGET, draft, [1, 2, 3, 4], GREEDY)[0] == expected


def test_rejection_falls_back_to_a_target_token() -> None:
    """A step gives at least one token, and the one after the accepted drafts is the target's."""
    useless = TinyTransformer(seed=77)
    for prompt in prompts(20):
        _, verdict = step(TARGET, useless, prompt, GREEDY)
        accepted = verdict.token_ids[:-1]
        assert verdict.token_ids[-1] == int(TARGET.forward([*prompt, *accepted]).argmax())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_acceptance_rate_is_in_range(params: SamplingParams) -> None:
    """Never more accepted than drafted."""
    for prompt in prompts(10):
        output, rate = generate(TARGET, DRAFT, prompt, params)
        assert 0.0 <= rate <= 1.0
        assert len(output) == 12


def test_a_good_draft_yields_a_high_acceptance_rate() -> None:
    """More than a fifth of the drafts over 50 prompts, and more than a bad draft gets."""
    good = [step(TARGET, DRAFT, prompt, GREEDY) for prompt in prompts(50)]
    bad = [step(TARGET, TinyTransformer(seed=77), prompt, GREEDY) for prompt in prompts(50)]
    rates = [sum(v.num_accepted for _, v in s) / sum(n for n, _ in s) for s in (good, bad)]
    assert rates[0] > 0.2 > rates[1]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_deterministic_across_runs(params: SamplingParams) -> None:
    """The same request gives the same tokens and the same rate, sampled too."""
    first, second = (generate(TARGET, DRAFT, [1, 2, 3, 4], params) for _ in range(2))
    assert first == second


def test_pinned_context_forces_token() -> None:
    """Where the target is certain, its token comes, drafted or not, greedy or sampled."""
    pinned = TinyTransformer(pin=(1, 2, 3, 42))
    for draft in (pinned, DRAFT):
        for params in (GREEDY, SAMPLED):
            assert generate(pinned, draft, [9, 1, 2, 3], params)[0][0] == 42


def test_draft_and_target_mostly_agree() -> None:
    """The perturbed model has the same favourite in more than 120 of 200 contexts."""
    draw = Random(3)
    contexts = [[draw.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(200)]
    agreeing = [int(TARGET.forward(c).argmax()) == int(DRAFT.forward(c).argmax()) for c in contexts]
    assert 120 < sum(agreeing) < 200


def test_sampled_drafts_are_accepted_by_their_probabilities() -> None:
    """A draft that samples from the target's own distribution is never rejected."""
    tokens = [5, 6, 7]
    rows = [scores(TARGET.forward(tokens), SampleSpec(SAMPLED, len(tokens)))]
    proposals = rows[0].softmax(-1)[None]
    for seed in range(50):
        noise = gumbel_noise(seed, len(tokens), VOCAB, Purpose.DRAFT)
        draft = int((rows[0] + noise).argmax())
        after = scores(TARGET.forward([*tokens, draft]), SampleSpec(SAMPLED, len(tokens) + 1))
        verdict = verify([draft], torch.stack((rows[0], after)), proposals, seed, len(tokens))
        assert verdict.token_ids[0] == draft
