"""The terms of a gRPC call: its receiver, a method as a coroutine, how a call ends.

A unary call is a stream of one message, on the wire as here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any, Protocol, TypeAlias

from picker.errors import PickerError

# What a call says of itself before its first message, by names in lower case; see `joined`.
Metadata: TypeAlias = Mapping[bytes, bytes]

# A method as a coroutine. `Read` returns the next message, None when the caller has ended its half;
# it raises `RpcError` when what is coming cannot be received. `Write` waits while much is unsent.
Read: TypeAlias = Callable[[], Awaitable[bytes | None]]
Write: TypeAlias = Callable[[bytes], Awaitable[None]]
Method: TypeAlias = Callable[[Read, Write], Coroutine[Any, Any, None]]


class Abort(Enum):
    """Why a call ends before its receiver has ended it."""

    CANCELLED = "cancelled"  # the caller has reset it, its deadline passed, the connection is lost
    BROKEN = "broken"  # the caller has sent what is no message
    SHUTDOWN = "shutdown"  # this server is stopping


class Receiver(Protocol):
    """One call as its owner sees it. All of it is called by the connection, in the event loop, and
    must be quick. Nothing is called after `abort`, or after the receiver has ended the call.
    """

    def message(self, data: bytes) -> None:
        """The next message; not called while much is unsent."""
        ...

    def end_of_messages(self) -> None:
        """The caller has ended its half in order."""
        ...

    def refuses_large_message(self) -> bool:
        """A message has begun that does not fit into the budget; called once for each. Either the
        receiver ends the call and returns True, or the message is received all the same.
        """
        ...

    def abort(self, why: Abort) -> None:
        """The call is over, whatever the receiver was doing. Nothing can be sent any more."""
        ...


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
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(PickerError):
    """A call that ends with a status other than OK."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
