"""Bodies in full duplex: what goes in comes out, in order, and ends once."""

from conformance.case import Case, Strength, case, expect
from conformance.epp.cases.sources import EXT_PROC, STREAMING
from conformance.epp.scene import BODILESS, Scene, said
from conformance.wire.messages import Answer, Request, Response, completion, cut, request_rest

# Around the sizes at which implementations cut bodies (62,000 and 64 KiB), and well beyond.
SIZES = (100, 61_999, 62_000, 62_001, 65_536, 125_000, 1_000_000)
MAX_PIECE_BYTES = 65_536
_SIZE, _SMALL = 2_000, 250


def _whole(answer: Answer, body: bytes, what: str) -> None:
    """The body has come back as it was, and its end once, with its last piece."""
    expect(answer.status is None, f"{what}: {said(answer)}")
    expect(answer.body == body, f"{what}: {len(answer.body)} bytes came back, or other bytes")
    expect(answer.ends == 1, f"{what}: the end of the body was sent {answer.ends} times")


@case("request-body-intact", STREAMING)
async def request_body_intact(scene: Scene) -> None:
    """The body of a request MUST be given back byte for byte in streamed responses, with one end of
    stream, whatever its size.
    """
    for size in SIZES:
        body = completion(size)
        answer = await scene.ask(Request(body=tuple(cut(body, 65_536))))
        _whole(answer, body, f"a body of {size} bytes")


