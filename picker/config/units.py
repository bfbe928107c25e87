"""Durations as Go writes them (`1m30s`) and quantities as Kubernetes does (`4Gi`, `10MiB`)."""

from __future__ import annotations

import re

from picker.errors import ConfigError
from picker.framework.durations import parse_duration

_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([kMGT]|[KMGT]i)?B?", re.ASCII)
_DECIMAL = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BYTES = _DECIMAL | {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}


def duration_seconds(text: str) -> float:
    """Seconds of a Go duration, e.g. `50ms`, `1m30s`, `0`. Raises `ConfigError`.

    Negative durations are refused: nothing here has a use for one.
    """
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def quantity_bytes(text: str) -> int:
    """Bytes of a quantity, e.g. `4194304`, `4Mi`, `10MiB`, `25MB`. Raises `ConfigError`."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is no size; write for example 4194304, 4Mi or 10MiB")
    return int(float(match[1]) * _BYTES[match[2] or ""])
