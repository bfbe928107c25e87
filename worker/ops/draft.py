"""ChosenToken of drafts from a draft model's logits.

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

from worker.ops.noise import Purpose, gumbel_noise
from worker.ops.sample import largest
from worker.ops.truncate import surviving, truncates
from worker.types import SamplingParams

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
    choices = largest(logits)[1]
    confidences = _probabilities(logits, choices)
    proposals = None
    if method == PROBABILISTIC:
        proposals = logits.new_zeros(len(params), vocab_size or logits.shape[1])
    for row, (own, position) in enumerate(zip(params, positions, strict=True)):
        if own.temperature == 0 or method == GREEDY:
            if proposals is not None:
                proposals[row, _targets(token_ids, choices[row])] = 1.0
            continue
        draw = _Draw(logits[row] / own.temperature, own, token_ids, vocab_size)
        if proposals is None:
            choices[row] = draw.coupled(position)
            confidences[row] = _probabilities(logits[row : row + 1], choices[row : row + 1])[0]
        else:
            choices[row] = draw.drawn(position, offset, proposals[row])
            confidences[row] = 1.0
    if token_ids is not None:
        choices = token_ids[choices].tolist()
    return DraftChoice(choices, confidences, proposals)


class _Draw:
    """A draw from scores [V] (logits over temperature), truncated as the target's will be."""

    def __init__(
        self,
        scores: Tensor,
        params: SamplingParams,
        token_ids: Tensor | None,
        vocab_size: int | None,
    ) -> None:
        self._seed = params.seed
        self._vocab_size = vocab_size or len(scores)
        # What may be drafted, as places in `scores`; None for all of them.
        self._kept = _kept(scores, params)
        self._scores = scores if self._kept is None else scores[self._kept]
        # The same as ids of the target's vocabulary.
        self._ids = self._kept if token_ids is None else token_ids
        if token_ids is not None and self._kept is not None:
            self._ids = token_ids[self._kept]

    def coupled(self, position: int) -> int:
        """What the noise of the target's draw at `position` makes of these scores."""
        noise = gumbel_noise(self._seed, position, self._vocab_size, ids=self._ids)
        return self._best(noise)

    def drawn(self, position: int, offset: int, proposal: Tensor) -> int:
        """A draw, the distribution of which is written to `proposal` [V], which is all zero."""
        shares = self._scores.softmax(dim=-1)
        if self._ids is None:
            proposal.copy_(shares)
        else:
            proposal.index_copy_(0, self._ids, shares)
        noise = gumbel_noise(
            self._seed, position, self._vocab_size, Purpose.DRAFT, self._ids, offset
        )
        return self._best(noise)

    def _best(self, noise: Tensor) -> int:
        """The place in the scores of the largest sum."""
        [best] = largest((self._scores + noise.to(self._scores.device))[None])[1]
        return best if self._kept is None else int(self._kept[best])


def _kept(scores: Tensor, params: SamplingParams) -> Tensor | None:
    """What truncation leaves of scores [V], in ascending order; None where it is not applied, also
    not to scores that are not numbers: a draft of those is worth nothing, but does no harm.
    """
    if not truncates(params):
        return None
    kept = surviving(scores, params)
    return kept.sort().values if len(kept) else None


def _targets(token_ids: Tensor | None, choice: int) -> int:
    return choice if token_ids is None else int(token_ids[choice])


def _probabilities(logits: Tensor, choices: Sequence[int]) -> list[float]:
    """Of each row of logits [B, V], the probability of its choice; in (0, 1] whatever they are."""
    picked = torch.tensor(choices, device=logits.device)[:, None]
    shares = logits.log_softmax(dim=-1).gather(1, picked).exp().nan_to_num(nan=0.0)
    return shares.flatten().clamp(_LEAST_CONFIDENCE, 1.0).tolist()
