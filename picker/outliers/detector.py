"""Which endpoints have failed lately: they are sent nothing but a probe until they are well again.

Theory of operation
-------------------
Every request that leaves for an endpoint is a `Visit`. The beginning of its response is the verdict
on the endpoint (`breaker.verdict_of`); a visit that ends without one has told nothing.

    HEALTHY --failure--> SUSPECT --enough failures in a row--> EJECTED
    SUSPECT --success of a request that left since--> HEALTHY
    EJECTED --the probe fails--> EJECTED, and the next probe waits twice as long
    EJECTED --any request that left since goes well--> ON_TRIAL
    ON_TRIAL --failure--> EJECTED, and the wait goes on from where it was, doubled
    ON_TRIAL --enough successes in a while--> HEALTHY

A broken server goes on with what it began, so a success of a request that left before the first
failure does not clear it, unless what left since stays out longer than a failure would.

What a request finds that left before its endpoint was ejected, or came on trial, is stale and tells
nothing: each of these changes begins an epoch, and a visit belongs to the one that it left in.

A probe is a request of a client: the next one that may go to the endpoint, one at a time, and never
two within a second. Whoever decides asks `probe` first, and then chooses among those `usable`.

Failures come back later than requests are sent. So an endpoint with k failures in a row may have,
of what left since the first, no more under way than the failures that are left to its ejection, and
one that has not answered well since it joined or restarted no more than all of them: what it can
spoil before it is ejected is that much, however many requests come at once. These are preferences
among endpoints, not bounds: `usable` never leaves none of some. When all are held back it takes
those that have done nothing, then those that are not ejected, then all.

The proxy may have tried elsewhere before it answered. When it says who has served, and that is
another endpoint of the pool, then the one that was picked has failed, and the answer is the
other's. A response that breaks off has begun well; the proxy shows no difference between an
endpoint that dies in the middle, a client that leaves, and the end (measured). What the dead
endpoint is sent next tells.

Where responses are not shown to the picker at all nothing can be learnt: after `UNSEEN_VISITS`
without a response everything is forgotten and nothing held back, until the next response.

Of a crowd that comes to an idle pool all would be decided before the first answer is there. While
`is_unsure` says so, whoever decides should wait for `settled`, or for the patience.

Pure: times are arguments, and so is what draws at random. One process remembers for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import Protocol

import msgspec

from picker.outliers.breaker import (
    Answer,
    EndpointRecord,
    EndpointState,
    Finding,
    HealthSettings,
    Verdict,
    verdict_of,
)
from picker.pool.datastore import EndpointChanges
from picker.types import Candidate, Endpoint, FinishCause


class ProbeResult(Enum):
    """What a probe has found."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"  # it ended without a word about the endpoint


class RememberedHealth(msgspec.Struct, frozen=True):
    """How an endpoint has answered. `next_probe_seconds` is from now; None unless it is ejected."""

    state: EndpointState
    consecutive_failures: int
    ejections: int
    next_probe_seconds: float | None = None


class HealthWatcher(Protocol):
    """Told of what changes; must be quick and must not raise."""

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None:
        """After so many failures in a row; the first probe is due after the wait."""
        ...

    def probed(self, key: str, result: ProbeResult) -> None:
        """A probe of an ejected endpoint has found something, or has ended without."""
        ...

    def returned(self, key: str) -> None:
        """It was ejected and is as good as any again."""
        ...

    def counted(self, num_ejected: int) -> None:
        """So many are ejected now."""
        ...


class NoWatcher:
    """Watches nothing."""

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None:
        """Ignore."""

    def probed(self, key: str, result: ProbeResult) -> None:
        """Ignore."""

    def returned(self, key: str) -> None:
        """Ignore."""

    def counted(self, num_ejected: int) -> None:
        """Ignore."""


UNSEEN_VISITS = 100
_OUR_OWN = (FinishCause.REFUSED, FinishCause.EVICTED)  # the status is the picker's then


def _nobody_waits() -> None:
    """Tell nobody."""


