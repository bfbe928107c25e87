"""Durations in the syntax of Go, sizes in that of Kubernetes."""

import pytest

from picker.config.decode import duration_seconds, quantity_bytes
from picker.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("2s", 2.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("0", 0.0),
        ("250us", 0.00025),
        ("7\u00b5s", 7e-6),
        (".5s", 0.5),
        ("1h30m", 5400.0),
        ("100ms", 0.1),
        ("2562047h", 9223369200.0),
    ],
)
def test_a_go_duration_is_read(text: str, seconds: float) -> None:
    assert duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "5", "-1s", "1 s", "s", "1x", "1s2", "fast", "3000000h", "9" * 400 + "s"]
)
def test_an_invalid_or_negative_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="50ms, 2s or 1m30s"):
        duration_seconds(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4194304", 4194304),
        ("4Mi", 4194304),
        ("10MiB", 10485760),
        ("25MB", 25000000),
        ("1k", 1000),
        ("1Ki", 1024),
        ("0.5Gi", 536870912),
        ("12B", 12),
        ("1e6", 1000000),
        ("1E3B", 1000),
        ("1Pi", 2**50),
        ("2E", 2 * 10**18),
        ("+4Mi", 4194304),
        ("1500m", 2),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_quantity_is_read(text: str, size: int) -> None:
    assert quantity_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "-1", "1K", "1Xi", "1 Mi", "MiB", " ", "1 ", "1e", "1e+", "9" * 400, "1e99", "8Ei"]
)
def test_an_invalid_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="4194304, 4Mi or 10MiB"):
        quantity_bytes(text)
