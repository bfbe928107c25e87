"""One ext_proc stream, with the suite in the place of the gateway."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from conformance.case import Violation
from conformance.wire.messages import (
    Answer,
    Message,
    Request,
    Response,
    request_headers,
    request_rest,
    response_messages,
    take,
)

OPTIONS = (("grpc.max_receive_message_length", 64 * 2**20),)


class Stream:
    """One request of a client, sent to a picker message by message.

    A picker that says nothing for `patience_seconds` while an answer is due, or that fails the
    stream, breaks the protocol: `Violation`.
    """

    def __init__(self, channel: grpc.aio.Channel, patience_seconds: float) -> None:
        self._call = pb_grpc.ExternalProcessorStub(channel).Process()
        self._patience = patience_seconds

    async def request(self, request: Request) -> Answer:
        """Show the request; all that is said to it."""
        messages = [request_headers(request), *request_rest(request)]
        last = _last_of("request", request.body is not None, request.trailers)
        return await self._exchange(messages, last)

    async def response(self, response: Response) -> Answer:
        """Show the response; all that is said to it."""
        last = _last_of("response", response.body is not None, response.trailers)
        return await self._exchange(response_messages(response), last)

    async def send(self, *messages: Message) -> None:
        """Write messages, and wait for no answer."""
        try:
            async with asyncio.timeout(self._patience):
                for message in messages:
                    await self._call.write(message)
        except TimeoutError:
            raise Violation("the picker does not read what it is sent") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise Violation(f"the picker ended the stream: {_status(error)}") from error

    async def next(self) -> Message | None:
        """The next message; None when the picker has ended the stream in order."""
        try:
            async with asyncio.timeout(self._patience):
                message = await self._call.read()
        except TimeoutError:
            raise Violation(f"no answer within {self._patience:g} s") from None
        except grpc.RpcError as error:
            raise Violation(f"the picker failed the stream: {_status(error)}") from error
        return None if message is grpc.aio.EOF else message

    async def rest(self) -> list[Message]:
        """The gateway says nothing more; whatever the picker still says, until it ends."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        found: list[Message] = []
        while (message := await self.next()) is not None:
            found.append(message)
        return found

    async def leave(self) -> None:
        """The gateway says nothing more; how the picker ends the stream does not matter."""
        with suppress(Violation):
            await self.rest()

    def reset(self) -> None:
        """End the stream as a gateway does whose client is gone."""
        self._call.cancel()

    async def _exchange(self, messages: Iterable[Message], last: tuple[str, bool]) -> Answer:
        """Write all while reading, until the message of the kind `last`, which ends the body."""
        sending = asyncio.create_task(self.send(*messages), name="conformance stream")
        answer = Answer()
        try:
            while not await self._is_over(answer, last):
                pass
        finally:
            if answer.status is None:
                with suppress(Violation, asyncio.CancelledError):
                    await sending
            sending.cancel()
            with suppress(Violation, asyncio.CancelledError):
                await sending
        return answer

    async def _is_over(self, answer: Answer, last: tuple[str, bool]) -> bool:
        message = await self.next()
        if message is None:
            said = ", ".join(answer.kinds) or "nothing"
            raise Violation(f"the picker ended the stream after it had said: {said}")
        kind = take(answer, message)
        if kind == "immediate_response":
            return True
        wanted, ends_body = last
        return kind == wanted and (not ends_body or answer.ends > 0)


def _last_of(phase: str, has_body: bool, has_trailers: bool) -> tuple[str, bool]:
    """The kind of the last answer of a phase, and whether it is the one that ends the body."""
    if has_trailers:
        return f"{phase}_trailers", False
    return (f"{phase}_body", True) if has_body else (f"{phase}_headers", False)


def _status(error: BaseException) -> str:
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    if callable(code) and callable(details):
        return f"{code()} {details()}"
    return str(error)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own to a picker's plain port."""
    options = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel
