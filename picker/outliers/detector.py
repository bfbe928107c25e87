"""Detection of failing endpoints: an ejected one receives only probes until it has recovered.

    HEALTHY --failure--> SUSPECT --enough failures in a row--> EJECTED
    SUSPECT --success of a request that left since--> HEALTHY
    EJECTED --the probe fails--> EJECTED, and the next probe waits twice as long
    EJECTED --any request that left since succeeds--> ON_TRIAL
    ON_TRIAL --failure--> EJECTED, with the wait doubled from where it was
    ON_TRIAL --enough successes in a while--> HEALTHY

The beginning of a response decides: the proxy does not distinguish a dead endpoint, a disconnecting
client, and the end (measured). Each ejection or trial begins an epoch; answers to earlier requests
are stale. Failures arrive later than requests leave, so an endpoint with failures, or without a
success, may have no more requests under way than would eject it. After `UNSEEN_ATTEMPTS` without a
response nothing is held back (docs/decisions/0025). Times and randomness are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random

import msgspec

from picker.outliers.breaker import (
    Answer,
    AnswerKind,
    AttemptResult,
    Breaker,
    EndpointState,
    OutlierSettings,
    kind_of,
)
from picker.pool.datastore import EndpointChanges
from picker.types import Candidate, Endpoint, FinishCause


class ProbeResult(Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"  # without an answer that concerns the endpoint


class EndpointHealthView(msgspec.Struct, frozen=True):
    """An endpoint's breaker, for `/endpoints`; `next_probe_seconds` is from now."""

    state: EndpointState
    consecutive_failures: int
    ejections: int
    next_probe_seconds: float | None = None


class OutlierWatcher:
    """Learns of every transition; must be quick and not raise. This base class ignores them."""

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None: ...

    def probed(self, key: str, result: ProbeResult) -> None: ...

    def returned(self, key: str) -> None: ...

    def counted(self, num_ejected: int) -> None:
        """Called when the number of ejected endpoints changes."""


UNSEEN_ATTEMPTS = 100
_OUR_OWN = (FinishCause.REFUSED, FinishCause.EVICTED)  # the picker itself set the status


class Attempt(msgspec.Struct, eq=False):
    """One request at one endpoint; `responded` is called at most once, then `ended` once."""

    detector: OutlierDetector
    breaker: Breaker
    endpoint: Endpoint
    is_bodyless: bool
    left_at: float
    epoch: int
    suspicion: int
    _is_judged: bool = False
    _was_seen: bool = False

    @property
    def is_current(self) -> bool:
        return self.breaker.epoch == self.epoch

    @property
    def is_late(self) -> bool:
        return self.breaker.suspicion == self.suspicion

    def responded(self, answer: Answer, now_seconds: float) -> None:
        if not self._is_judged:
            self._is_judged = True
            self._was_seen = answer.status is not None
            self.detector.judge(self, answer, now_seconds)

    def ended(self, cause: FinishCause, answer: Answer, now_seconds: float) -> None:
        """Process the end of the request; `answer` counts unless `responded` was called before."""
        if not self._is_judged and answer.status is not None and cause not in _OUR_OWN:
            self.responded(answer, now_seconds)
        self.detector.leave(self, self._was_seen, cause, now_seconds)