class Visit:
    """One request at one endpoint. `ended` is called once; `responded` before it, at most once."""

    __slots__ = (
        "_is_judged",
        "_memory",
        "_was_seen",
        "epoch",
        "host_port",
        "is_bare",
        "left_at",
        "record",
        "suspicion",
    )

    def __init__(
        self, memory: HealthMemory, record: EndpointRecord, host_port: str, is_bare: bool
    ) -> None:
        self._memory = memory
        self._is_judged = False
        self._was_seen = False
        self.left_at = 0.0
        self.record = record
        self.epoch = record.epoch
        self.suspicion = record.suspicion
        self.host_port = host_port
        self.is_bare = is_bare

    @property
    def is_current(self) -> bool:
        """Whether what it finds is news."""
        return self.record.epoch == self.epoch

    @property
    def is_late(self) -> bool:
        """Whether it left when its endpoint had failed already."""
        return self.record.suspicion == self.suspicion

    def responded(self, answer: Answer, now_seconds: float) -> None:
        """The response has begun."""
        if not self._is_judged:
            self._is_judged = True
            self._was_seen = answer.status is not None
            self._memory.judge(self, answer, now_seconds)

    def ended(self, cause: FinishCause, answer: Answer, now_seconds: float) -> None:
        """The request is over; `answer` counts where no other has."""
        if cause not in _OUR_OWN and answer.status is not None:
            self.responded(answer, now_seconds)
        self._memory.leave(self, self._was_seen, cause, now_seconds)


