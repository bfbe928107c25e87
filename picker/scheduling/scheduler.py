"""The scheduler: runs the profiles that the profile handler asks for, which names the primary one.

A profile's filters narrow, its weighted scorers rate, its picker chooses. After each call of a
plugin the clock is read once, and a step is added to the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

from picker.decisions.decision import FilteredOutError
from picker.decisions.steps import BoundPlugin, PluginStep
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

Clock = Callable[[], float]


class Profile:
    """Runs filters, scorers and picker in the configured order. Stateless."""

    def __init__(
        self,
        name: str,
        picker: BoundPlugin[PickerPlugin],
        filters: Sequence[BoundPlugin[Filter]] = (),
        scorers: Sequence[BoundPlugin[Scorer]] = (),
        *,
        clock: Clock,
    ) -> None:
        self.name = name
        self.picker = picker
        self.filters = tuple(filters)
        self.scorers = tuple(scorers)
        self._clock = clock

    def run(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        attributes: Attributes,
        rng: Random,
        steps: list[PluginStep],
    ) -> ProfileResult:
        """Pick among `candidates`, and add what the plugins did to `steps`.

        An endpoint's total is the sum over scorers of clamp(score, 0, 1) × weight, not divided by
        the sum of weights; a score that is NaN counts 0. Raises `FilteredOutError` when the filters
        leave nothing.
        """
        clock = self._clock
        began = clock()
        bound: BoundPlugin[Filter] | BoundPlugin[Scorer] | BoundPlugin[PickerPlugin] = self.picker
        try:
            for bound in self.filters:
                seen = attributes if bound.scope is None else bound.scoped(attributes)
                candidates = bound.plugin.filter(request, candidates, seen, rng)
                now = clock()
                steps.append(PluginStep(bound, now, now - began, candidates))
                began = now
                if not candidates:
                    break
            if not candidates:
                raise FilteredOutError(self.name)
            totals = [0.0] * len(candidates)
            scored = ScoredCandidates(candidates, totals)  # as they are once all have scored
            for bound in self.scorers:
                seen = attributes if bound.scope is None else bound.scoped(attributes)
                scores = bound.plugin.score(request, candidates, seen)
                now = clock()
                steps.append(PluginStep(bound, now, now - began, scores))
                began = now
                weight = bound.weight
                # NaN is not greater than 0, and thereby counts 0.
                totals[:] = [
                    total + (weight if score >= 1.0 else score * weight) if score > 0.0 else total
                    for total, score in zip(totals, scores, strict=True)
                ]
            bound = self.picker
            picked = tuple(bound.plugin.pick(scored, rng))
            now = clock()
            steps.append(PluginStep(bound, now, now - began, scored))
        except FilteredOutError:
            raise
        except Exception as error:
            now = clock()
            steps.append(PluginStep(bound, now, now - began, error))
            raise
        return ProfileResult(picked, scored)


class Scheduler:
    """One decision: candidates in, ordered endpoints out. Holds no state between decisions."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        asking: BoundPlugin[ProfileHandler],
        processing: BoundPlugin[ProfileHandler],
        clock: Clock,
    ) -> None:
        """The profile handler is bound twice: it is asked for profiles, and for the result."""
        self._profiles: Mapping[str, Profile] = {one.name: one for one in profiles}
        self._names = tuple(self._profiles)
        self._asking, self._processing = asking, processing
        self._is_single = asking.plugin.max_profiles == 1  # asked again, it could only say no
        self._clock = clock

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """The profiles by name, in configured order."""
        return MappingProxyType(self._profiles)

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        attributes: Attributes,
        rng: Random,
        steps: list[PluginStep],
    ) -> SchedulingResult:
        """Decide where `request` goes, and add what the plugins did to `steps`.

        The handler is asked for profiles until it names none (a profile runs at most once). A
        profile that refuses counts as "found nothing"; when the handler then cannot build a result,
        the first refusal, by profile name, is the answer. Raises `RefusedError`: 503 without
        candidates, 429 when the filters leave nothing or no profile ran.
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
        bound, began = self._processing, self._clock()
        try:
            return bound.plugin.process_results(request, results)
        except RefusedError as unresolved:
            if refusals:
                raise refusals[min(refusals)] from unresolved
            raise
        finally:
            now = self._clock()
            steps.append(PluginStep(bound, now, now - began))

    def _next(
        self,
        request: InferenceRequest,
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
        steps: list[PluginStep],
    ) -> list[str]:
        bound, began = self._asking, self._clock()
        seen = attributes if bound.scope is None else bound.scoped(attributes)
        asked: Sequence[str] = ()
        try:
            asked = bound.plugin.pick_profiles(request, self._names, results, seen)
        finally:
            now = self._clock()
            steps.append(PluginStep(bound, now, now - began, asked))
        return [name for name in asked if name in self._profiles and name not in results]
