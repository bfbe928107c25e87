"""An HTTP/2 client that keeps its connection and obeys GOAWAY to the letter.

Those of the usual libraries give up requests under way when a server says goodbye, which would
count as the server's failure. This one does what RFC 9113, 6.8 asks for: no new request on that
connection, and those the server still takes are read to their end.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW = 2**30
_HEAD_BYTES = 9


class BrokenError(Exception):
    """A request that got no complete answer."""


@dataclass
class Answer:
    """One response, complete once `ended` is set; `fault` says why there will be no more of it."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fault: str | None = None

    @property
    def status(self) -> int:
        """0 before the headers came."""
        return int(self.headers.get(":status", 0))

    def fail(self, fault: str) -> None:
        """There will be no more of it."""
        if not self.ended.is_set():
            self.fault = fault
            self.ended.set()


class _Connection:
    """One connection; `said_goodbye` once no new request may be sent on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder, self._decoder = Encoder(), Decoder()
        self._answers: dict[int, Answer] = {}
        self._next = 1
        self.said_goodbye = False
        settings = SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: _WINDOW})
        window = WindowUpdateFrame(0, window_increment=_WINDOW)
        writer.write(_PREFACE + settings.serialize() + window.serialize())

    def send(self, path: str, body: bytes) -> Answer:
        """Begin a POST."""
        number, self._next = self._next, self._next + 2
        answer = self._answers[number] = Answer()
        headers = HeadersFrame(number, flags=["END_HEADERS"])
        headers.data = self._encoder.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
            ]
        )
        data = DataFrame(number, data=body, flags=["END_STREAM"])
        self._writer.write(headers.serialize() + data.serialize())
        return answer

    async def read(self) -> None:
        """Take what comes until the server hangs up."""
        reason = "the connection was closed"
        try:
            while True:
                frame, length = Frame.parse_frame_header(
                    memoryview(await self._reader.readexactly(_HEAD_BYTES))
                )
                frame.parse_body(memoryview(await self._reader.readexactly(length)))
                self._take(frame)
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            reason = f"the connection broke: {error}"
        finally:
            self.said_goodbye = True
            for answer in self._answers.values():
                answer.fail(reason)
            self._writer.close()

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self._writer.write(SettingsFrame(0, flags=["ACK"]).serialize())
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            pong = PingFrame(0, opaque_data=frame.opaque_data, flags=["ACK"])
            self._writer.write(pong.serialize())
        elif isinstance(frame, GoAwayFrame):
            self._goodbye(frame.last_stream_id)
        elif frame.stream_id in self._answers:
            self._take_of_stream(frame, self._answers[frame.stream_id])

    def _goodbye(self, last: int) -> None:
        self.said_goodbye = True
        for number in [number for number in self._answers if number > last]:
            self._answers.pop(number).fail("refused by a goodbye")
        self.hang_up_when_idle()

    def _take_of_stream(self, frame: Frame, answer: Answer) -> None:
        if isinstance(frame, HeadersFrame):
            answer.headers |= dict(self._decoder.decode(frame.data))
        elif isinstance(frame, DataFrame):
            answer.body += frame.data
        elif isinstance(frame, RstStreamFrame):
            answer.fail(f"reset with code {frame.error_code}")
        if "END_STREAM" in frame.flags:
            del self._answers[frame.stream_id]
            answer.ended.set()
            self.hang_up_when_idle()

    def hang_up_when_idle(self) -> None:
        """After a goodbye nothing keeps the connection but requests under way."""
        if self.said_goodbye and not self._answers:
            self._writer.close()

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


class Http2Client:
    """Owns at most one connection that takes requests; opened when there is none."""

    def __init__(self, port: int, group: asyncio.TaskGroup) -> None:
        self._port, self._group = port, group
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def post(self, path: str, document: object) -> Answer:
        """A complete answer. Raises `BrokenError` and `OSError`."""
        async with self._opening:
            connection = self._connection
            if connection is None or connection.said_goodbye:
                streams = await asyncio.open_connection("127.0.0.1", self._port)
                connection = self._connection = _Connection(*streams)
                self._group.create_task(connection.read())
        answer = connection.send(path, json.dumps(document).encode())
        await answer.ended.wait()
        if answer.fault is not None:
            raise BrokenError(answer.fault)
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
