"""What a screener that keeps requests on one revision can be asked besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from picker.types import Candidate, InferenceRequest


@runtime_checkable
class RevisionGate(Protocol):
    """Draws one of the revisions of a rollout for each request."""

    @property
    def gating_mode(self) -> str:
        """How it draws, as the configuration calls it."""
        ...

    def revision_shares(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """The chance of each revision that could be drawn; empty when none is complete."""
        ...

    def unmatched_selectors(
        self, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> Sequence[str]:
        """The strict header selectors, by name, that select none of `candidates`."""
        ...