@case("request-body-chunkings", STREAMING)
async def request_body_chunkings(scene: Scene) -> None:
    """However the proxy cuts a body, empty pieces and an empty last piece included, the picker MUST
    give back the same bytes.
    """
    body = completion(_SMALL)
    halves = cut(body, _SMALL // 2)
    ways = {
        "one piece": [body],
        "pieces of one byte": cut(body, 1),
        "pieces of growing size": cut(body, [1, 2, 3, 5, 8, 13, 400]),
        "an empty last piece": [*halves, b""],
        "an empty first piece": [b"", *halves],
        "an empty piece in the middle": [halves[0], b"", *halves[1:]],
    }
    for name, pieces in ways.items():
        _whole(await scene.ask(Request(body=tuple(pieces))), body, name)


@case("request-pieces-fit", STREAMING, strength=Strength.SHOULD)
async def request_pieces_fit(scene: Scene) -> None:
    """No piece of a body that is given back should be over 64 KiB, which gateways take as the limit
    of a streamed response.
    """
    body = completion(300_000)
    answer = await scene.ask(Request(body=tuple(cut(body, 100_000))))
    largest = max((len(piece) for piece in answer.pieces), default=0)
    expect(largest <= MAX_PIECE_BYTES, f"a piece has {largest} bytes")


@case("request-order", EXT_PROC)
async def request_order(scene: Scene) -> None:
    """The answer to the headers of a request MUST come once, and before any of its body."""
    answer = await scene.ask(Request(body=tuple(cut(completion(_SIZE), 300))))
    expect(answer.status is None, said(answer))
    wanted = ["request_headers", *["request_body"] * (len(answer.kinds) - 1)]
    expect(answer.kinds == wanted, f"the order is {answer.kinds}")


@case("request-without-body", STREAMING)
async def request_without_body(scene: Scene) -> None:
    """A request that ends with its headers MUST be routed by the answer to them; nothing of a body
    follows.
    """
    answer = await scene.routed(BODILESS)
    expect(answer.kinds == ["request_headers"], f"the answer is {answer.kinds}")


@case("request-trailers", EXT_PROC)
async def request_trailers(scene: Scene) -> None:
    """Trailers end a request: the picker MUST give back the body and then answer the trailers, or
    the proxy waits without end. No piece of the body ends the stream then.
    """
    body = completion(_SIZE)
    answer = await scene.ask(Request(body=tuple(cut(body, 700)), trailers=True))
    expect(answer.status is None, said(answer))
    expect(answer.body == body, f"{len(answer.body)} of {len(body)} bytes came back")
    expect(answer.kinds[-1] == "request_trailers", f"the order is {answer.kinds}")
    expect(answer.ends == 0, "the body was ended although trailers follow")


@case("request-repeated-end", EXT_PROC, strength=Strength.SHOULD)
async def request_repeated_end(scene: Scene) -> None:
    """A second, empty end of the body, which Envoy has been seen to send for large bodies, should
    not be taken for another body.
    """
    body = completion(_SIZE)
    stream = await scene.stream()
    answer = await stream.request(Request(body=(body,)))
    _whole(answer, body, "the first end")
    await stream.send(*request_rest(Request(body=(b"",))))
    answer = await stream.response(Response())
    wanted = ["response_headers", "response_body"]
    expect(answer.kinds == wanted, f"after the second end: {answer.kinds}")
    await stream.leave()


@case("response-body-intact", STREAMING)
async def response_body_intact(scene: Scene) -> None:
    """The body of a response MUST be given back byte for byte, with one end of stream, whatever its
    size and its pieces.
    """
    ways = [(size, 65_536) for size in SIZES] + [(_SMALL, 1), (_SIZE, 17)]
    for size, piece in ways:
        body = completion(size)
        shown = Response(body=tuple(cut(body, piece)))
        _, answer = await scene.converse(Request(), shown)
        _whole(answer, body, f"a response of {size} bytes in pieces of {piece}")


@case("response-events-intact", STREAMING)
async def response_events_intact(scene: Scene) -> None:
    """Events of a streamed response MUST reach the client as they are, wherever the proxy cut them,
    also where their text is no ASCII.
    """
    events = [f'data: {{"choices": [{{"text": "tökén {at} 🚃"}}]}}\n\n' for at in range(4)]
    body = "".join([*events, "data: [DONE]\n\n"]).encode()
    for piece in (1, 7, 10_000):
        pieces = (*cut(body, piece), b"")
        shown = Response({"content-type": "text/event-stream"}, pieces)
        _, answer = await scene.converse(Request(body=(completion(stream=True),)), shown)
        _whole(answer, body, f"events in pieces of {piece}")


@case("response-without-body", EXT_PROC)
async def response_without_body(scene: Scene) -> None:
    """The headers of a response MUST be answered, with a body to follow or without."""
    _, answer = await scene.converse(Request(), Response({":status": "204"}, body=None))
    expect(answer.kinds == ["response_headers"], f"the answer is {answer.kinds}")
    _, answer = await scene.converse(Request(), Response())
    expect(answer.kinds[:1] == ["response_headers"], f"the order is {answer.kinds}")


@case("response-of-bodiless-request", EXT_PROC)
async def response_of_bodiless_request(scene: Scene) -> None:
    """The response to a request without a body MUST be answered like any other."""
    body = completion(_SIZE)
    _, answer = await scene.converse(BODILESS, Response(body=tuple(cut(body, 300))))
    _whole(answer, body, "the response")


@case("response-without-request", EXT_PROC)
async def response_without_request(scene: Scene) -> None:
    """A stream that begins with a response, because an earlier filter has answered the client (401,
    403, 429), MUST be given back that response.
    """
    for status, body in (("401", None), ("403", b"access denied"), ("429", b"")):
        pieces = None if body is None else tuple(cut(body, 6))
        stream = await scene.stream()
        answer = await stream.response(Response({":status": status}, pieces, begins_stream=True))
        await stream.leave()
        expect(answer.kinds[:1] == ["response_headers"], f"the order is {answer.kinds}")
        if body is not None:
            _whole(answer, body, f"a response with status {status}")


@case("response-trailers", EXT_PROC)
async def response_trailers(scene: Scene) -> None:
    """The trailers of a response MUST be answered, after all of its body."""
    body = completion(_SIZE)
    shown = Response(body=tuple(cut(body, 500)), trailers=True)
    _, answer = await scene.converse(Request(), shown)
    expect(answer.body == body, f"{len(answer.body)} of {len(body)} bytes came back")
    expect(answer.kinds[-1] == "response_trailers", f"the order is {answer.kinds}")
    expect(answer.ends == 0, "the body was ended although trailers follow")


CASES: tuple[Case[Scene], ...] = (
    request_body_intact,
    request_body_chunkings,
    request_pieces_fit,
    request_order,
    request_without_body,
    request_trailers,
    request_repeated_end,
    response_body_intact,
    response_events_intact,
    response_without_body,
    response_of_bodiless_request,
    response_without_request,
    response_trailers,
)
