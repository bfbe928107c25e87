"""Decisions with a real scheduler, and deciders that say what they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import PEER_ENDPOINT_KEY, Attributes
from picker.framework.disaggregation import (
    DECODE_ROLES,
    ENCODE_ROLES,
    PREFILL_ROLES,
    ROLE_LABEL,
)
from picker.plugins.filters.by_label import LabelValueFilter
from picker.scheduling.scheduler import Profile, Scheduler
from picker.types import Candidate, Endpoint, InferenceRequest, SchedulingResult, ScoredEndpoint

ROLES = {"decode": DECODE_ROLES, "prefill": PREFILL_ROLES, "encode": ENCODE_ROLES}


class EverybodyPicker:
    """Picks all, in the order given."""

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """All."""
        return scored


class SetDecider:
    """Says what it was made to say, and remembers what it was shown."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.shown: list[str | None] = []

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        """The set answer."""
        self.shown.append(None if picked is None else picked.endpoint.name)
        return self.answer


class Watch:
    """A filter that keeps all and writes down that its profile ran."""

    def __init__(self, profile: str, runs: list[tuple[str, str | None]], peer_key: Any) -> None:
        self._profile, self._runs, self._peer_key = profile, runs, peer_key

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """All."""
        peer = attributes.get(self._peer_key)
        self._runs.append((self._profile, None if peer is None else peer.endpoint.name))
        return candidates


@pytest.fixture
def decider() -> Callable[[bool], SetDecider]:
    """`decider(answer)`."""
    return SetDecider


@pytest.fixture
def pool() -> Callable[..., list[Candidate]]:
    """`pool("decode", "prefill", …)`: an endpoint per role, called `role0`, `role1`, …"""

    def make(*roles: str) -> list[Candidate]:
        return [
            Candidate(
                Endpoint(f"{role}{index}", f"10.0.0.{index}", 8000, labels={ROLE_LABEL: role})
            )
            for index, role in enumerate(roles)
        ]

    return make


@pytest.fixture
def schedule(
    request_for: Callable[..., InferenceRequest],
) -> Callable[..., tuple[SchedulingResult, list[tuple[str, str | None]]]]:
    """`schedule(handler, profiles, candidates)`: the decision, and the profiles that ran in order,
    each with the peer that it saw. A profile filters by the role that it is called after.
    """

    def decide(
        handler: Any,
        profiles: Sequence[str],
        candidates: Candidates,
        request: InferenceRequest | None = None,
    ) -> tuple[SchedulingResult, list[tuple[str, str | None]]]:
        runs: list[tuple[str, str | None]] = []
        made = [
            Profile(
                name,
                BoundPlugin(EverybodyPicker()),
                (
                    BoundPlugin(Watch(name, runs, PEER_ENDPOINT_KEY)),
                    BoundPlugin(
                        LabelValueFilter(ROLE_LABEL, ROLES.get(name.removeprefix("my-"), ()))
                    ),
                ),
                clock=lambda: 0.0,
            )
            for name in profiles
        ]
        bound = BoundPlugin(handler)
        scheduler = Scheduler(made, bound, bound, lambda: 0.0)
        asked = request or request_for()
        result = scheduler.schedule(asked, candidates, Attributes(), Random(1), [])
        return result, runs

    return decide
