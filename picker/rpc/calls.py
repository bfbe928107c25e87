"""The types of a gRPC call. A unary call is a stream of one message, here and on the wire."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any, Protocol, TypeAlias

from picker.errors import PickerError

# The header fields of a call, by names in lower case; see `joined`.
Metadata: TypeAlias = Mapping[bytes, bytes]

# A method as a coroutine. `Read` returns the next message, None when the caller has ended its half;
# it raises `RpcError` if the next message cannot be received. `Write` waits while much is unsent.
Read: TypeAlias = Callable[[], Awaitable[bytes | None]]
Write: TypeAlias = Callable[[bytes], Awaitable[None]]
Method: TypeAlias = Callable[[Read, Write], Coroutine[Any, Any, None]]


class Abort(Enum):
    CANCELLED = "cancelled"  # the caller has reset it, its deadline passed, the connection is lost
    BROKEN = "broken"  # the caller has sent a malformed message
    SHUTDOWN = "shutdown"  # this server is stopping


class Receiver(Protocol):
    """The consumer of one call. The connection calls its methods in the event loop; they must be
    quick. No method is called after `abort`, or after the receiver has ended the call.
    """

    def message(self, data: bytes) -> None:
        """Process the next message; not called while much is unsent."""

    def end_of_messages(self) -> None: ...

    def refuses_large_message(self) -> bool:
        """Called once for each message that does not fit into the budget, when it begins. Either
        the receiver ends the call and returns True, or the message is still received.
        """

    def abort(self, why: Abort) -> None:
        """Called when the call is broken off; no data can be sent any longer."""


def joined(fields: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Map names to values; those of a repeated name are joined by commas, so none is hidden."""
    found = dict(fields)
    if len(found) == len(fields):
        return found
    found.clear()
    for name, value in fields:
        found[name] = value if name not in found else found[name] + b"," + value
    return found


class Status(IntEnum):
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
    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
