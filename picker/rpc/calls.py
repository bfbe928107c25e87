"""What a gRPC method is, independent of the transport: reads bytes, writes bytes, ends or fails.

Unary calls are streams of one message, on the wire as here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from picker.errors import PickerError

# The next message, or None when the caller has closed its side. Raises `RefusedError` when a large
# message begins for which there is no room; reading on takes it all the same.
Read: TypeAlias = Callable[[], Awaitable[bytes | None]]
Write: TypeAlias = Callable[[bytes], Awaitable[None]]
Method: TypeAlias = Callable[[Read, Write], Coroutine[Any, Any, None]]
# What a call says of itself before its first message, by names in lower case; see `joined`.
Metadata: TypeAlias = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ByMetadata:
    """Stands for several methods at one path; `choose` must be quick."""

    choose: Callable[[Metadata], Method]


Served: TypeAlias = Method | ByMetadata


def joined(fields: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Names to values; those of a name that comes several times are joined by commas, as in HTTP.
    None of them may hide another.
    """
    found = dict(fields)
    if len(found) == len(fields):
        return found
    found.clear()
    for name, value in fields:
        found[name] = value if name not in found else found[name] + b"," + value
    return found


class Status(IntEnum):
    """The gRPC status codes in use here."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(PickerError):
    """A call that ends with a status other than OK."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
