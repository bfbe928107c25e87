"""The scheduler: it runs the profiles that the handler selects. The handler names the primary.

A profile's filters narrow the candidates, its weighted scorers rate them, and its picker chooses.
Each call of a plugin is a step of the decision.
"""

from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType

from picker.decisions.decision import FilteredOutError
from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.errors import Code, RefusedError, no_endpoints
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Filter, PickerPlugin, ProfileHandler, Scorer
from picker.types import (
    Candidates,
    InferenceRequest,
    ProfileResult,
    SchedulingResult,
    ScoredCandidates,
)


class Profile:
    """Runs filters, scorers and a picker in the configured order. Has no state."""

    def __init__(
        self,
        name: str,
        picker: BoundPlugin[PickerPlugin],
        filters: Sequence[BoundPlugin[Filter]] = (),
        scorers: Sequence[BoundPlugin[Scorer]] = (),
    ) -> None:
        self.name = name
        self.picker = picker
        self.filters = tuple(filters)
        self.scorers = tuple(scorers)

    def run(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        attributes: Attributes,
        rng: Random,
        steps: PluginSteps,
    ) -> ProfileResult:
        """Pick among `candidates`, and append the calls of the plugins to `steps`.

        An endpoint's total is the sum over scorers of clamp(score, 0, 1) × weight, not divided by
        the sum of weights. Raises `FilteredOutError` when the filters leave no endpoint.
        """
        for narrowing in self.filters:
            seen = attributes if narrowing.scope is None else narrowing.scoped(attributes)
            candidates = steps.call(
                narrowing, narrowing.plugin.filter, request, candidates, seen, rng
            )
            if not candidates:
                break
        if not candidates:
            raise FilteredOutError(self.name)
        totals = [0.0] * len(candidates)
        for rating in self.scorers:
            seen = attributes if rating.scope is None else rating.scoped(attributes)
            scores = steps.call(rating, rating.plugin.score, request, candidates, seen)
            weight = rating.weight
            if len(scores) != len(totals):
                raise ValueError(f"{rating.name} scored {len(scores)} of {len(totals)} candidates")
            for at, score in enumerate(scores):
                if score > 0.0:  # NaN is not, and so counts 0
                    totals[at] += weight if score >= 1.0 else score * weight
        scored = ScoredCandidates(candidates, totals)
        return steps.call(self.picker, _pick, self.picker.plugin, scored, rng)


def _pick(plugin: PickerPlugin, scored: ScoredCandidates, rng: Random) -> ProfileResult:
    return ProfileResult(tuple(plugin.pick(scored, rng)), scored)


class Scheduler:
    """Turns a request's candidates into ordered endpoints. Holds no state between decisions."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        asking: BoundPlugin[ProfileHandler],
        processing: BoundPlugin[ProfileHandler],
    ) -> None:
        """`asking` and `processing` bind the profile handler to its two extension points."""
        self._profiles: Mapping[str, Profile] = {one.name: one for one in profiles}
        self._names = tuple(self._profiles)
        self._asking, self._processing = asking, processing
        self._is_single = asking.plugin.max_profiles == 1  # a second call would return nothing

    @property
    def profiles(self) -> Mapping[str, Profile]:
        return MappingProxyType(self._profiles)

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        attributes: Attributes,
        rng: Random,
        steps: PluginSteps,
    ) -> SchedulingResult:
        """Decide where `request` goes, and append the calls of the plugins to `steps`.

        The handler is asked for profiles until it names none (a profile runs at most once). If it
        then cannot build a result, the first refusal in the order of profile names is raised.
        Raises `RefusedError`: 503 without candidates, 429 if the filters leave no endpoint or no
        profile ran.
        """
        if not candidates:
            raise no_endpoints()
        results: dict[str, ProfileResult | None] = {}
        refusals: dict[str, RefusedError] = {}
        while names := self._next(request, results, attributes, steps):
            for name in names:
                try:
                    profile = self._profiles[name]
                    results[name] = profile.run(request, candidates, attributes, rng, steps)
                except RefusedError as refusal:
                    results[name] = None
                    refusals[name] = refusal
            if self._is_single:
                break
        if not results:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, "no scheduling profile ran")
        bound = self._processing
        try:
            return steps.call(bound, bound.plugin.process_results, request, results)
        except RefusedError as unresolved:
            if refusals:
                raise refusals[min(refusals)] from unresolved
            raise

    def _next(
        self,
        request: InferenceRequest,
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
        steps: PluginSteps,
    ) -> list[str]:
        bound = self._asking
        seen = attributes if bound.scope is None else bound.scoped(attributes)
        asked = steps.call(bound, bound.plugin.pick_profiles, request, self._names, results, seen)
        return [name for name in asked if name in self._profiles and name not in results]