class OutlierDetector:
    """Sole owner of the breakers of a pool's endpoints. Event-loop thread only."""

    def __init__(
        self,
        settings: OutlierSettings | None = None,
        watcher: OutlierWatcher | None = None,
        rng: Random | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings or OutlierSettings()
        self._watcher = watcher or OutlierWatcher()
        self._draw = (lambda: 0.0) if rng is None else rng.random
        self._keys: dict[str, str] = {}  # of the endpoints in the pool, by their address
        self._members: set[str] = set()  # the same keys
        self._breakers: dict[str, Breaker] = {}  # of those that have received a request
        self.held: set[str] = set()  # read-only for others
        self._ejected: dict[str, Breaker] = {}
        self._settled = settled
        self._filled: dict[str, Breaker] = {}  # unproven endpoints that should answer soon
        self._is_burst = False  # these have left no endpoint free
        self._num_unseen = 0  # attempts without a response since the last response
        self._probes: dict[str, Attempt] = {}

    # Called for the pool

    def pool_changed(self, changes: EndpointChanges) -> None:
        """Follow the pool; drop the breakers of endpoints that left or restarted."""
        for endpoint in changes.removed:
            if self._keys.get(endpoint.host_port) == endpoint.key:
                del self._keys[endpoint.host_port]
            self._members.discard(endpoint.key)
            self._forget(endpoint.key)
        for endpoint in (*changes.added, *changes.updated):
            self._keys[endpoint.host_port] = endpoint.key
            self._members.add(endpoint.key)
        for key in changes.restarted:
            self._forget(key)

    # Called for decisions

    def usable(self, candidates: Sequence[Candidate], now_seconds: float) -> Sequence[Candidate]:
        """Select the candidates for requests, in their order; at least one, if there are any."""
        held = self.held
        if not held:
            return candidates
        # `candidate.key` would double the time.
        free = [candidate for candidate in candidates if candidate.endpoint.key not in held]
        if free:
            return free
        breakers = self._breakers
        blameless = [
            candidate
            for candidate in candidates
            if breakers[candidate.key].state is not EndpointState.EJECTED
        ]
        without_failure = [one for one in blameless if not breakers[one.key].failures]
        # An ejected endpoint rather than none: a wrong verdict would be an outage.
        return without_failure or blameless or candidates

    def probe(self, candidates: Sequence[Candidate], now_seconds: float) -> Candidate | None:
        """Return an ejected candidate that is due; the next request to it is the probe."""
        if not self._ejected:
            return None
        due = {key: one for key, one in self._ejected.items() if one.is_due(now_seconds)}
        if not due:
            return None
        return min(
            (candidate for candidate in candidates if candidate.key in due),
            key=lambda candidate: due[candidate.key].next_probe_at,
            default=None,
        )

    def is_unsure(self, now_seconds: float) -> bool:
        """Return whether a burst has just filled an unproven pool and no answer has arrived yet."""
        if not self._filled:
            return False
        for breaker in tuple(self._filled.values()):
            if breaker.is_silent_since_filled(now_seconds):
                self._refresh(breaker)
                self._not_filled(breaker.key)
        return self._is_burst

    def left(self, endpoint: Endpoint, now_seconds: float, is_bodyless: bool = False) -> Attempt:
        """Count a request that leaves; one that `is_bodyless` does not reach the engine."""
        breaker = self._breakers.get(endpoint.key)
        if breaker is None:
            breaker = Breaker(endpoint.key, self._settings)
            if endpoint.key in self._members:
                self._breakers[endpoint.key] = breaker
        epoch, suspicion = breaker.epoch, breaker.suspicion
        attempt = Attempt(self, breaker, endpoint, is_bodyless, now_seconds, epoch, suspicion)
        if not breaker.leaves(now_seconds):
            if not is_bodyless and breaker.is_due(now_seconds):
                breaker.probe_leaves(now_seconds)
                self._probes[breaker.key] = attempt
            self._refresh(breaker)
        return attempt

    # Called by attempts

    def judge(self, attempt: Attempt, answer: Answer, now_seconds: float) -> None:
        if answer.status is None:
            return
        was_blind, self._num_unseen = self._num_unseen >= UNSEEN_ATTEMPTS, 0
        if was_blind:
            for breaker in self._breakers.values():
                self._refresh(breaker)
        other_key = None if answer.served_by is None else self._other(attempt, answer.served_by)
        if other_key is None:
            self._take_in(attempt, kind_of(answer), now_seconds)
            return
        # The proxy retried elsewhere: the picked one failed, perhaps only because it is full.
        self._take_in(attempt, AnswerKind.REJECTED, now_seconds)
        other = self._breakers.get(other_key)
        if other is not None and other.state is not EndpointState.EJECTED:
            self._apply(other, AttemptResult(kind_of(answer), attempt.is_bodyless), now_seconds)

    def leave(
        self, attempt: Attempt, was_seen: bool, cause: FinishCause, now_seconds: float
    ) -> None:
        breaker, is_current = attempt.breaker, attempt.is_current
        if is_current:
            breaker.under_way -= 1
        if not breaker.is_as_good_as_any:
            if is_current and attempt.is_late:
                breaker.tried_ends()
            if self._probes.get(breaker.key) is attempt:
                self._probe_over(breaker, ProbeResult.UNKNOWN)
            if is_current and breaker.eject_if_due(now_seconds, self._draw):
                self._note_ejection(breaker, now_seconds)
            self._refresh(breaker)
        if not was_seen and cause not in _OUR_OWN:
            self._num_unseen += 1
            # Without any response there is no evidence against an endpoint either.
            if self._num_unseen == UNSEEN_ATTEMPTS:
                for key in tuple(self._breakers):
                    self._forget(key)

    # Views

    def views(self, now_seconds: float) -> Mapping[str, EndpointHealthView]:
        """Return the breakers that are not healthy, or have been open, by endpoint key."""
        return {
            key: EndpointHealthView(
                state=breaker.state,
                consecutive_failures=breaker.failures,
                ejections=breaker.ejections,
                next_probe_seconds=max(0.0, breaker.next_probe_at - now_seconds)
                if breaker.state is EndpointState.EJECTED
                else None,
            )
            for key, breaker in self._breakers.items()
            if breaker.state is not EndpointState.HEALTHY or breaker.ejections
        }

    def last_success(self, key: str) -> float:
        """Return the time of an endpoint's last success; 0 if it is unknown."""
        breaker = self._breakers.get(key)
        return 0.0 if breaker is None else breaker.good_at

    def check_integrity(self) -> None:
        if not self._filled.keys() <= self._breakers.keys() or self._is_burst > bool(self._filled):
            raise AssertionError("answers are awaited of no endpoint")
        if not self._filled.keys() <= self.held:
            raise AssertionError("an endpoint is filled and not held back")
        for breaker in self._breakers.values():
            breaker.check_integrity()
        held = {key for key, one in self._breakers.items() if one.is_held_back(self._sees)}
        if held != self.held:
            raise AssertionError(f"{self.held} are held back instead of {held}")
        ejected = {
            key: one for key, one in self._breakers.items() if one.state is EndpointState.EJECTED
        }
        if ejected != self._ejected:
            raise AssertionError(f"{set(self._ejected)} count as ejected, not {set(ejected)}")
        if not self._breakers.keys() <= self._members:
            raise AssertionError("an endpoint is remembered that is not in the pool")
        for key, attempt in self._probes.items():
            if attempt.breaker is not self._ejected.get(key) or not attempt.is_current:
                raise AssertionError(f"a probe of {key} is out that is not current")

    @property
    def _sees(self) -> bool:
        return self._num_unseen < UNSEEN_ATTEMPTS

    def _other(self, attempt: Attempt, served_by: str) -> str | None:
        """Return the key of the endpoint that answered instead of the one picked, if any."""
        if served_by == attempt.endpoint.host_port:
            return None
        key = self._keys.get(served_by)
        return None if key == attempt.breaker.key else key

    def _take_in(self, attempt: Attempt, verdict: AnswerKind, now: float) -> None:
        breaker = attempt.breaker
        if verdict is AnswerKind.SUCCESS and breaker.is_as_good_as_any:
            breaker.good_at = now
            return  # the usual case
        if attempt.is_current:
            is_probe = self._probes.get(breaker.key) is attempt
            took = now - attempt.left_at
            self._apply(
                breaker,
                AttemptResult(verdict, attempt.is_bodyless, is_probe, attempt.is_late, took),
                now,
            )

    def _apply(self, breaker: Breaker, finding: AttemptResult, now: float) -> None:
        if finding.verdict is AnswerKind.SUCCESS and not finding.is_bodyless:
            self._succeed(breaker, finding, now)
        elif finding.verdict in (AnswerKind.FAILURE, AnswerKind.REJECTED):
            if breaker.failed(finding, now, self._draw):
                self._note_ejection(breaker, now)
            elif finding.is_probe:
                self._probe_over(breaker, ProbeResult.FAILURE)
        self._refresh(breaker)

    def _succeed(self, breaker: Breaker, finding: AttemptResult, now: float) -> None:
        before = breaker.state
        if finding.is_probe:
            self._probe_over(breaker, ProbeResult.SUCCESS)
        breaker.succeeded(finding, now)
        if before is EndpointState.EJECTED:
            self._probes.pop(breaker.key, None)  # another request was faster
        if before is EndpointState.ON_TRIAL and breaker.state is EndpointState.HEALTHY:
            self._watcher.returned(breaker.key)

    def _probe_over(self, breaker: Breaker, result: ProbeResult) -> None:
        del self._probes[breaker.key]
        breaker.probe_left_at = None
        self._watcher.probed(breaker.key, result)

    def _note_ejection(self, breaker: Breaker, now: float) -> None:
        self._watcher.ejected(breaker.key, breaker.failures, breaker.next_probe_at - now)

    def _refresh(self, breaker: Breaker) -> None:
        key = breaker.key
        if self._breakers.get(key) is not breaker:
            return
        if breaker.is_held_back(self._sees):
            self.held.add(key)
        else:
            self.held.discard(key)
        if self._sees and breaker.is_filled:
            self._filled[key] = breaker
            self._is_burst |= 1 < len(self._members) <= len(self.held)
        else:
            self._not_filled(key)
        if (breaker.state is EndpointState.EJECTED) != (key in self._ejected):
            if breaker.state is EndpointState.EJECTED:
                self._ejected[key] = breaker
            else:
                del self._ejected[key]
            self._watcher.counted(len(self._ejected))

    def _not_filled(self, key: str) -> None:
        if self._filled.pop(key, None) and not self._filled and self._is_burst:
            self._is_burst = False
            self._settled()

    def _forget(self, key: str) -> None:
        self._not_filled(key)
        self._breakers.pop(key, None)
        self._probes.pop(key, None)
        self.held.discard(key)
        if self._ejected.pop(key, None) is not None:
            self._watcher.counted(len(self._ejected))
