"""The circuit breaker of one endpoint: closed, open, half-open.

Closed is HEALTHY, or SUSPECT after failures; open is EJECTED; half-open is ON_TRIAL. Only
`succeeded` and `failed` change the state. `detector` combines the breakers of a pool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

_FAILURES = frozenset({500, 502, 503, 504})
_TURNED_AWAY = 503


class EndpointState(Enum):
    """The state of a breaker, in the words of the endpoint pages."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # its last answers were failures
    EJECTED = "ejected"  # receives nothing but a probe now and then
    ON_TRIAL = "on-trial"  # a probe succeeded; a few requests at a time


class AnswerKind(Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    REJECTED = "rejected"  # a failure, but perhaps because the server is full
    NOTHING = "nothing"  # it concerns the request


class Answer(msgspec.Struct, frozen=True):
    """The beginning of a response; `served_by` is the `ip:port` that the proxy reports."""

    status: int | None
    served_by: str | None = None
    reached_no_endpoint: bool = False


class AttemptResult(msgspec.Struct, frozen=True):
    """The result of one request; `is_late`: it left after the first failure in a row was known."""

    verdict: AnswerKind
    is_bodyless: bool = False
    is_probe: bool = False
    is_late: bool = True
    took_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OutlierSettings:
    """The conditions for ejection and return, in counts and seconds."""

    failures: int = 3  # in a row eject; also the cap on requests at an unproven endpoint
    first_wait_seconds: float = 1.0  # before a probe; each further wait is twice as long
    longest_wait_seconds: float = 4.0
    jitter: float = 0.25  # the part by which it lengthens a wait at most
    probe_timeout_seconds: float = 10.0  # an unanswered probe delays the next one by no more
    trial_requests: int = 2  # under way on trial, at most
    trial_successes: int = 3  # these end the trial, after `trial_seconds`
    trial_seconds: float = 2.0
    steady_seconds: float = 30.0  # back for so long, it is ejected as if for the first time
    probe_gap_seconds: float = 1.0
    # A request that is out for so long, and for longer than a failure took, does not fail.
    silence_seconds: float = 0.1
    lapse_seconds: float = 2.0  # an idle endpoint with an older success is unproven again
    burst_wait_seconds: float = 0.2  # for the first answers of a full, unproven pool


def kind_of(answer: Answer) -> AnswerKind:
    """Classify what `answer` says about the health of its endpoint.

    A broken server, and a proxy that cannot reach it, answers 500, 502, 503 or 504. Other statuses
    are about the request: a server may parse requests correctly and fail every valid one.
    """
    status = answer.status
    if status is None or answer.reached_no_endpoint:
        return AnswerKind.NOTHING
    if status in _FAILURES:
        return AnswerKind.REJECTED if status == _TURNED_AWAY else AnswerKind.FAILURE
    return AnswerKind.SUCCESS if status < 400 else AnswerKind.NOTHING


@dataclass(slots=True, eq=False)
class Breaker:
    """Owns the state of one endpoint; a new `epoch` makes answers to earlier requests stale."""

    key: str
    settings: OutlierSettings
    state: EndpointState = EndpointState.HEALTHY
    epoch: int = 0
    under_way: int = 0
    suspicion: int = 0
    rejects: bool = False  # the last failure was a 503
    is_proven: bool = False  # it has succeeded recently
    has_lapsed: bool = False  # it has succeeded, but too long ago
    good_at: float = 0.0  # the last success
    filled_at: float = 0.0  # when it last received a request within the cap of the unproven
    ejections: int = 0
    wait_seconds: float = 0.0
    next_probe_at: float = 0.0
    probe_left_at: float | None = None
    trial_since: float = 0.0
    trial_successes: int = 0
    returned_at: float | None = None  # when it last returned from an ejection
    _early_failures: int = 0  # in a row, of requests that left before the first one was known
    _late_failures: int = 0  # in a row, of requests that left since
    _num_tried: int = 0  # late ones under way
    _tried_since: float | None = None  # when the first of these left
    _silent_seconds: float = 0.0  # a failure like the first takes this long

    def __post_init__(self) -> None:
        self.wait_seconds = self.settings.first_wait_seconds

    @property
    def failures(self) -> int:
        """Failures in a row; the one that made the endpoint a suspect counts until a success."""
        at_least = 1 if self.state is EndpointState.SUSPECT else 0
        return max(self._early_failures, at_least) + self._late_failures

    @property
    def is_as_good_as_any(self) -> bool:
        """True if the endpoint is healthy and proven; then it is never held back."""
        return self.is_proven and self.state is EndpointState.HEALTHY

    @property
    def is_filled(self) -> bool:
        """True if the endpoint is healthy, unproven, and at its cap of requests until a success."""
        is_new = self.state is EndpointState.HEALTHY and not self.is_proven
        return is_new and self.under_way >= self.settings.failures

    def leaves(self, now: float) -> bool:
        is_as_good = self.is_proven and self.state is EndpointState.HEALTHY
        is_idle = self.under_way == 0
        if is_idle and is_as_good and now - self.good_at > self.settings.lapse_seconds:
            self.is_proven, self.has_lapsed, is_as_good = False, True, False
            self._num_tried = 0
        self.under_way += 1
        if not is_as_good:
            self._tried(now)
        return is_as_good

    def is_silent_since_filled(self, now: float) -> bool:
        """Return whether a fast failure would be known by now; if so, trust a lapsed endpoint."""
        if now - self.filled_at < self.settings.burst_wait_seconds:
            return False
        if self.has_lapsed:
            self.is_proven, self.has_lapsed = True, False
            self.good_at = now
        return True

    def is_held_back(self, sees_responses: bool) -> bool:
        """Return whether requests should go to other endpoints, if there are any."""
        settings = self.settings
        if self.state is EndpointState.EJECTED:
            return True
        if self.state is EndpointState.ON_TRIAL:
            return self.under_way >= settings.trial_requests
        if self.state is EndpointState.SUSPECT:
            # Requests whose answers are not known yet must not exceed what an ejection costs.
            under_way = self._num_tried if self.is_proven else self.under_way
            return under_way + self.failures >= settings.failures
        return sees_responses and not self.is_proven and self.under_way >= settings.failures

    def is_due(self, now: float) -> bool:
        if self.state is not EndpointState.EJECTED or now < self.next_probe_at:
            return False
        left_at = self.probe_left_at
        return left_at is None or now - left_at >= self.settings.probe_timeout_seconds

    def probe_leaves(self, now: float) -> None:
        """Count a probe that leaves; the next one is not due before the wait is over."""
        self.probe_left_at = now
        self.next_probe_at = now + max(self.wait_seconds, self.settings.probe_gap_seconds)

    def tried_ends(self) -> None:
        self._num_tried -= 1
        if self._num_tried == 0:
            self._tried_since = None

    def succeeded(self, finding: AttemptResult, now: float) -> None:
        self.good_at = now
        if self.state is EndpointState.EJECTED:
            self._next_epoch(EndpointState.ON_TRIAL)
            self.trial_since = now
            self.trial_successes = 1
            self._clear()
        elif self.state is EndpointState.ON_TRIAL:
            self.trial_successes += 1
            if self._has_stood_trial(now):
                self.state = EndpointState.HEALTHY
                self.returned_at = now
        # A broken server finishes what it began, so an early success clears no suspect.
        elif finding.is_late or not self.is_proven or self._is_silent(now):
            self.state = EndpointState.HEALTHY
            self._clear()
        else:
            self._early_failures = 0

    def failed(self, finding: AttemptResult, now: float, draw: Callable[[], float]) -> bool:
        """Process a failure; return whether it ejects the endpoint. `draw` scales the jitter."""
        if self.state is EndpointState.EJECTED:
            self._late_failures += 1
            if finding.is_probe:
                self._wait_longer()
                self._put_off(now, draw)
            return False
        self.rejects = finding.verdict is AnswerKind.REJECTED
        if self.state is EndpointState.ON_TRIAL:
            self._late_failures += 1
            self._wait_longer()
            self._eject(now, draw)
            return True
        if self.state is EndpointState.HEALTHY:
            self._suspect()
            self._early_failures = 1
        elif finding.is_late:
            self._late_failures += 1
        else:
            self._early_failures += 1
        silent = max(finding.took_seconds, self.settings.silence_seconds)
        self._silent_seconds = max(self._silent_seconds, silent)
        return self.eject_if_due(now, draw)

    def eject_if_due(self, now: float, draw: Callable[[], float]) -> bool:
        """Eject a suspect with enough failures; return whether it did."""
        settings = self.settings
        if self.state is not EndpointState.SUSPECT or self.failures < settings.failures:
            return False
        # A server that rejects requests while it works on many others is overloaded, not broken.
        if self.rejects and self.under_way > settings.failures:
            return False
        returned = self.returned_at
        if returned is not None and now - returned < settings.steady_seconds:
            self._wait_longer()
        else:
            self.wait_seconds = settings.first_wait_seconds
        self._eject(now, draw)
        return True

    def check_integrity(self) -> None:
        settings = self.settings
        if self.under_way < 0 or self.failures < 0:
            raise AssertionError(f"{self.key}: {self.under_way} under way, {self.failures} failed")
        if self.state is EndpointState.SUSPECT and not 0 <= self._num_tried <= self.under_way:
            raise AssertionError(f"{self.key}: {self._num_tried} late of {self.under_way}")
        is_blamed = {EndpointState.HEALTHY: False, EndpointState.SUSPECT: True}.get(self.state)
        if is_blamed is not None and is_blamed != (self.failures > 0):
            raise AssertionError(f"{self.key}: {self.failures} failures while {self.state.value}")
        if not settings.first_wait_seconds <= self.wait_seconds <= settings.longest_wait_seconds:
            raise AssertionError(f"{self.key}: waits {self.wait_seconds} s for a probe")
        if self.probe_left_at is not None and self.state is not EndpointState.EJECTED:
            raise AssertionError(f"{self.key}: a probe is out while it is {self.state.value}")

    def _tried(self, now: float) -> None:
        if self.under_way <= self.settings.failures:
            self.filled_at = now
        if self._num_tried == 0:
            self._tried_since = now
        self._num_tried += 1

    def _suspect(self) -> None:
        self.state = EndpointState.SUSPECT
        self.suspicion += 1
        self._num_tried = 0
        self._tried_since = None
        self._silent_seconds = 0.0

    def _clear(self) -> None:
        self._early_failures = self._late_failures = 0
        self.is_proven, self.has_lapsed = True, False

    def _is_silent(self, now: float) -> bool:
        """Return whether a late request has been out for longer than a failure takes."""
        since = self._tried_since
        quiet = since is not None and now - since >= self._silent_seconds
        return quiet and not self._late_failures

    def _has_stood_trial(self, now: float) -> bool:
        settings = self.settings
        lasted = now - self.trial_since >= settings.trial_seconds
        return lasted and self.trial_successes >= settings.trial_successes

    def _eject(self, now: float, draw: Callable[[], float]) -> None:
        self._early_failures, self._late_failures = 0, self.failures
        self._next_epoch(EndpointState.EJECTED)
        self.ejections += 1
        self._put_off(now, draw)

    def _put_off(self, now: float, draw: Callable[[], float]) -> None:
        wait = self.wait_seconds * (1.0 + self.settings.jitter * draw())
        self.next_probe_at = max(self.next_probe_at, now + wait)

    def _wait_longer(self) -> None:
        self.wait_seconds = min(2 * self.wait_seconds, self.settings.longest_wait_seconds)

    def _next_epoch(self, state: EndpointState) -> None:
        self.state = state
        self.epoch += 1
        # Requests of earlier epochs are stale, and their ends are not counted.
        self.under_way = 0
        self.probe_left_at = None
