"""The settings of injected faults in the HTTP process, in the form of `/admin/config`. Pure."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from worker.errors import ConfigError, RequestError
from worker.sim.settings import (
    MAX_FACTOR,
    MAX_SECONDS,
    Kind,
    Setting,
    format_duration,
    parse_duration,
)

METRICS_PAGES = ("ok", "garbage", "truncated", "huge", "empty", "error", "redirect")
MIN_PERIOD_SECONDS = 0.001
FAKE_METRICS = ("running-requests", "waiting-requests", "kv-cache-usage")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer with the llm-d inference simulator's text; `%s` is the model."""

    status: int
    message: str
    param: str | None = None


FAILURES: Mapping[str, Failure] = {
    "rate_limit": Failure(
        429,
        "Rate limit reached for %s in organization org-xxx on requests per min (RPM): "
        "Limit 3, Used 3, Requested 1.",
    ),
    "invalid_api_key": Failure(401, "Incorrect API key provided."),
    "context_length": Failure(
        400,
        "This model's maximum context length is 4096 tokens. However, your messages resulted in"
        " 4500 tokens.",
        "messages",
    ),
    "server_error": Failure(503, "The server is overloaded or not ready yet."),
    "invalid_request": Failure(
        400, "Invalid request: missing required parameter 'model'.", "model"
    ),
    "model_not_found": Failure(404, "The model '%s-nonexistent' does not exist", "model"),
}
# The answer of a broken server, drawn only if named. Proxies retry a 503, but not this.
INTERNAL_ERROR = "internal_error"
ALL_FAILURES: Mapping[str, Failure] = {
    **FAILURES,
    INTERNAL_ERROR: Failure(500, "The server had an error while processing your request."),
}
_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


def failure_of(status: int, message: str, param: str | None = None) -> RequestError:
    """Build an error answer, with the llm-d inference simulator's type for the status."""
    fallback = "InternalServerError" if status >= 500 else "APIConnectionError"
    return RequestError(message, param, status, _ERROR_TYPES.get(status, fallback))


@dataclass(frozen=True, slots=True)
class Wave:
    """A number that varies between `start` and `end` with a period of `period_seconds`: `oscillate`
    (a sine), `ramp` (rises once, then stays at `end`), `rampreset` (a sawtooth) or `squarewave`.
    """

    shape: str
    start: float
    end: float
    period_seconds: float

    def at(self, seconds: float) -> float:
        phase = seconds / self.period_seconds
        if self.shape == "ramp":
            phase = min(phase, 1.0)
        elif self.shape != "oscillate":
            phase %= 1.0
        if self.shape == "squarewave":
            return self.start if phase < 0.5 else self.end
        share = (1 - math.cos(math.tau * phase)) / 2 if self.shape == "oscillate" else phase
        return self.start + (self.end - self.start) * share

    def __str__(self) -> str:
        return f"{self.shape}:{self.start:g}:{self.end:g}:{format_duration(self.period_seconds)}"


SHAPES = ("oscillate", "ramp", "rampreset", "squarewave")
FakeMetric = float | Wave


def parse_fake_metric(name: str, value: object) -> FakeMetric:
    """Parse a fake metric: a number (including "NaN" and "-Inf") or `shape:start:end:period`."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"fake-metrics.{name} must be a number or shape:start:end:period")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        raise ConfigError(f"fake-metrics.{name} is too large for a number") from None
    except ValueError:
        pass
    parts = str(value).split(":")
    problem = ConfigError(
        f"fake-metrics.{name} must be a number or shape:start:end:period with one of the shapes"
        f" {', '.join(SHAPES)}, got {value!r}"
    )
    if len(parts) != 4 or parts[0] not in SHAPES:
        raise problem
    try:
        start, end = float(parts[1]), float(parts[2])
    except ValueError:
        raise problem from None
    period = parse_duration(parts[3])
    if not period or not MIN_PERIOD_SECONDS <= period <= MAX_SECONDS:
        raise ConfigError(f"the period of fake-metrics.{name} must be from 1ms to a day")
    if not (abs(start) <= MAX_FACTOR and abs(end) <= MAX_FACTOR):  # refuses NaN too
        raise ConfigError(f"fake-metrics.{name} can vary between ±{MAX_FACTOR:g} at most")
    return Wave(parts[0], start, end, period)


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults in force. Rates are percentages of generation requests."""

    failure_injection_rate: float = 0.0
    failure_types: tuple[str, ...] = ()  # empty: all
    stall_rate: float = 100.0  # of requests with the two stalls below
    stall_before_seconds: float = 0.0
    stall_stream_seconds: float = 0.0
    stall_after_events: int = 1
    fake_metrics: Mapping[str, FakeMetric] = field(default_factory=dict)
    metrics_page: str = "ok"
    metrics_delay_seconds: float = 0.0
    metrics_bytes: int = 1 << 30
    metrics_redirect: str = ""
    slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Crash:
    """Ends the "engine" or the "worker" process after a number of requests or tokens; 0 is now."""

    target: str
    after_requests: int | None = None
    after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """A parsed partial configuration: faults, settings for the simulator, and one-time events."""

    faults: Faults
    settings: Mapping[str, object]
    hang_seconds: float | None = None
    crash: Crash | None = None


