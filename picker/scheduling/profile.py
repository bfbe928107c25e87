"""One scheduling profile: filters narrow, weighted scorers rate, a picker chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Filter, Picker, Scorer
from picker.types import (
    Candidate,
    FilterStep,
    InferenceRequest,
    ProfileResult,
    ProfileSteps,
    ScoredCandidates,
)


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer and what its opinion counts; any float, 1.0 when the configuration says nothing."""

    scorer: Scorer
    weight: float = 1.0


class FilteredOutError(RefusedError):
    """429: the filters of a profile left nothing of `candidates`. `steps` say which did what."""

    def __init__(self, profile: str, candidates: Sequence[Candidate], steps: ProfileSteps) -> None:
        text = "no endpoints available for the given request"
        super().__init__(Code.RESOURCE_EXHAUSTED, text, DropReason.SATURATED)
        self.profile = profile
        self.candidates = candidates
        self.steps = steps


@dataclass(frozen=True, slots=True)
class Profile:
    """Runs filters, scorers and picker in the configured order.

    Its steps are told under the names of the plugins, those that measure them included; a plugin
    without one goes by its class.
    """

    name: str
    picker: Picker
    filters: tuple[Filter, ...] = ()
    scorers: tuple[WeightedScorer, ...] = ()
    _filters: tuple[tuple[str, Filter], ...] = field(init=False, repr=False)
    _scorer_names: tuple[tuple[str, float], ...] = field(init=False, repr=False)
    _picker_name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        filters = tuple((_name_of(one), one) for one in self.filters)
        scorers = tuple((_name_of(one.scorer), one.weight) for one in self.scorers)
        object.__setattr__(self, "_filters", filters)
        object.__setattr__(self, "_scorer_names", scorers)
        object.__setattr__(self, "_picker_name", _name_of(self.picker))

    def run(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> ProfileResult:
        """Pick among `candidates`.

        An endpoint's total is the sum over scorers of clamp(score, 0, 1) × weight, not divided by
        the sum of weights; a score that is NaN counts 0. Raises `FilteredOutError` when the filters
        leave nothing.
        """
        candidates, filters = self.narrow(request, candidates, attributes, rng)
        scored, scores = self.rate(request, candidates, attributes)
        steps = ProfileSteps(filters, self._scorer_names, scores, self._picker_name)
        return ProfileResult(tuple(self.picker.pick(scored, rng)), scored, steps)

    def steps(
        self, filters: tuple[FilterStep, ...], scores: Sequence[Sequence[float]]
    ) -> ProfileSteps:
        """What `run` says of its steps, for one who takes them himself."""
        return ProfileSteps(filters, self._scorer_names, scores, self._picker_name)

    def narrow(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> tuple[Sequence[Candidate], tuple[FilterStep, ...]]:
        """The first step of `run`: what the filters leave. Raises `FilteredOutError` when that is
        nothing.
        """
        if not self._filters and candidates:
            return candidates, ()
        seen, steps = candidates, []
        for name, each in self._filters:
            kept = each.filter(request, candidates, attributes, rng)
            steps.append(FilterStep(name, len(candidates), kept))
            candidates = kept
            if not candidates:
                break
        if not candidates:
            raise FilteredOutError(self.name, seen, ProfileSteps(tuple(steps)))
        return candidates, tuple(steps)

    def rate(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> tuple[ScoredCandidates, list[Sequence[float]]]:
        """The second step of `run`: each candidate with its total, and what each scorer said."""
        totals = [0.0] * len(candidates)
        said = []
        for weighted in self.scorers:
            weight = weighted.weight
            scores = weighted.scorer.score(request, candidates, attributes)
            said.append(scores)
            for index, score in enumerate(scores):
                # False for NaN, which thereby counts 0.
                if score > 0.0:
                    totals[index] += weight if score >= 1.0 else score * weight
        return ScoredCandidates(candidates, totals), said


def _name_of(plugin: object) -> str:
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else type(plugin).__name__