class HealthMemory:
    """Sole owner of the records of the endpoints in the pool. Event-loop thread only."""

    def __init__(
        self,
        settings: HealthSettings | None = None,
        watcher: HealthWatcher | None = None,
        rng: Random | None = None,
        settled: Callable[[], None] = _nobody_waits,
    ) -> None:
        self._settings = settings or HealthSettings()
        self._watcher = watcher or NoWatcher()
        self._rng = rng
        self._keys: dict[str, str] = {}  # of the endpoints in the pool, by their address
        self._members: set[str] = set()  # the same keys
        self._records: dict[str, EndpointRecord] = {}  # of those that were sent something
        self._held: set[str] = set()
        self._ejected: dict[str, EndpointRecord] = {}
        self._settled = settled
        self._filled: dict[str, EndpointRecord] = {}  # new ones that should answer any moment
        self._is_burst = False  # whether these have left nobody free
        self._num_unseen = 0  # visits without a response since the last response
        self._probes: dict[str, Visit] = {}

    # What the pool does

    def pool_changed(self, changes: EndpointChanges) -> None:
        """Endpoints have come or gone; those that left are forgotten."""
        for endpoint in changes.removed:
            if self._keys.get(endpoint.host_port) == endpoint.key:
                del self._keys[endpoint.host_port]
            self._members.discard(endpoint.key)
            self._forget(endpoint.key)
        for endpoint in (*changes.added, *changes.updated):
            self._keys[endpoint.host_port] = endpoint.key
            self._members.add(endpoint.key)

    def endpoint_removed(self, key: str) -> None:
        """The endpoint has left or restarted: what was known of it is not true any more."""
        self._forget(key)

    # What a decision asks

    def usable(self, candidates: Sequence[Candidate], now_seconds: float) -> Sequence[Candidate]:
        """Those that should be sent requests, in their order; never none of some."""
        held = self._held
        if not held:
            return candidates
        # Not by `candidate.key`, which takes as long again.
        free = [candidate for candidate in candidates if candidate.endpoint.key not in held]
        if free:
            return free
        records = self._records
        blameless = [
            candidate
            for candidate in candidates
            if records[candidate.key].state is not EndpointState.EJECTED
        ]
        without_failure = [one for one in blameless if not records[one.key].failures]
        return without_failure or blameless or candidates

    def probe(self, candidates: Sequence[Candidate], now_seconds: float) -> Candidate | None:
        """The one of `candidates` that this request should try out, if any is due for that.

        Nothing is noted; the request that then leaves for it is the probe.
        """
        due = {key: one for key, one in self._ejected.items() if one.is_due(now_seconds)}
        if not due:
            return None
        longest = min(
            (candidate for candidate in candidates if candidate.key in due),
            key=lambda candidate: due[candidate.key].next_probe_at,
            default=None,
        )
        return longest

    def is_unsure(self, now_seconds: float) -> bool:
        """Whether a crowd has just filled all of the pool and the first answers are not there."""
        if not self._filled:
            return False
        for record in tuple(self._filled.values()):
            if record.is_silent_since_filled(now_seconds):
                self._refresh(record)
                self._not_filled(record.key)
        return self._is_burst

    def left(self, endpoint: Endpoint, now_seconds: float, is_bare: bool = False) -> Visit:
        """A request has left for `endpoint`, which may differ in its port from the one picked.

        One that `is_bare` asks for nothing that an engine would have to do (a model list, say):
        it can fail, but it clears nobody.
        """
        record = self._records.get(endpoint.key)
        if record is None:
            record = EndpointRecord(endpoint.key, self._settings)
            if endpoint.key in self._members:
                self._records[endpoint.key] = record
        visit = Visit(self, record, endpoint.host_port, is_bare)
        visit.left_at = now_seconds
        record.leaves(now_seconds)
        if not record.is_as_good_as_any:
            if not is_bare and record.is_due(now_seconds):
                record.probe_leaves(now_seconds)
                self._probes[record.key] = visit
            self._refresh(record)
        return visit

    # What a visit tells

    def judge(self, visit: Visit, answer: Answer, now_seconds: float) -> None:
        """The response to a visit has begun."""
        if answer.status is None:
            return
        if self._num_unseen:
            self._see_responses()
        served_by = self._other(visit, answer)
        if served_by is None:
            self._tell(visit, verdict_of(answer), now_seconds)
            return
        self._tell(visit, Verdict.TURNED_AWAY, now_seconds)
        other = self._records.get(served_by)
        if other is not None and other.state is not EndpointState.EJECTED:
            self._apply(other, Finding(verdict_of(answer), visit.is_bare), now_seconds)

    def leave(self, visit: Visit, was_seen: bool, cause: FinishCause, now_seconds: float) -> None:
        """A visit is over."""
        record = visit.record
        if visit.is_current:
            record.under_way -= 1
        if not record.is_as_good_as_any:
            if visit.is_current and visit.is_late:
                record.tried_ends()
            if self._probes.get(record.key) is visit:
                self._probe_over(record, ProbeResult.UNKNOWN)
            if visit.is_current and record.settle(now_seconds, self._draw):
                self._note_ejection(record, now_seconds)
            self._refresh(record)
        if not was_seen and cause not in _OUR_OWN:
            self._miss_a_response()

    # What others look at

    def views(self, now_seconds: float) -> Mapping[str, RememberedHealth]:
        """What is held against endpoints, by key; of those that are absent there is nothing."""
        return {
            key: RememberedHealth(
                state=record.state,
                consecutive_failures=record.failures,
                ejections=record.ejections,
                next_probe_seconds=max(0.0, record.next_probe_at - now_seconds)
                if record.state is EndpointState.EJECTED
                else None,
            )
            for key, record in self._records.items()
            if record.state is not EndpointState.HEALTHY or record.ejections
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` when what is remembered contradicts itself."""
        if not self._filled.keys() <= self._records.keys() or self._is_burst > bool(self._filled):
            raise AssertionError("answers are awaited of nobody")
        for record in self._records.values():
            record.check_integrity()
        held = {key for key, one in self._records.items() if one.is_held_back(self._sees)}
        if held != self._held:
            raise AssertionError(f"{self._held} are held back instead of {held}")
        ejected = {
            key: one for key, one in self._records.items() if one.state is EndpointState.EJECTED
        }
        if ejected != self._ejected:
            raise AssertionError(f"{set(self._ejected)} count as ejected, not {set(ejected)}")
        if not self._records.keys() <= self._members:
            raise AssertionError("an endpoint is remembered that is not in the pool")
        for key, visit in self._probes.items():
            if visit.record is not self._ejected.get(key) or not visit.is_current:
                raise AssertionError(f"a probe of {key} is out that nobody waits for")

    @property
    def _sees(self) -> bool:
        return self._num_unseen < UNSEEN_VISITS

    def _other(self, visit: Visit, answer: Answer) -> str | None:
        """The key of the endpoint that has answered instead of the one visited."""
        served_by = answer.served_by
        if served_by is None or served_by == visit.host_port:
            return None
        key = self._keys.get(served_by)
        return None if key == visit.record.key else key

    def _tell(self, visit: Visit, verdict: Verdict, now: float) -> None:
        """What a visit has found counts, unless it is stale."""
        record = visit.record
        if verdict is Verdict.SUCCESS and record.is_as_good_as_any:
            record.good_at = now
            return  # as nearly always
        if visit.is_current:
            is_probe = self._probes.get(record.key) is visit
            took = now - visit.left_at
            self._apply(record, Finding(verdict, visit.is_bare, is_probe, visit.is_late, took), now)

    def _apply(self, record: EndpointRecord, finding: Finding, now: float) -> None:
        if finding.verdict is Verdict.SUCCESS and not finding.is_bare:
            self._succeed(record, finding, now)
        elif finding.verdict in (Verdict.FAILURE, Verdict.TURNED_AWAY):
            if record.failed(finding, now, self._draw):
                self._note_ejection(record, now)
            elif finding.is_probe:
                self._probe_over(record, ProbeResult.FAILURE)
        self._refresh(record)

    def _succeed(self, record: EndpointRecord, finding: Finding, now: float) -> None:
        before = record.state
        if finding.is_probe:
            self._probe_over(record, ProbeResult.SUCCESS)
        record.succeeded(finding, now)
        if before is EndpointState.EJECTED:
            self._probes.pop(record.key, None)  # of which nobody waits for the answer any more
        if before is EndpointState.ON_TRIAL and record.state is EndpointState.HEALTHY:
            self._watcher.returned(record.key)

    def _probe_over(self, record: EndpointRecord, result: ProbeResult) -> None:
        del self._probes[record.key]
        record.probe_left_at = None
        self._watcher.probed(record.key, result)

    def _note_ejection(self, record: EndpointRecord, now: float) -> None:
        self._watcher.ejected(record.key, record.failures, record.next_probe_at - now)

    def _refresh(self, record: EndpointRecord) -> None:
        """Keep up with what a record says of itself; one that was forgotten says nothing."""
        key = record.key
        if self._records.get(key) is not record:
            return
        if record.is_held_back(self._sees):
            self._held.add(key)
        else:
            self._held.discard(key)
        if self._sees and record.is_filled:
            self._filled[key] = record
            self._is_burst |= 1 < len(self._members) <= len(self._held)
        else:
            self._not_filled(key)
        if (record.state is EndpointState.EJECTED) != (key in self._ejected):
            if record.state is EndpointState.EJECTED:
                self._ejected[key] = record
            else:
                del self._ejected[key]
            self._watcher.counted(len(self._ejected))

    def _not_filled(self, key: str) -> None:
        if self._filled.pop(key, None) and not self._filled and self._is_burst:
            self._is_burst = False
            self._settled()

    def _forget(self, key: str) -> None:
        self._not_filled(key)
        self._records.pop(key, None)
        self._probes.pop(key, None)
        self._held.discard(key)
        if self._ejected.pop(key, None) is not None:
            self._watcher.counted(len(self._ejected))

    def _see_responses(self) -> None:
        if self._num_unseen >= UNSEEN_VISITS:
            self._num_unseen = 0
            for record in self._records.values():
                self._refresh(record)
        self._num_unseen = 0

    def _miss_a_response(self) -> None:
        self._num_unseen += 1
        if self._num_unseen == UNSEEN_VISITS:
            for key in tuple(self._records):
                self._forget(key)

    def _draw(self) -> float:
        return self._rng.random() if self._rng is not None else 0.0
