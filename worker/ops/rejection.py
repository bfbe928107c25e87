"""Acceptance of drafted tokens that leaves the target's distribution exactly as it is.

Theory of operation (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). At each
drafted position the drafter drew x from q and the target would draw from p. x is accepted with
probability min(1, p(x)/q(x)). The first x that is not is replaced by a recovered token from the
residual max(p - q, 0), normalised, and ends the run; when all are accepted the target's next row
gives a bonus token. What stands at a position is then x with probability

    q(x)·min(1, p(x)/q(x)) + (1 - Σ min(p, q)) · max(p(x) - q(x), 0) / Σ max(p - q, 0) = p(x),

whatever the drafter does. A drafter without probabilities has drawn from the distribution that is
all at x: x is accepted with probability p(x) and the residual is p without x.

Every random number belongs to (seed, position, purpose), and each position's are used for what is
finally put there and for nothing else: drafts that stood behind a rejected one were judged by
nobody. The bonus token takes the sampler's own noise, so a step without drafts draws exactly the
token that plain sampling draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker.ops.noise import Purpose, gumbel_noise, uniform


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification puts after the last known token: the first `num_accepted` drafts, and then
    one more token, recovered or bonus.
    """

    token_ids: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return len(self.token_ids) - 1


def verify(
    drafts: Sequence[int],
    scores: Tensor,
    draft_probabilities: Tensor | None,
    seed: int | None,
    position: int,
) -> Verdict:
    """Judge `drafts` [k] of one sequence, which would stand at `position`, `position` + 1, …

    scores [k + 1, V] float32: row i is what the target says about position `position` + i, given
    the drafts before it, as `sample.scores` prepares it for a draw (its softmax is p; -inf excludes
    a token). draft_probabilities [k, V] are the drafter's q, None for a drafter that has none.
    `seed` None is greedy: a draft is accepted if it has the largest score (of equals, the lowest
    id).
    """
    if seed is None:
        return _verify_greedy(drafts, scores)
    for index, draft in enumerate(drafts):
        target = scores[index].double().softmax(dim=-1)
        proposal = None if draft_probabilities is None else draft_probabilities[index].double()
        p = float(target[draft])
        q = 1.0 if proposal is None else float(proposal[draft])
        if not is_accepted(p, q, uniform(seed, position + index, Purpose.ACCEPT)):
            rest = residual(target, draft if proposal is None else proposal)
            recovered = _draw(rest.log(), seed, position + index, Purpose.RESIDUAL)
            return Verdict((*drafts[:index], recovered))
    bonus = _draw(scores[len(drafts)], seed, position + len(drafts), Purpose.SAMPLE)
    return Verdict((*drafts, bonus))


def is_accepted(p: float, q: float, draw: float) -> bool:
    """Whether a draft with probabilities p (target) and q (drafter) passes a uniform `draw` from
    [0, 1). What the drafter gives no probability cannot have been drawn from q, and is rejected.
    """
    return q > 0 and draw * q < p


def residual(target: Tensor, proposal: Tensor | int) -> Tensor:
    """What a recovered token is drawn from, [V] float64, not normalised: max(p - q, 0) for
    distributions p = `target` and q = `proposal` [V], or p without the one token `proposal`.

    Where rounding leaves nothing of it, p and q are equal but for rounding, and it is p itself.
    """
    if isinstance(proposal, int):
        rest = target.clone()
        rest[proposal] = 0.0
    else:
        rest = (target - proposal).clamp_(min=0.0)
    return rest if float(rest.amax()) > 0 else target


def _verify_greedy(drafts: Sequence[int], scores: Tensor) -> Verdict:
    best: list[int] = scores.argmax(dim=-1).tolist()
    for index, draft in enumerate(drafts):
        if draft != best[index]:
            return Verdict((*drafts[:index], best[index]))
    return Verdict((*drafts, best[len(drafts)]))


def _draw(scores: Tensor, seed: int, position: int, purpose: Purpose) -> int:
    """A token from softmax(scores [V])."""
    noise = gumbel_noise(seed, position, len(scores), purpose)
    return int((scores + noise.to(scores.device)).argmax())
