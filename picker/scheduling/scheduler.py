"""Run the profiles that the profile handler asks for and let it name the primary result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Protocol

from picker.errors import Code, RefusedError, no_endpoints
from picker.framework.attributes import Attributes
from picker.framework.interfaces import ProfileHandler
from picker.types import Candidate, InferenceRequest, ProfileResult, SchedulingResult


class RunnableProfile(Protocol):
    """A scheduling profile: `scheduling.profile.Profile`, or one with something around it."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    def run(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> ProfileResult:
        """Pick among `candidates`. Raises `RefusedError`."""
        ...


class Scheduler:
    """One decision: candidates in, ordered endpoints out. Holds no state between decisions."""

    def __init__(
        self, profiles: Sequence[RunnableProfile], profile_handler: ProfileHandler
    ) -> None:
        self._profiles: Mapping[str, RunnableProfile] = {one.name: one for one in profiles}
        self._names = tuple(self._profiles)
        self._handler = profile_handler

    @property
    def profiles(self) -> Mapping[str, RunnableProfile]:
        """The profiles by name, in configured order."""
        return MappingProxyType(self._profiles)

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> SchedulingResult:
        """Decide where `request` goes.

        The handler is asked for profiles until it names none (a profile runs at most once). A
        profile that refuses counts as "found nothing"; when the handler then cannot build a result,
        the first refusal, by profile name, is the answer. Raises `RefusedError`: 503 without
        candidates, 429 when the filters leave nothing or no profile ran.
        """
        if not candidates:
            raise no_endpoints()
        results: dict[str, ProfileResult | None] = {}
        refusals: dict[str, RefusedError] = {}
        while names := self._next(request, results, attributes):
            for name in names:
                try:
                    results[name] = self._profiles[name].run(request, candidates, attributes, rng)
                except RefusedError as refusal:
                    results[name] = None
                    refusals[name] = refusal
        if not results:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, "no scheduling profile ran")
        try:
            return self._handler.process_results(request, results)
        except RefusedError as unresolved:
            if refusals:
                raise refusals[min(refusals)] from unresolved
            raise

    def _next(
        self,
        request: InferenceRequest,
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> list[str]:
        asked = self._handler.pick_profiles(request, self._names, results, attributes)
        return [name for name in asked if name in self._profiles and name not in results]
