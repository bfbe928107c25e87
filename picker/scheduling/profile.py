"""One scheduling profile: filters narrow, weighted scorers rate, a picker chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Filter, Picker, Scorer
from picker.types import Candidate, InferenceRequest, ProfileResult, ScoredCandidates


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer and what its opinion counts; any float, 1.0 when the configuration says nothing."""

    scorer: Scorer
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Runs filters, scorers and picker in the configured order."""

    name: str
    picker: Picker
    filters: tuple[Filter, ...] = ()
    scorers: tuple[WeightedScorer, ...] = ()

    def run(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> ProfileResult:
        """Pick among `candidates`.

        An endpoint's total is the sum over scorers of clamp(score, 0, 1) × weight, not divided by
        the sum of weights; a score that is NaN counts 0. Raises `RefusedError` 429 when the filters
        leave nothing.
        """
        candidates = self.narrow(request, candidates, attributes, rng)
        scored = self.rate(request, candidates, attributes)
        return ProfileResult(tuple(self.picker.pick(scored, rng)), scored)

    def narrow(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> Sequence[Candidate]:
        """The first step of `run`: what the filters leave. Raises `RefusedError` 429 when that is
        nothing.
        """
        for each in self.filters:
            candidates = each.filter(request, candidates, attributes, rng)
            if not candidates:
                break
        if not candidates:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                "no endpoints available for the given request",
                DropReason.SATURATED,
            )
        return candidates

    def rate(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> ScoredCandidates:
        """The second step of `run`: each candidate with its total."""
        totals = [0.0] * len(candidates)
        for weighted in self.scorers:
            weight = weighted.weight
            scores = weighted.scorer.score(request, candidates, attributes)
            for index, score in enumerate(scores):
                # False for NaN, which thereby counts 0.
                if score > 0.0:
                    totals[index] += weight if score >= 1.0 else score * weight
        return ScoredCandidates(candidates, totals)
