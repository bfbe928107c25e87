"""Drafts from a draft model's logits.

Greedy drafts and Gumbel drafts are verified by coupling: the target draws as it always does, and a
draft stands if it is the token drawn. So a draft is best that guesses the draw, not the
distribution: "gumbel" adds to the draft's scores the very noise that the target will add to its
own, and draws the same token wherever the two distributions are equal (Daliri, Musco, Suresh,
arXiv:2408.07978). "probabilistic" drafts are drawn from the draft's distribution q with noise of
their own, and are verified against q (see `rejection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.noise import Purpose, Stream
from worker.ops.sample import TORCH_SAMPLER, Sampler, Undrawable, drawable_scores, largest
from worker.types import SampleSpec, SamplingParams

GREEDY, GUMBEL, PROBABILISTIC = "greedy", "gumbel", "probabilistic"

_LEAST_CONFIDENCE = 1e-30


class DraftChoice(NamedTuple):
    """One draft for each of B sequences.

    `confidences` are in (0, 1]. `proposals` [B, V] float32 is q, over the target's vocabulary, on
    the device of the logits: what each draft was drawn from (all at the draft for temperature 0);
    None for methods that do not draw from q.
    """

    token_ids: list[int]
    confidences: list[float]
    proposals: Tensor | None


def choose_drafts(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    method: str,
    offset: int,
    token_ids: Tensor | None = None,
    vocab_size: int | None = None,
    sampler: Sampler = TORCH_SAMPLER,
) -> DraftChoice:
    """Draft the token at `positions[b]` for each row b of logits [B, V] float32.

    `method` is "greedy", "gumbel" or "probabilistic"; a request of temperature 0 is drafted
    greedily by all of them. `offset` is how many drafts of the same run come before this one (0 for
    the first): a position that is drafted again in a later run gets other noise in
    "probabilistic", since the fate of the run before may have depended on the old.

    With `token_ids` [Vd] int64, logits are [B, Vd] of only these tokens of the target's
    vocabulary of `vocab_size`: noise is theirs there, and so are the ids returned.

    The confidence of a draft is its probability in the draft's distribution at temperature 1; of a
    draft that was drawn from q it is always 1, since whether such a draft is verified must not
    depend on which token it is, or the output would be distributed by that choice.
    """
    if method not in (GREEDY, GUMBEL, PROBABILISTIC):
        raise ValueError(f"{method!r} is no way to choose drafts")
    choices: list[int] = largest(logits)[1].tolist()
    drawn = [] if method == GREEDY else [i for i, own in enumerate(params) if own.temperature > 0]
    purpose = Purpose.DRAFT if method == PROBABILISTIC else Purpose.SAMPLE
    stream = Stream(purpose, offset if method == PROBABILISTIC else 0, token_ids, vocab_size)
    # A draft draws from logits as they are: nothing adjusts them.
    specs = [SampleSpec(_plain(params[row]), positions[row]) for row in drawn]
    if drawn:
        outcomes = sampler.launch(logits, drawn, specs, stream).collect()
        for row, outcome in zip(drawn, outcomes, strict=True):
            if not isinstance(outcome, Undrawable):
                choices[row] = outcome
    confidences = _probabilities(logits, choices)
    proposals = None
    if method == PROBABILISTIC:
        proposals = logits.new_zeros(len(params), vocab_size or logits.shape[1])
        columns = slice(None) if token_ids is None else token_ids
        for row, wish in enumerate(params):
            if wish.temperature == 0:
                proposals[row, _target(token_ids, choices[row])] = 1.0
        for row, spec in zip(drawn, specs, strict=True):
            confidences[row] = 1.0
            # Of logits that are not numbers, q is none either.
            own = drawable_scores(logits[row], spec)
            proposals[row, columns] = torch.nan if isinstance(own, Undrawable) else own.softmax(-1)
    if token_ids is not None:
        choices = token_ids[choices].tolist()
    return DraftChoice(choices, confidences, proposals)


def _target(token_ids: Tensor | None, choice: int) -> int:
    return choice if token_ids is None else int(token_ids[choice])


def _plain(params: SamplingParams) -> SamplingParams:
    """Without what adjusts logits: only temperature and truncations count for a draft."""
    return SamplingParams(
        params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
    )


def _probabilities(logits: Tensor, choices: Sequence[int]) -> list[float]:
    """Of each row of logits [B, V], the probability of its choice; in (0, 1] whatever they are."""
    picked = torch.tensor(choices, device=logits.device)[:, None]
    shares = logits.log_softmax(dim=-1).gather(1, picked).exp().nan_to_num(nan=0.0)
    return shares.flatten().clamp(_LEAST_CONFIDENCE, 1.0).tolist()
