"""The serving loop of the engine process: messages in, steps, outputs out."""

import logging
import time
from typing import cast

import msgspec
import zmq

from worker.engine.core import EngineCore
from worker.engine.messages import (
    AbortRequests,
    AddRequest,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
    Vocabulary,
)
from worker.engine.process.heartbeat import Pulse
from worker.engine.process.kv_events import KvEventPublisher
from worker.engine.process.speculation_log import SpeculationLog
from worker.types import EngineStats

logger = logging.getLogger(__name__)

_COMPILING_SECONDS = 0.002  # between two checks whether a grammar is compiled


class EngineSocket:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> ToEngine | None:
        """Return the next message that has arrived already, or None."""
        if not cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return cast(ToEngine, self._decoder.decode(self._socket.recv(zmq.DONTWAIT)))

    def wait(self, timeout_seconds: float | None = None, bell: int | None = None) -> None:
        """Sleep until a message arrives, the file `bell` can be read, or the time is up."""
        poller = zmq.Poller()
        for one in (self._socket, bell):
            if one is not None:
                poller.register(one, zmq.POLLIN)
        poller.poll(None if timeout_seconds is None else int(timeout_seconds * 1000))

    def close(self) -> None:
        """Deliver queued messages, for a second at most, and close."""
        self._socket.close(linger=1000)
        self._context.term()


class Server:
    def __init__(
        self,
        core: EngineCore,
        channel: EngineSocket,
        pulse: Pulse,
        publisher: KvEventPublisher | None,
        speculation_log: SpeculationLog,
    ) -> None:
        self._core = core
        self._channel = channel
        self._pulse = pulse
        self._publisher = publisher
        self._speculation_log = speculation_log
        self._num_commands = 0  # not answered yet
        pulse.follow(lambda: core.running_step, lambda: core.modelled_seconds)

    def serve(self) -> None:
        """Step while there is work, sleep on the socket while there is none, until `Shutdown`."""
        while True:
            if not self._core.has_work:
                self._pulse.idle()
                self._channel.wait(self._core.idle_seconds, self._core.bell)
                self._speculation_log.resume(time.monotonic())
            elif self._core.is_compiling:
                self._channel.wait(_COMPILING_SECONDS)
            self._pulse.working(commanded=self._num_commands > 0)
            if not self._receive():
                return
            outputs = self._core.step()
            self._pulse.stepped(0 if outputs is None else outputs.num_scheduled_tokens)
            if outputs is not None:
                self._channel.send(self._with_drops(outputs))
                self._log(outputs.stats)
            self._publish()
            self._reply()

    def _receive(self) -> bool:
        """Take every message that is there; return False when the engine is to end."""
        while (message := self._channel.receive()) is not None:
            if isinstance(message, AddRequest):
                self._core.add(message)
            elif isinstance(message, AbortRequests):
                self._core.abort(message.request_ids, message.hands_over)
            elif isinstance(message, Vocabulary):
                self._core.take_vocabulary(message)
            elif isinstance(message, Shutdown):
                return False
            else:
                self._num_commands += 1
                self._pulse.working(commanded=True)
                self._core.command(message)
        return True

    def _log(self, stats: EngineStats) -> None:
        line = self._speculation_log.line(stats.speculation, time.monotonic())
        if line is not None:
            logger.info("%s", line)

    def _with_drops(self, outputs: StepOutputs) -> StepOutputs:
        if self._publisher is None or not self._publisher.num_dropped:
            return outputs
        stats = msgspec.structs.replace(
            outputs.stats, num_event_batches_dropped=self._publisher.num_dropped
        )
        return msgspec.structs.replace(outputs, stats=stats)

    def _publish(self) -> None:
        """Publish changes of the prefix cache before any reply: a client that gets the answer to a
        reset or a dump has then the events that led there.
        """
        if self._publisher is not None:
            events = self._core.take_events()
            if events:
                self._publisher.publish(events)

    def _reply(self) -> None:
        for reply in self._core.take_replies():
            self._num_commands -= 1
            if self._publisher is not None:
                reply = msgspec.structs.replace(reply, event_sequence=self._publisher.last_sequence)
            self._channel.send(reply)
