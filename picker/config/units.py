"""Durations as Go writes them (`1m30s`) and quantities as Kubernetes does (`4Gi`, `10MiB`)."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from base.durations import parse_duration
from picker.errors import ConfigError

_QUANTITY = re.compile(
    r"\+?(\d+\.?\d*|\.\d+)(?:([num]|[kMGTPE]|[KMGTPE]i)|[eE]([-+]?\d{1,3}))?B?", re.ASCII
)
_UNITS = {name: Decimal(1000) ** power for power, name in enumerate("num kMGTPE", -3)}
_UNITS |= {f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)}
MAX_BYTES = 2**63 - 1


def duration_seconds(text: str) -> float:
    """Seconds of a Go duration, e.g. `50ms`, `1m30s`, `0`. Raises `ConfigError`.

    Negative durations are refused: nothing here has a use for one.
    """
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def quantity_bytes(text: str) -> int:
    """Bytes of a quantity, e.g. `4194304`, `4Mi`, `10MiB`, `25MB`, `1e6`; a part of one counts as
    one. Raises `ConfigError`.
    """
    match = _QUANTITY.fullmatch(text)
    if match is not None:
        number, unit, exponent = match.groups()
        size = Decimal(number) * _UNITS[unit or " "] * Decimal(10) ** int(exponent or 0)
        if size <= MAX_BYTES:
            return math.ceil(size)
    raise ConfigError(f"'{text}' is no size; write for example 4194304, 4Mi or 10MiB")
