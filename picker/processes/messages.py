"""What the process that watches the pool and a process that serves say to each other.

They speak over one socket, in messages of msgpack behind their length. A question and its answer
carry the same number. The end of the stream means that the other side is gone.
"""

from __future__ import annotations

import asyncio
import socket
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from picker.cli.options import Options
from picker.pool.request_rules import NO_RULES, RuleSet
from picker.rpc.options import TlsMaterial
from picker.sharing.totals import Numbers

_LENGTH_BYTES = 4


class Configuration(msgspec.Struct, frozen=True):
    """A configuration as it was written, how messages call it, and which one it is in order."""

    content: bytes
    name: str
    revision: int


class Start(msgspec.Struct, tag=True):
    """The first message to a child; descriptors are numbers that it has inherited.

    `loads` are the blocks of what each process has under way, its own at `index`. `rules` are those
    of requests; others may follow in `Follow`. `certificate` is what all show when none was given.
    """

    index: int
    options: Options
    configuration: Configuration
    pool: int
    loads: list[int]
    listening: int
    certificate: TlsMaterial | None = None
    rules: RuleSet = NO_RULES


class Prepare(msgspec.Struct, tag=True):
    """Build what a configuration asks for, and wait for `Commit` to use it."""

    question: int
    configuration: Configuration


class Commit(msgspec.Struct, tag=True):
    """Use what was prepared last."""


class Follow(msgspec.Struct, tag=True):
    """Go by these objectives and rewrites alone from now on."""

    rules: RuleSet


class Tell(msgspec.Struct, tag=True):
    """Say what the series' numbers are."""

    question: int


class Subject(Enum):
    """What a question of people is about."""

    DECISIONS = "decisions"  # the last ones; the argument says how many
    DECISION = "decision"  # one; the argument is the request's id, "" for the last one
    HEALTH = "health"  # of endpoints
    TRAFFIC = "traffic"  # what was sent where since it was asked last


class Ask(msgspec.Struct, tag=True):
    """Answer a question of people."""

    question: int
    subject: Subject
    argument: str = ""


class Drain(msgspec.Struct, tag=True):
    """End when proxies have stopped sending; a second one: end now."""


class Ready(msgspec.Struct, tag=True):
    """The child serves, by this revision of the configuration."""

    revision: int


class Failed(msgspec.Struct, tag=True):
    """The child cannot start."""

    reason: str


class Prepared(msgspec.Struct, tag=True):
    """It has built what was asked for, or not, and why."""

    question: int
    problem: str | None = None


class Told(msgspec.Struct, tag=True):
    """The numbers; without a question the last ones before the end."""

    question: int | None
    numbers: Numbers


class Answered(msgspec.Struct, tag=True):
    """The answer, packed; see `processes.answers`."""

    question: int
    content: bytes


ToChild: TypeAlias = Start | Prepare | Commit | Follow | Tell | Ask | Drain
ToParent: TypeAlias = Ready | Failed | Prepared | Told | Answered
Message: TypeAlias = ToChild | ToParent


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no part of a message")


def _path(kind: type[Any], value: Any) -> Any:
    return kind(value)


class Channel:
    """One end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder = msgspec.msgpack.Decoder(Message, dec_hook=_path)

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """A channel over a connected socket, which it owns from now on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def send(self, message: Message) -> None:
        """Raises `ConnectionError` when the other side is gone."""
        data = self._encoder.encode(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None once the other side is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            message: Message = self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return message

    def close(self) -> None:
        """Let the other side see the end."""
        self._writer.close()
