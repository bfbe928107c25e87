"""What is remembered of one endpoint's answers: verdicts in, states out.

A record moves on `succeeded` and `failed` alone, and says of itself whether it may be sent more. It
knows nothing of the pool; `health` puts the records of a pool together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

_FAILURES = frozenset({500, 502, 503, 504})
_TURNED_AWAY = 503


class EndpointState(Enum):
    """How an endpoint is taken to be."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # its last answers were failures
    EJECTED = "ejected"  # sent nothing but a probe now and then
    ON_TRIAL = "on-trial"  # a probe went well; a few requests at a time


class Verdict(Enum):
    """What an answer says of the endpoint that gave it."""

    SUCCESS = "success"
    FAILURE = "failure"
    TURNED_AWAY = "turned-away"  # a failure, but maybe only of a server that has its hands full
    NOTHING = "nothing"


class Answer(msgspec.Struct, frozen=True):
    """The beginning of a response, as far as it tells of the endpoint.

    `served_by` is the `ip:port` that the proxy says has given it. With `reached_nobody` the proxy
    says that it is its own and that no endpoint has seen the request.
    """

    status: int | None
    served_by: str | None = None
    reached_nobody: bool = False


class Finding(msgspec.Struct, frozen=True):
    """What one request has found. `is_late` if it left when the endpoint had failed already;
    `took_seconds` is from then to the answer.
    """

    verdict: Verdict
    is_bare: bool = False
    is_probe: bool = False
    is_late: bool = True
    took_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When an endpoint is ejected, and how it comes back; counts and seconds.

    `failures` in a row eject it; it is also how many requests may be under way at an endpoint of
    which nothing good is known yet. The waits between probes double from `first_wait_seconds` to
    `longest_wait_seconds`, and are drawn up to `jitter` longer. A probe that has not been answered
    for `probe_patience_seconds` does not keep the next one waiting. On trial an endpoint has at
    most `trial_requests` under way, until so many have gone well and `trial_seconds` have passed.
    One that has been back for `steady_seconds` is ejected as if for the first time. A request that
    is out for `silence_seconds`, and for as long as a failure took, is taken not to fail.
    An idle endpoint whose last good answer is older than `lapse_seconds` has to prove itself again.
    A crowd that fills all such endpoints waits for answers for `burst_patience_seconds` at most.
    """

    failures: int = 3
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 4.0
    jitter: float = 0.25
    probe_patience_seconds: float = 10.0
    trial_requests: int = 2
    trial_successes: int = 3
    trial_seconds: float = 2.0
    steady_seconds: float = 30.0
    probe_gap_seconds: float = 1.0
    silence_seconds: float = 0.1
    lapse_seconds: float = 2.0
    burst_patience_seconds: float = 0.2


def verdict_of(answer: Answer) -> Verdict:
    """What `answer` says of the endpoint that has given it.

    500, 502, 503 and 504 are what a broken server gives, or a proxy that cannot reach it. Other 5xx
    (501, say) and all of 4xx are about the request: they neither blame an endpoint nor clear it,
    for a server may read requests well and fail every one that it reads.
    """
    status = answer.status
    if status is None or answer.reached_nobody:
        return Verdict.NOTHING
    if status in _FAILURES:
        return Verdict.TURNED_AWAY if status == _TURNED_AWAY else Verdict.FAILURE
    return Verdict.SUCCESS if status < 400 else Verdict.NOTHING


class EndpointRecord:
    """Owns what is remembered of one endpoint since it joined or restarted.

    `epoch` counts the changes that make the answers to earlier requests stale news; `under_way` are
    the requests of this epoch that have not ended. `suspicion` counts the times that it became a
    suspect: what left since is late. `probe_left_at` is set while a probe is out.
    """

    __slots__ = (
        "_early_failures",
        "_late_failures",
        "_num_tried",
        "_settings",
        "_silent_seconds",
        "_tried_since",
        "ejections",
        "epoch",
        "filled_at",
        "good_at",
        "has_lapsed",
        "is_proven",
        "key",
        "next_probe_at",
        "probe_left_at",
        "returned_at",
        "state",
        "suspicion",
        "trial_since",
        "trial_successes",
        "turned_away",
        "under_way",
        "wait_seconds",
    )

    def __init__(self, key: str, settings: HealthSettings) -> None:
        self._settings = settings
        self.key = key
        self.state = EndpointState.HEALTHY
        self.epoch = 0
        self.under_way = 0
        self.suspicion = 0
        self._early_failures = 0  # in a row, of what left before the first of them was known
        self._late_failures = 0  # in a row, of what left since
        self._num_tried = 0  # late ones under way
        self._tried_since: float | None = None  # while there are any, when the first left
        self._silent_seconds = 0.0  # so long none of them may be out that fails as the first did
        self.turned_away = False  # whether the last one may have been for want of room
        self.is_proven = False  # whether it has answered well, and not too long ago
        self.has_lapsed = False  # whether it had, and that was too long ago
        self.good_at = 0.0  # when it last did
        self.filled_at = 0.0  # when it was last sent no more than it may before it has
        self.ejections = 0
        self.wait_seconds = settings.first_wait_seconds
        self.next_probe_at = 0.0
        self.probe_left_at: float | None = None
        self.trial_since = 0.0
        self.trial_successes = 0
        self.returned_at: float | None = None  # when it was last ejected and came back

    @property
    def failures(self) -> int:
        """In a row. What made it a suspect counts until it is cleared."""
        at_least = 1 if self.state is EndpointState.SUSPECT else 0
        return max(self._early_failures, at_least) + self._late_failures

    @property
    def is_as_good_as_any(self) -> bool:
        """Whether it has answered well and nothing is held against it: it is never held back."""
        return self.is_proven and self.state is EndpointState.HEALTHY

    @property
    def is_filled(self) -> bool:
        """Whether nothing is held against it, but it has all that it may before it has answered."""
        is_new = self.state is EndpointState.HEALTHY and not self.is_proven
        return is_new and self.under_way >= self._settings.failures

    def leaves(self, now: float) -> None:
        """A request leaves for it."""
        is_idle = self.under_way == 0
        if is_idle and self.is_as_good_as_any and now - self.good_at > self._settings.lapse_seconds:
            self.is_proven, self.has_lapsed = False, True
            self._num_tried = 0
        self.under_way += 1
        if not self.is_as_good_as_any:
            self._tried(now)

    def is_silent_since_filled(self, now: float) -> bool:
        """Whether it would have failed by now if it failed at once; then its word counts again."""
        if now - self.filled_at < self._settings.burst_patience_seconds:
            return False
        if self.has_lapsed:
            self.is_proven, self.has_lapsed = True, False
            self.good_at = now
        return True

    def is_held_back(self, sees_responses: bool) -> bool:
        """Whether it should be sent no request while others can take it.

        With k failures in a row it may have the `failures` that eject it less k under way, of what
        left since the first, so that more failures than these never come of sending on before the
        answers are there. So may one that has not answered well yet (k = 0; all that is under way
        counts), unless no response is ever seen.
        """
        settings = self._settings
        if self.state is EndpointState.EJECTED:
            return True
        if self.state is EndpointState.ON_TRIAL:
            return self.under_way >= settings.trial_requests
        if self.state is EndpointState.SUSPECT:
            under_way = self._num_tried if self.is_proven else self.under_way
            return under_way + self.failures >= settings.failures
        return sees_responses and not self.is_proven and self.under_way >= settings.failures

    def is_due(self, now: float) -> bool:
        """Whether a request should try it out."""
        if self.state is not EndpointState.EJECTED or now < self.next_probe_at:
            return False
        left_at = self.probe_left_at
        return left_at is None or now - left_at >= self._settings.probe_patience_seconds

    def probe_leaves(self, now: float) -> None:
        """The request that tries it out is on its way; the next one not before a while."""
        self.probe_left_at = now
        self.next_probe_at = now + max(self.wait_seconds, self._settings.probe_gap_seconds)

    def tried_ends(self) -> None:
        """A late request has ended."""
        self._num_tried -= 1
        if self._num_tried == 0:
            self._tried_since = None

    def succeeded(self, finding: Finding, now: float) -> None:
        """It has answered well a request of this epoch."""
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
        elif finding.is_late or not self.is_proven or self._is_silent(now):
            self.state = EndpointState.HEALTHY
            self._clear()
        else:
            self._early_failures = 0

    def failed(self, finding: Finding, now: float, draw: Callable[[], float]) -> bool:
        """It has failed a request of this epoch; whether that ejects it.

        `draw` says, from 0 to 1, how much of what a wait may be longer this one is.
        """
        if self.state is EndpointState.EJECTED:
            self._late_failures += 1
            if finding.is_probe:
                self._wait_longer()
                self._put_off(now, draw)
            return False
        self.turned_away = finding.verdict is Verdict.TURNED_AWAY
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
        silent = max(finding.took_seconds, self._settings.silence_seconds)
        self._silent_seconds = max(self._silent_seconds, silent)
        return self.settle(now, draw)

    def settle(self, now: float, draw: Callable[[], float]) -> bool:
        """Eject it if its failures are enough for that; whether they were.

        A server that turns requests away while it works on many others is not sent more, but not
        ejected either until it has done with these: under overload that would be the wrong thing.
        """
        settings = self._settings
        if self.state is not EndpointState.SUSPECT or self.failures < settings.failures:
            return False
        if self.turned_away and self.under_way > settings.failures:
            return False
        returned = self.returned_at
        if returned is not None and now - returned < settings.steady_seconds:
            self._wait_longer()
        else:
            self.wait_seconds = settings.first_wait_seconds
        self._eject(now, draw)
        return True

    def check_integrity(self) -> None:
        """Raise `AssertionError` when what is remembered contradicts itself."""
        settings = self._settings
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
        if self.under_way <= self._settings.failures:
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
        """Whether a late request is out longer than it would be if it failed."""
        since = self._tried_since
        quiet = since is not None and now - since >= self._silent_seconds
        return quiet and not self._late_failures

    def _has_stood_trial(self, now: float) -> bool:
        settings = self._settings
        lasted = now - self.trial_since >= settings.trial_seconds
        return lasted and self.trial_successes >= settings.trial_successes

    def _eject(self, now: float, draw: Callable[[], float]) -> None:
        self._early_failures, self._late_failures = 0, self.failures
        self._next_epoch(EndpointState.EJECTED)
        self.ejections += 1
        self._put_off(now, draw)

    def _put_off(self, now: float, draw: Callable[[], float]) -> None:
        wait = self.wait_seconds * (1.0 + self._settings.jitter * draw())
        self.next_probe_at = max(self.next_probe_at, now + wait)

    def _wait_longer(self) -> None:
        self.wait_seconds = min(2 * self.wait_seconds, self._settings.longest_wait_seconds)

    def _next_epoch(self, state: EndpointState) -> None:
        self.state = state
        self.epoch += 1
        self.under_way = 0
        self.probe_left_at = None
