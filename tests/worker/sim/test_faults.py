"""Updates of faults are all or nothing, and every refusal names the setting and the reason."""

import json
import math

import pytest

from worker.api.http.exchange import error_body
from worker.errors import ConfigError
from worker.sim.faults import (
    ALL_FAILURES,
    FAILURES,
    Crash,
    Faults,
    Update,
    Wave,
    failure_of,
    parse_fake_metric,
    parse_update,
    show,
)

KNOWN = frozenset({"inter-token-latency"})


def update(faults: Faults | None = None, /, **settings: object) -> Update:
    """Underscores in names stand for dashes."""
    body = {name.replace("_", "-"): value for name, value in settings.items()}
    return parse_update(faults or Faults(), json.dumps(body).encode(), KNOWN)


def test_a_partial_update_leaves_the_rest() -> None:
    first = update(failure_injection_rate=25, failure_types=["rate_limit"])
    second = update(first.faults, stall_stream="1s", inter_token_latency="9ms")
    assert second.faults.failure_injection_rate == 25
    assert second.faults.failure_types == ("rate_limit",)
    assert second.faults.stall_stream_seconds == 1.0
    assert second.settings == {"inter-token-latency": "9ms"}
    assert second.crash is None


def test_shown_faults_parse_to_the_same_faults() -> None:
    faults = update(
        failure_injection_rate=12.5,
        failure_types=["model_not_found", "server_error"],
        stall_rate=50,
        stall_before="20ms",
        stall_after_events=3,
        metrics_page="huge",
        metrics_bytes=1000,
        metrics_delay="5s",
        slow=10,
        fake_metrics={
            "running-requests": 7,
            "waiting-requests": "ramp:0:10:1m30s",
            "kv-cache-usage": "NaN",
        },
    ).faults
    again = parse_update(Faults(), json.dumps(show(faults)).encode(), KNOWN).faults
    assert show(again) == show(faults)
    assert again.fake_metrics["waiting-requests"] == Wave("ramp", 0, 10, 90.0)
    usage = again.fake_metrics["kv-cache-usage"]
    assert isinstance(usage, float)
    assert math.isnan(usage)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "JSON object"),
        (b"{", "JSON object"),
        (b'{"failure-rate": 1}', "unknown setting 'failure-rate'"),
        (b'{"failure-injection-rate": 101}', "failure-injection-rate must be at most 100"),
        (b'{"failure-injection-rate": true}', "failure-injection-rate"),
        (b'{"failure-types": ["teapot"]}', "failure-types must be a list of rate_limit"),
        (b'{"failure-types": "rate_limit"}', "failure-types"),
        (b'{"stall-before": "long"}', "stall-before must be a duration"),
        (b'{"stall-after-events": 1.5}', "stall-after-events must be a whole number"),
        (b'{"metrics-page": "blank"}', "metrics-page must be one of ok"),
        (b'{"metrics-redirect": "a\\u0000b"}', "metrics-redirect must be printable"),
        (b'{"slow": 0}', "slow must be above 0"),
        (b'{"fake-metrics": 3}', "fake-metrics must be an object"),
        (b'{"fake-metrics": {"loras": 3}}', "unknown fake-metrics.loras"),
        (b'{"fake-metrics": {"running-requests": "up"}}', "running-requests must be a number or"),
        (b'{"fake-metrics": {"running-requests": "ramp:0:1:0s"}}', "running-requests"),
        (b'{"fake-metrics": {"running-requests": "ramp:x:1:1s"}}', "running-requests"),
        (b'{"fake-metrics": {"running-requests": "ramp:-1e308:1e308:1s"}}', "running-requests"),
        (b'{"fake-metrics": {"running-requests": "ramp:nan:1:1s"}}', "running-requests"),
        (b'{"fake-metrics": {"running-requests": "ramp:0:1:1e-310"}}', "running-requests"),
        (b'{"fake-metrics": {"running-requests": 1' + b"0" * 400 + b"}}", "running-requests"),
        (b'{"failure-types": [[]]}', "failure-types must be a list of rate_limit"),
        (b'{"failure-types": [{}, 1]}', "failure-types must be a list of rate_limit"),
        (b'{"metrics-page": {}}', "metrics-page must be one of"),
        (b'{"hang": 1e300}', "hang must be at most 86400s"),
        (b'{"hang": "25h"}', "hang must be at most 86400s"),
        (b'{"stall-before": "1e30"}', "stall-before must be at most 86400s"),
        (b'{"slow": 1e308}', "slow must be at most 1e"),
        (b'{"slow": 1' + b"0" * 400 + b"}", "slow must be a number, got 1"),
        (b'{"metrics-delay": 1' + b"0" * 400 + b"}", "metrics-delay must be a duration"),
        (b'{"crash": {"target": "worker", "after-requests": 1' + b"0" * 30 + b"}}", "whole number"),
        (b'{"fake-metrics": {"running-requests": [1]}}', "running-requests"),
        (b'{"hang": -1}', "hang must be at least 0"),
        (b'{"crash": "now"}', "crash must be an object"),
        (b'{"crash": {"target": "engine", "after": 1}}', "unknown crash.after"),
        (b'{"crash": {"target": "engine", "after-tokens": -1}}', "crash.after-tokens"),
        (b'{"crash": {"target": "worker", "after-tokens": 1}}', "is the engine's"),
    ],
)
def test_wrong_settings_are_named(body: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_update(Faults(), body, KNOWN)


@pytest.mark.parametrize(
    ("crash", "parsed"),
    [
        ({"target": "engine"}, Crash("engine", 0, None)),
        ({"target": "worker", "after-requests": 3}, Crash("worker", 3, None)),
        ({"target": "engine", "after-tokens": 9}, Crash("engine", None, 9)),
    ],
)
def test_a_crash_without_a_count_is_immediate(crash: dict[str, object], parsed: Crash) -> None:
    assert update(crash=crash).crash == parsed


def test_fake_metrics_merge_and_null_removes_one_or_all() -> None:
    faults = update(fake_metrics={"running-requests": 7, "kv-cache-usage": 0.5}).faults
    faults = update(faults, fake_metrics={"running-requests": None, "waiting-requests": 1}).faults
    assert faults.fake_metrics == {"kv-cache-usage": 0.5, "waiting-requests": 1.0}
    assert update(faults, fake_metrics=None).faults.fake_metrics == {}


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("oscillate", [2, 6, 10, 6, 2, 6]),
        ("ramp", [2, 4, 6, 8, 10, 10]),
        ("rampreset", [2, 4, 6, 8, 2, 4]),
        ("squarewave", [2, 2, 10, 10, 2, 2]),
    ],
)
def test_waves_have_their_published_shapes(shape: str, values: list[float]) -> None:
    wave = parse_fake_metric("running-requests", f"{shape}:2:10:4s")
    assert isinstance(wave, Wave)
    assert [wave.at(second) for second in range(6)] == pytest.approx(values)


def test_an_internal_error_is_drawn_only_if_named() -> None:
    """It is not among the llm-d simulator's failures, which are the default."""
    assert update(failure_types=["internal_error"]).faults.failure_types == ("internal_error",)
    assert ALL_FAILURES["internal_error"].status == 500
    assert "internal_error" not in FAILURES


def test_failures_match_the_llm_d_simulator() -> None:
    statuses = {name: failure.status for name, failure in FAILURES.items()}
    assert statuses == {
        "rate_limit": 429,
        "invalid_api_key": 401,
        "context_length": 400,
        "server_error": 503,
        "invalid_request": 400,
        "model_not_found": 404,
    }
    body = json.loads(
        error_body(failure_of(404, "The model 'm-nonexistent' does not exist", "model"))
    )
    assert body == {
        "error": {
            "message": "The model 'm-nonexistent' does not exist",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    assert failure_of(503, "x").type == "InternalServerError"
    assert failure_of(418, "x").type == "APIConnectionError"
