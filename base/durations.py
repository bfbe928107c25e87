"""Durations as Go writes them: `50ms`, `1m30s`."""

import re

_MICRO = dict.fromkeys(("us", "\u00b5s", "\u03bcs"), 1e-6)  # Go takes both micro signs
_SECONDS = {"ns": 1e-9, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0} | _MICRO
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)", re.ASCII)
MAX_SECONDS = 2**63 / 1e9  # Go's limit, an int64 of nanoseconds: 292 years


def parse_duration(text: str) -> float:
    """Convert a Go duration to seconds. Raises `ValueError`, also for a negative one."""
    if text == "0":  # the only number that Go takes without a unit
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"'{text}' is no duration; write for example 50ms, 2s or 1m30s")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds > MAX_SECONDS:
        raise ValueError(f"'{text}' is too long a duration; write for example 50ms, 2s or 1m30s")
    return seconds
