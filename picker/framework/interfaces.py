"""Every contract a plugin can fulfil, readable in one sitting.

A plugin is a plain object; it may fulfil several contracts. All methods are synchronous, take
everything they need as arguments, and neither read a clock nor draw from a global random source.
Scores lie in [0, 1]; higher is better. `attributes` carries what data producers found out for this
one decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Protocol, runtime_checkable

from picker.framework.attributes import Attributes, DataKey
from picker.types import (
    Candidate,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    SchedulingResult,
    ScoredEndpoint,
)


@runtime_checkable
class Parser(Protocol):
    """Understands the bodies of some paths."""

    claims: tuple[str, ...]  # path suffixes; empty: takes every path nobody else claims

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Decode `body`. Raises `RefusedError` (400) naming the field that is wrong."""
        ...


@runtime_checkable
class DataProducer(Protocol):
    """Finds something out about request × candidates before scheduling."""

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """Write findings into `attributes`; return the request, possibly enriched
        (`dataclasses.replace`).
        """
        ...


@runtime_checkable
class ProducesData(Protocol):
    """Says what its `produce` writes. Names the findings that `ConsumesData` can ask for."""

    @property
    def produces(self) -> tuple[DataKey[Any], ...]:
        """The keys it writes."""
        ...


@runtime_checkable
class ConsumesData(Protocol):
    """Needs findings of data producers; missing producers are created when the picker starts."""

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The keys it reads; for a producer, those that must be written before it runs."""
        ...


@runtime_checkable
class Filter(Protocol):
    """Narrows the candidates of a profile."""

    def filter(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[Candidate]:
        """Return the candidates that may serve; an empty result refuses the request."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Rates candidates."""

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        """One score in [0, 1] per candidate, in the order given."""
        ...


@runtime_checkable
class Picker(Protocol):
    """Chooses among scored candidates."""

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """The chosen ones, best first; never empty for a non-empty input. `rng` breaks ties."""
        ...


@runtime_checkable
class ProfileHandler(Protocol):
    """Decides which scheduling profiles run and which result is primary."""

    @property
    def max_profiles(self) -> int | None:
        """How many profiles it can work with; None: any number."""
        ...

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
    ) -> Sequence[str]:
        """Names of the profiles to run next; empty when done."""
        ...

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        """Combine the results. Raises `RefusedError` when the primary profile found nothing."""
        ...


@runtime_checkable
class PreRequest(Protocol):
    """Told of each decision right before the request leaves for its endpoint."""

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Record the decision (a prefix index learns here)."""
        ...


@runtime_checkable
class EndpointObserver(Protocol):
    """Told when endpoints leave the pool or restart, so that state about them can be dropped."""

    def endpoint_removed(self, key: str) -> None:
        """Forget everything about the endpoint `key`."""
        ...
