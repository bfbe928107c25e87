"""Durations as Go writes them (`1m30s`) and quantities as Kubernetes does (`4Gi`, `10MiB`)."""

from __future__ import annotations

import re

from picker.errors import ConfigError

_MICRO = dict.fromkeys(("us", "\u00b5s", "\u03bcs"), 1e-6)  # Go takes both micro signs
_SECONDS = {"ns": 1e-9, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0} | _MICRO
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)", re.ASCII)
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([kMGT]|[KMGT]i)?B?", re.ASCII)
_DECIMAL = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BYTES = _DECIMAL | {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}


def duration_seconds(text: str) -> float:
    """Seconds of a Go duration, e.g. `50ms`, `1m30s`, `0`. Raises `ConfigError`.

    Negative durations are refused: nothing here has a use for one.
    """
    if text == "0":
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"'{text}' is no duration; write for example 50ms, 2s or 1m30s")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def quantity_bytes(text: str) -> int:
    """Bytes of a quantity, e.g. `4194304`, `4Mi`, `10MiB`, `25MB`. Raises `ConfigError`."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is no size; write for example 4194304, 4Mi or 10MiB")
    return int(float(match[1]) * _BYTES[match[2] or ""])
