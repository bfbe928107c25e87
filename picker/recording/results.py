"""Outcomes of decisions as lines, made alike by who records and by who replays."""

from __future__ import annotations

from collections.abc import Sequence

from picker.errors import RefusedError
from picker.recording.lines import ProfileLine, RefusalLine, ResultLine
from picker.recording.values import number
from picker.types import Candidate, ProfileResult, SchedulingResult, ScoredCandidates

FAILED = "failed"


def result_line(result: SchedulingResult, candidates: Sequence[Candidate]) -> ResultLine:
    """The outcome of a decision among `candidates`."""
    order = tuple([one.endpoint.key for one in candidates])
    return ResultLine(
        endpoints=tuple([(one.key, one.host_port) for one in result.endpoints]),
        primary_profile=result.primary_profile,
        profiles={name: _profile(one, order) for name, one in result.profiles.items()},
        set_headers=dict(result.set_headers),
    )


def refusal_line(error: Exception) -> RefusalLine:
    """Why there was no outcome: a refusal, or a plugin that failed."""
    if not isinstance(error, RefusedError):
        return RefusalLine(FAILED, type(error).__name__)
    reason = None if error.drop_reason is None else error.drop_reason.value
    return RefusalLine(error.code.value, error.message, reason)


def _profile(result: ProfileResult, order: tuple[str, ...]) -> ProfileLine:
    scored = result.scored
    if isinstance(scored, ScoredCandidates):
        keys = tuple([one.endpoint.key for one in scored.candidates])
        totals = tuple([number(total) for total in scored.totals])
    else:
        keys = tuple([one.candidate.key for one in scored])
        totals = tuple([number(one.score) for one in scored])
    return ProfileLine(
        picked=tuple([(one.candidate.key, number(one.score)) for one in result.picked]),
        totals=totals,
        scored=None if keys == order else keys,
    )
