"""What is wrong or doubtful in an object, told so that its author can put it right."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

Place: TypeAlias = tuple[str | int, ...]

# More help nobody, and objects may be large.
MAX_FINDINGS: Final = 50
_SHOWN_LENGTH = 60
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


class Severity(Enum):
    """An object with an error is not followed; a warning does not keep it from that."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class ObjectFinding:
    """One thing to tell about an object.

    `path` is that of the field (`spec.targetPorts[0].number`), `value` what stands there, as JSON
    and cut when it is long, None where nothing stands; `fix` is what to do about it.
    """

    severity: Severity
    path: str
    value: str | None
    message: str
    fix: str

    def __str__(self) -> str:
        """`path: message, got value: fix`, in one printable line."""
        got = "" if self.value is None else f", got {self.value}"
        return f"{self.path or 'the object'}: {self.message}{got}: {self.fix}"


def error(place: Place, value: Any, message: str, fix: str) -> ObjectFinding:
    """A reason not to follow an object; `value` is shown, `ABSENT` is not."""
    return ObjectFinding(Severity.ERROR, dotted(place), _shown(value), message, fix)


def warning(place: Place, value: Any, message: str, fix: str) -> ObjectFinding:
    """Something that its author hardly meant."""
    return ObjectFinding(Severity.WARNING, dotted(place), _shown(value), message, fix)


class _Absent(Enum):
    """In place of a value where there is none; None is JSON's null."""

    ABSENT = "absent"


ABSENT: Final = _Absent.ABSENT


def dotted(place: Place) -> str:
    """`spec.targetPorts[0]`; keys that are no words stand in brackets."""
    return "".join(_step(one) for one in place).removeprefix(".")


def _step(one: str | int) -> str:
    if isinstance(one, int):
        return f"[{one}]"
    return f".{one}" if _PLAIN_KEY.fullmatch(one) else f"[{_shown(one)}]"


def _shown(value: Any) -> str | None:
    if value is ABSENT:
        return None
    if isinstance(value, dict | list):
        return f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if isinstance(value, str) and len(value) > _SHOWN_LENGTH:
        value = f"{value[:_SHOWN_LENGTH]}…"
    text = json.dumps(value, ensure_ascii=False, default=lambda one: type(one).__name__)
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
