"""Drafts from a draft model's logits.

Greedy and Gumbel drafts are verified by coupling (see `rejection`), so the best draft guesses the
draw, not the distribution: "gumbel" adds to the draft's scores the noise that the target will add
to its own (Daliri, Musco, Suresh, arXiv:2408.07978). "probabilistic" drafts are drawn from the
draft's distribution q with separate noise, and are verified against q.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.noise import Purpose, Stream
from worker.ops.sample import TORCH_SAMPLER, Sampler, Undrawable, drawable_scores, largest
from worker.types import SampleSpec, SamplingParams

GREEDY, GUMBEL, PROBABILISTIC = "greedy", "gumbel", "probabilistic"

_MIN_CONFIDENCE = 1e-30


class DraftChoice(NamedTuple):
    """One draft for each of B sequences, with `confidences` in (0, 1].

    `proposals` [B, V] float32 is q, over the target's vocabulary; None: drafts were not drawn from
    q.
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

    Every method drafts greedily at temperature 0. `offset` is the number of earlier drafts of the
    same run: a position that is drafted again in a later run gets other noise in "probabilistic",
    since the outcome of the earlier run may have depended on the old noise. With `token_ids` [Vd]
    int64, logits are [B, Vd] of these tokens of the target's vocabulary of `vocab_size`.

    A draft's confidence is its probability at temperature 1, but 1 for a draft that was drawn from
    q: the decision to verify such a draft must not depend on its token.
    """
    if method not in (GREEDY, GUMBEL, PROBABILISTIC):
        raise ValueError(f"unknown method to choose drafts: {method!r}")
    choices: list[int] = largest(logits)[1].tolist()
    drawn = [] if method == GREEDY else [i for i, own in enumerate(params) if own.temperature > 0]
    purpose = Purpose.DRAFT if method == PROBABILISTIC else Purpose.SAMPLE
    stream = Stream(purpose, offset if method == PROBABILISTIC else 0, token_ids, vocab_size)
    # A draft draws from unadjusted logits.
    specs = [SampleSpec(_plain(params[row]), positions[row]) for row in drawn]
    if drawn:
        outcomes = sampler.launch(logits, drawn, specs, stream).collect()
        for row, outcome in zip(drawn, outcomes, strict=True):
            if not isinstance(outcome, Undrawable):
                choices[row] = outcome
    confidences = shares_of(logits, torch.tensor(choices, device=logits.device)).tolist()
    proposals = None
    if method == PROBABILISTIC:
        proposals = logits.new_zeros(len(params), vocab_size or logits.shape[1])
        columns = slice(None) if token_ids is None else token_ids
        for row, wish in enumerate(params):
            if wish.temperature == 0:
                proposals[row, _target(token_ids, choices[row])] = 1.0
        for row, spec in zip(drawn, specs, strict=True):
            confidences[row] = 1.0
            # If the logits are not numbers, neither is q.
            own = drawable_scores(logits[row], spec)
            proposals[row, columns] = torch.nan if isinstance(own, Undrawable) else own.softmax(-1)
    if token_ids is not None:
        choices = token_ids[choices].tolist()
    return DraftChoice(choices, confidences, proposals)


def _target(token_ids: Tensor | None, choice: int) -> int:
    return choice if token_ids is None else int(token_ids[choice])


def _plain(params: SamplingParams) -> SamplingParams:
    """Remove all adjustments of logits: only temperature and truncations count for a draft."""
    return SamplingParams(
        params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
    )


def shares_of(logits: Tensor, choices: Tensor) -> Tensor:
    """Return the probability [B] of each choice [B] int64 at temperature 1, in (0, 1] even for
    logits [B, V] that are not numbers.
    """
    shares = logits.log_softmax(dim=-1).gather(1, choices[:, None]).exp().nan_to_num(nan=0.0)
    return shares.flatten().clamp(_MIN_CONFIDENCE, 1.0)
