"""What can go wrong on purpose: the HTTP side's faults, as `/admin/config` takes them. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from worker.errors import ConfigError
from worker.faults.sim_settings import MAX_FACTOR, MAX_SECONDS, format_duration, parse_duration

METRICS_PAGES = ("ok", "garbage", "truncated", "huge", "empty", "error", "redirect")
MIN_PERIOD_SECONDS = 0.001
_MAX_COUNT = (1 << 53) - 1  # what every reader of JSON has exactly
FAKE_METRICS = ("running-requests", "waiting-requests", "kv-cache-usage")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer, in the words of the llm-d inference simulator; `%s` is the model."""

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
# What a broken server says; never drawn unless it is named. Unlike a 503 no proxy tries it again.
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


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error answer."""
    fallback = "InternalServerError" if status >= 500 else "APIConnectionError"
    kind = _ERROR_TYPES.get(status, fallback)
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class Wave:
    """A number that changes with time: `oscillate` (a sine), `ramp` (to the end and stays),
    `rampreset` (again and again) or `squarewave` from `start` to `end` every `period_seconds`.
    """

    shape: str
    start: float
    end: float
    period_seconds: float

    def at(self, seconds: float) -> float:
        """Its value so long after it was set."""
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
Lie = float | Wave


def parse_lie(name: str, value: object) -> Lie:
    """A fake metric: a number ("NaN" and "-Inf" among them) or `shape:start:end:period`."""
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
    if not (abs(start) <= MAX_FACTOR and abs(end) <= MAX_FACTOR):  # not a number least of all
        raise ConfigError(f"fake-metrics.{name} can vary between ±{MAX_FACTOR:g} at most")
    return Wave(parts[0], start, end, period)


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that is wrong at the moment. Rates are percentages of generation requests."""

    failure_injection_rate: float = 0.0
    failure_types: tuple[str, ...] = ()  # empty: all
    stall_rate: float = 100.0  # of requests that the two stalls below hit
    stall_before_seconds: float = 0.0
    stall_stream_seconds: float = 0.0
    stall_after_events: int = 1
    fake_metrics: Mapping[str, Lie] = field(default_factory=dict)
    metrics_page: str = "ok"
    metrics_delay_seconds: float = 0.0
    metrics_bytes: int = 1 << 30
    metrics_redirect: str = ""
    slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Crash:
    """Ends a process: the "engine" or the "worker", after so many requests or tokens; 0 is now."""

    target: str
    after_requests: int | None = None
    after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """A partial configuration, taken apart: the new faults, settings of the simulator, and what is
    to happen once.
    """

    faults: Faults
    settings: Mapping[str, object]
    hang_seconds: float | None = None
    crash: Crash | None = None


Parser = Callable[[str, Any], Any]


def _number(least: float, most: float = math.inf) -> Parser:
    def parse(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
        return float(value)

    return parse


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ConfigError(f"{name} must be a whole number of 0 to {_MAX_COUNT}, got {value!r}")
    return value


def _duration(name: str, value: Any) -> float:
    seconds = parse_duration(value)
    if seconds is None or not 0 <= seconds <= MAX_SECONDS:
        most = format_duration(MAX_SECONDS)
        raise ConfigError(f"{name} must be a duration like 250ms, {most} at most, got {value!r}")
    return seconds


def _failure_types(name: str, value: Any) -> tuple[str, ...]:
    are_known = isinstance(value, list) and all(
        isinstance(item, str) and item in ALL_FAILURES for item in value
    )
    if not are_known:
        raise ConfigError(f"{name} must be a list of {', '.join(ALL_FAILURES)}")
    return tuple(value)


def _page(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in METRICS_PAGES:
        raise ConfigError(f"{name} must be one of {', '.join(METRICS_PAGES)}, got {value!r}")
    return str(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise ConfigError(f"{name} must be printable ASCII")
    return value


def _slow(name: str, value: Any) -> float:
    factor: float = _number(0.0, MAX_FACTOR)(name, value)
    if factor == 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return factor


# name in /admin/config → field of `Faults` and how it is parsed
_FIELDS: Mapping[str, tuple[str, Parser]] = {
    "failure-injection-rate": ("failure_injection_rate", _number(0, 100)),
    "failure-types": ("failure_types", _failure_types),
    "stall-rate": ("stall_rate", _number(0, 100)),
    "stall-before": ("stall_before_seconds", _duration),
    "stall-stream": ("stall_stream_seconds", _duration),
    "stall-after-events": ("stall_after_events", _count),
    "metrics-page": ("metrics_page", _page),
    "metrics-delay": ("metrics_delay_seconds", _duration),
    "metrics-bytes": ("metrics_bytes", _count),
    "metrics-redirect": ("metrics_redirect", _text),
    "slow": ("slow", _slow),
}


def parse_update(faults: Faults, body: bytes, settings: frozenset[str]) -> Update:
    """A JSON object that names what is to change; `settings` are the simulator's names, left for it
    to parse. Raises `ConfigError` that names what is wrong.
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
        if name in _FIELDS:
            target, parse = _FIELDS[name]
            fields[target] = parse(name, value)
        elif name == "fake-metrics":
            fields["fake_metrics"] = _fake_metrics(faults.fake_metrics, value)
        elif name == "hang":
            hang = _duration(name, value)
        elif name == "crash":
            crash = _parse_crash(value)
        elif name in settings:
            left[name] = value
        else:
            raise ConfigError(f"unknown setting {name!r}")
    return Update(dataclasses.replace(faults, **fields), left, hang, crash)


def _fake_metrics(current: Mapping[str, Lie], value: Any) -> dict[str, Lie]:
    """Lies on top of those told already; null ends them all, a null one ends that one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("fake-metrics must be an object or null")
    lies = dict(current)
    for name, lie in value.items():
        if name not in FAKE_METRICS:
            raise ConfigError(f"unknown fake-metrics.{name}; known are {', '.join(FAKE_METRICS)}")
        lies.pop(name, None)
        if lie is not None:
            lies[name] = parse_lie(name, lie)
    return lies


def _parse_crash(value: Any) -> Crash:
    if not isinstance(value, dict) or value.get("target") not in ("engine", "worker"):
        raise ConfigError('crash must be an object with a "target" of "engine" or "worker"')
    unknown = set(value) - {"target", "after-requests", "after-tokens"}
    if unknown:
        raise ConfigError(f"unknown crash.{min(unknown)}")
    counts = {
        name: _count(f"crash.{name}", value[name])
        for name in ("after-requests", "after-tokens")
        if name in value
    }
    if value["target"] == "worker" and "after-tokens" in counts:
        raise ConfigError("crash.after-tokens is the engine's; a worker counts requests")
    requests, tokens = counts.get("after-requests"), counts.get("after-tokens")
    if requests is None and tokens is None:
        requests = 0
    return Crash(value["target"], requests, tokens)


def show(faults: Faults) -> dict[str, object]:
    """Every fault under its name, in the form that `parse_update` takes."""
    shown: dict[str, object] = {}
    for name, (target, parse) in _FIELDS.items():
        value = getattr(faults, target)
        shown[name] = format_duration(value) if parse is _duration else value
    lies = faults.fake_metrics.items()
    shown["fake-metrics"] = {k: v if _is_plain(v) else str(v) for k, v in lies}
    return shown


def _is_plain(lie: Lie) -> bool:
    """Whether JSON has a number for it."""
    return isinstance(lie, float) and math.isfinite(lie)