SETTINGS = (
    Setting("failure-injection-rate", "failure_injection_rate", kind=Kind.NUMBER, maximum=100.0),
    Setting("failure-types", "failure_types", kind=Kind.WORDS, choices=tuple(ALL_FAILURES)),
    Setting("stall-rate", "stall_rate", kind=Kind.NUMBER, maximum=100.0),
    Setting("stall-before", "stall_before_seconds"),
    Setting("stall-stream", "stall_stream_seconds"),
    Setting("stall-after-events", "stall_after_events", kind=Kind.COUNT),
    Setting("metrics-page", "metrics_page", kind=Kind.WORD, choices=METRICS_PAGES),
    Setting("metrics-delay", "metrics_delay_seconds"),
    Setting("metrics-bytes", "metrics_bytes", kind=Kind.COUNT),
    Setting("metrics-redirect", "metrics_redirect", kind=Kind.TEXT),
    Setting("slow", "slow", kind=Kind.NUMBER, is_open=True),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def parse_update(faults: Faults, body: bytes, settings: frozenset[str]) -> Update:
    """Parse a JSON object of changes; `settings` are names that the simulator parses later. Raise
    `ConfigError` that names the wrong setting.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the body must be a JSON object: {error}") from None
    fields: dict[str, Any] = {}
    left: dict[str, object] = {}
    hang: float | None = None
    crash: Crash | None = None
    for name, value in given.items():
        if name in _BY_NAME:
            fields[_BY_NAME[name].field] = _BY_NAME[name].parse(value)
        elif name == "fake-metrics":
            fields["fake_metrics"] = _fake_metrics(faults.fake_metrics, value)
        elif name == "hang":
            hang = Setting("hang", "").parse(value)
        elif name == "crash":
            crash = _parse_crash(value)
        elif name in settings:
            left[name] = value
        else:
            raise ConfigError(f"unknown setting {name!r}")
    return Update(dataclasses.replace(faults, **fields), left, hang, crash)


def _fake_metrics(current: Mapping[str, FakeMetric], value: Any) -> dict[str, FakeMetric]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("fake-metrics must be an object or null")
    fakes = dict(current)
    for name, fake in value.items():
        if name not in FAKE_METRICS:
            raise ConfigError(f"unknown fake-metrics.{name}; known are {', '.join(FAKE_METRICS)}")
        fakes.pop(name, None)
        if fake is not None:
            fakes[name] = parse_fake_metric(name, fake)
    return fakes


def _parse_crash(value: Any) -> Crash:
    if not isinstance(value, dict) or value.get("target") not in ("engine", "worker"):
        raise ConfigError('crash must be an object with a "target" of "engine" or "worker"')
    unknown = set(value) - {"target", "after-requests", "after-tokens"}
    if unknown:
        raise ConfigError(f"unknown crash.{min(unknown)}")
    counts = {
        name: Setting(f"crash.{name}", "", kind=Kind.COUNT).parse(value[name])
        for name in ("after-requests", "after-tokens")
        if name in value
    }
    # The HTTP process does not see tokens.
    if value["target"] == "worker" and "after-tokens" in counts:
        raise ConfigError("crash.after-tokens is the engine's; a worker counts requests")
    requests, tokens = counts.get("after-requests"), counts.get("after-tokens")
    if requests is None and tokens is None:
        # Without a count the crash is immediate.
        requests = 0
    return Crash(value["target"], requests, tokens)


def show(faults: Faults) -> dict[str, object]:
    """Return every fault under its name, in the form that `parse_update` takes."""
    fakes = faults.fake_metrics.items()
    return {
        **{setting.name: setting.show(faults) for setting in SETTINGS},
        "fake-metrics": {k: v if _is_plain(v) else str(v) for k, v in fakes},
    }


def _is_plain(value: FakeMetric) -> bool:
    # JSON has no NaN and no infinity: these are shown as text.
    return isinstance(value, float) and math.isfinite(value)
