"""Streams that stand beside each other, that end early, and that say what no picker knows."""

import asyncio

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from conformance.case import Case, Strength, Violation, case, expect
from conformance.epp.cases.sources import EXT_PROC
from conformance.epp.scene import Scene, said
from conformance.wire.messages import (
    Request,
    Response,
    completion,
    cut,
    request_headers,
    request_rest,
    response_messages,
)

_AT_ONCE = 40


@case("streams-apart", EXT_PROC)
async def independent_streams(scene: Scene) -> None:
    """Every stream is one request of its own: many at once on one connection MUST each get their
    own body and a destination.
    """
    bodies = [completion(1_000 + at, prompt=f"number {at} ") for at in range(_AT_ONCE)]
    asked = (scene.ask(Request(body=tuple(cut(body, 100)))) for body in bodies)
    for body, answer in zip(bodies, await asyncio.gather(*asked), strict=True):
        expect(answer.endpoints, f"no destination: {said(answer)}")
        expect(answer.body == body, "a stream got the body of another one, or half of its own")


@case("streams-reset", EXT_PROC)
async def streams_reset(scene: Scene) -> None:
    """A stream that the proxy resets, in whichever phase, MUST NOT disturb those beside it, nor
    those that follow.
    """
    request = Request(body=tuple(cut(completion(500), 100)))
    messages = [request_headers(request), *request_rest(request)]
    for count in range(1, len(messages) + 1):
        stream = await scene.stream()
        await stream.send(*messages[:count])
        try:  # a reset may overtake what the picker has not read; what it answers came in later
            await scene.routed(request)
        finally:
            stream.reset()
    stream = await scene.stream()
    await stream.request(request)
    await stream.send(*response_messages(Response(body=(b"x", b"y")))[:2])
    stream.reset()
    await scene.routed(request)


@case("streams-end-with-the-request", EXT_PROC, strength=Strength.SHOULD)
async def streams_end_with_the_request(scene: Scene) -> None:
    """A proxy may send no response: a stream that it ends after the request should end cleanly,
    without an error and further messages.
    """
    stream = await scene.stream()
    await stream.request(Request())
    try:
        more = await stream.rest()
    except Violation as violation:
        raise Violation(f"the stream does not end in order: {violation}") from violation
    expect(not more, f"{len(more)} messages came after the request")


@case("streams-out-of-order", EXT_PROC)
async def streams_out_of_order(scene: Scene) -> None:
    """Messages in an invalid order may end their own stream; requests on other streams MUST
    continue.
    """
    senseless = (
        [pb.ProcessingRequest(request_body=pb.HttpBody(body=b"{}", end_of_stream=True))],
        [pb.ProcessingRequest(request_trailers=pb.HttpTrailers())],
        [request_headers(Request()), request_headers(Request())],
        [pb.ProcessingRequest()],
    )
    for messages in senseless:
        stream = await scene.stream()
        try:
            await stream.send(*messages)
            await stream.rest()
        except Violation:
            stream.reset()  # it may refuse, or wait for sense
    try:
        await scene.routed(Request())
    except grpc.RpcError as error:
        raise Violation(f"the picker serves no more: {error}") from error


CASES: tuple[Case[Scene], ...] = (
    independent_streams,
    streams_reset,
    streams_end_with_the_request,
    streams_out_of_order,
)
