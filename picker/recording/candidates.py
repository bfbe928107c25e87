"""Converts candidates of successive decisions to their changes and back. Otherwise a pool of a
hundred endpoints would fill most of every line. Both sides remember the last state of an endpoint.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import astuple, replace

from picker.recording.lines import LAST_METRICS, CandidateChange
from picker.recording.values import NotReplayableError, recordable, restored
from picker.types import Candidate, EndpointMetrics

_INT_LIMIT = 2**63  # larger integers exceed those of most JSON readers


class CandidateDeltas:
    """Finds changes. Owns the recorded state of candidates."""

    def __init__(self) -> None:
        self._recorded: dict[str, Candidate] = {}
        self._before: Sequence[Candidate] | None = None
        self._order: tuple[str, ...] | None = None
        self._left_out: dict[str, None] = {}

    @property
    def not_replayable(self) -> tuple[str, ...]:
        """Return the names of values that the last call of `of` left out."""
        return tuple(self._left_out)

    def of(
        self, candidates: Sequence[Candidate]
    ) -> tuple[tuple[CandidateChange, ...], tuple[str, ...] | None]:
        """Return the changes of `candidates`, and all keys if these or their order changed."""
        self._left_out = {}
        before, new = self._before, candidates
        # The datastore replaces a candidate that changes, so identity suffices: no comparison of
        # fields, and for most decisions of a crowd nothing at all is new.
        if before is not None and len(candidates) == len(before):
            new = [one for one, old in zip(candidates, before, strict=True) if one is not old]
            if not new:
                return (), None
        self._before = candidates
        changes = []
        for one in new:
            old = self._recorded.get(one.endpoint.key)
            if old is not one:
                changes.append(self._change(old, one))
                self._recorded[one.endpoint.key] = one
        order = tuple([one.endpoint.key for one in candidates])
        if order == self._order:
            return tuple(changes), None
        self._order = order
        return tuple(changes), order

    def forget(self, key: str) -> None:
        """Drop an endpoint that left; if it returns, it is recorded completely."""
        self._recorded.pop(key, None)
        self._before = None  # else an equal list would hide that the endpoint is new

    def _change(self, old: Candidate | None, new: Candidate) -> CandidateChange:
        has_endpoint = old is None or old.endpoint is not new.endpoint
        has_last = old is None or old.last_metrics is not new.last_metrics
        has_metrics = old is None or has_last or old.metrics is not new.metrics
        is_loaded = old is None or old.inflight_requests != new.inflight_requests
        has_attributes = old is None or old.attributes is not new.attributes
        return CandidateChange(
            key=new.endpoint.key,
            endpoint=new.endpoint if has_endpoint else UNSET,
            metrics=self._metrics(new) if has_metrics else UNSET,
            last_metrics=self._recordable(new.last_metrics) if has_last else UNSET,
            inflight=new.inflight_requests if is_loaded else UNSET,
            attributes=self._attributes(new.attributes) if has_attributes else UNSET,
        )

    def _metrics(self, candidate: Candidate) -> EndpointMetrics | str | None:
        metrics = candidate.metrics
        # The usual case: fresh metrics are the last ones, and are recorded once.
        if metrics is not None and metrics is candidate.last_metrics:
            return LAST_METRICS
        return self._recordable(metrics)

    def _recordable(self, metrics: EndpointMetrics | None) -> EndpointMetrics | None:
        if metrics is None:
            return None
        if metrics.served is not None:
            metrics = replace(metrics, served=None)  # no decision depends on it
        if all(map(_fits_json, astuple(metrics))):
            return metrics
        self._left_out[type(metrics).__name__] = None
        return None

    def _attributes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        recorded = {}
        for name, value in attributes.items():
            try:
                recorded[name] = recordable(value)
            except NotReplayableError:
                self._left_out[name] = None
        return recorded


class CandidateMemory:
    def __init__(self) -> None:
        self._known: dict[str, Candidate] = {}
        self._order: tuple[str, ...] = ()

    def after(
        self, changed: Sequence[CandidateChange], order: tuple[str, ...] | None
    ) -> tuple[Candidate, ...]:
        """Return the candidates of the next decision. Raises `ValueError` for a missing part."""
        for change in changed:
            self._known[change.key] = _changed(self._known.get(change.key), change)
        if order is not None:
            self._order = order
        try:
            return tuple([self._known[key] for key in self._order])
        except KeyError as error:
            raise ValueError(f"nothing is known of the candidate {error}") from None

    def forget(self, key: str) -> None:
        self._known.pop(key, None)


def _changed(old: Candidate | None, change: CandidateChange) -> Candidate:
    endpoint = _either(change.endpoint, None if old is None else old.endpoint)
    if endpoint is None:
        raise ValueError(f"the candidate '{change.key}' first appears without its endpoint")
    last = _either(change.last_metrics, None if old is None else old.last_metrics)
    metrics = _either(change.metrics, None if old is None else old.metrics)
    if isinstance(metrics, str):
        if metrics != LAST_METRICS or last is None:
            raise ValueError(f"the metrics of '{change.key}' are '{metrics}'")
        metrics = last
    if isinstance(change.attributes, UnsetType):
        attributes: Mapping[str, Any] = {} if old is None else old.attributes
    else:
        attributes = {name: restored(value) for name, value in change.attributes.items()}
    inflight = _either(change.inflight, 0 if old is None else old.inflight_requests)
    return Candidate(endpoint, metrics, inflight, last, attributes)


def _either(changed: Any, known: Any) -> Any:
    return known if changed is UNSET else changed


def _fits_json(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -_INT_LIMIT <= value < _INT_LIMIT
