"""JSON files of a checkpoint, and values of a configuration, checked one by one."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from worker.errors import ModelError

_T = TypeVar("_T", int, float)
_MISSING = object()
_LARGEST = 1 << 63  # far above any size or factor; products of two are finite


class Fields:
    """One source of configuration, which every error names."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def number(self, key: str, kind: type[_T], default: Any = _MISSING) -> _T:
        """Return a finite number. null counts as missing, which is an error without a default."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ModelError(f"{self.source}: {key} is missing")
            value = default
        # bool is an int in Python, but no number in JSON.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {key} is {value!r}, not a number")
        # NaN would pass later checks, because all its comparisons are false.
        if value != value or abs(value) == float("inf"):
            raise ModelError(f"{self.source}: {key} is {value!r}, not a finite number")
        if abs(value) > _LARGEST:
            raise ModelError(f"{self.source}: {key} is too large a number")
        if kind is int and value != int(value):
            raise ModelError(f"{self.source}: {key} is {value!r}, not a whole number")
        return kind(value)

    def optional(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key, float)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def factors(self, key: str) -> tuple[float, ...]:
        listed = self.values.get(key)
        if not isinstance(listed, list) or not listed:
            raise ModelError(f"{self.source}: {key} is {listed!r}, not a list of factors")
        entries = Fields(f"{self.source}: {key}", {str(n): v for n, v in enumerate(listed)})
        found = tuple(entries.number(str(n), float) for n in range(len(listed)))
        if min(found) <= 0:
            raise ModelError(f"{self.source}: {key} has a factor that is not positive")
        return found

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.source}: {reason}")


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ModelError(f"{path}: missing; is {path.parent} a Hugging Face model directory?")
        return {}
    try:
        # Some editors write a byte order mark, which JSON does not allow.
        text = path.read_bytes().removeprefix(BOM_UTF8)
        value = json.loads(text)  # NaN too, which Python writes and `Fields` names by its key
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: hostile nesting
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
