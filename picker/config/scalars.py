"""What is written → plain values, as the reference understands them: YAML that becomes JSON.

PyYAML takes more words for something else than text than Go's YAML library does (dates, times in
base 60), and fewer for numbers (`1e3`). JSON knows no numbers but finite ones, makes no difference
between 1 and 1.0, and its keys are text.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from picker.config.findings import Findings
from picker.config.source import Path

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$", re.ASCII)
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    re.ASCII,
)
_OURS = {_TAG + kind for kind in ("int", "float", "timestamp", "value")}
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # what Go's whole numbers hold


def loader_class() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader, in C where there is one, with the reference's idea of numbers."""
    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = {
        first: [pair for pair in pairs if pair[0] not in _OURS]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":
        pairs = [(_TAG + "float", _FLOAT)]
        if first != ".":
            pairs.insert(0, (_TAG + "int", _INT))
        table[first] = [*table.get(first, []), *pairs]
    made: type[yaml.SafeLoader] = type("Loader", (base,), {"yaml_implicit_resolvers": table})
    return made


def as_json(value: Any, at: Path, findings: Findings) -> Any:
    """`value`, found at `at`, as it is once it has been JSON; what JSON cannot say is told.

    Raises `RecursionError` for what is nested too deeply.
    """
    if isinstance(value, dict):
        named = ((_key(key), one) for key, one in value.items())
        return {key: as_json(one, (*at, key), findings) for key, one in named}
    if isinstance(value, list):
        return [as_json(one, (*at, index), findings) for index, one in enumerate(value)]
    if isinstance(value, int) and not _MIN_INT <= value <= _MAX_INT:
        value = _large(value)
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        findings.error(at, "must be a finite number")
    elif value.is_integer() and _MIN_INT <= value <= _MAX_INT:
        return int(value)
    return value


def _large(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _key(key: Any) -> str:
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)
