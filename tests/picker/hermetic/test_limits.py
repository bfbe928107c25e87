"""Bodies and headers of every size and cut, up to what is too much (413, 431)."""

from __future__ import annotations

from pathlib import Path

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from ext_proc_stream import GatewayStream, body_of, completion, directed, refused, response_pieces
from metrics_pages import page, pods
from whole_picker import until, whole_picker

MIB = 2**20
MAX_BODY_BYTES = 64 * MIB


@pytest.mark.parametrize("width", [1, 2, 3, 16])
async def test_a_body_may_come_in_tiny_pieces(tmp_path: Path, width: int) -> None:
    """Cut within characters, escapes and numbers; empty pieces in between."""
    one = pods(page())
    body = '{"model":"m","prompt":"é\\u00e9\\n 😀","seed":12345678901234567890}'.encode()
    async with whole_picker(tmp_path, one) as picker, picker.stream() as stream:
        await stream.request_headers()
        for at in range(0, len(body), width):
            await stream.request_body(body[at : at + width], ends=False)
            await stream.request_body(b"", ends=False)
        await stream.request_body(b"")
        assert await stream.read_request() == directed(one[0].host_port, body)


@pytest.mark.parametrize("pieces", [1, 7, 65])
async def test_a_body_of_four_megabytes(tmp_path: Path, pieces: int) -> None:
    """Unchanged, and renamed; so is its response."""
    one = pods(page())
    prompt = "a story of ten letters and é " * (4 * MIB // 30)
    body = completion(prompt=prompt)
    size = -(-len(body) // pieces)
    async with whole_picker(tmp_path, one) as picker:
        async with picker.stream() as stream:
            await stream.request_headers()
            for at in range(0, len(body), size):
                await stream.request_body(body[at : at + size], ends=at + size >= len(body))
            assert await stream.read_request() == directed(one[0].host_port, body)
            await stream.response_headers()
            await stream.response_body(body, ends=True)
            assert await stream.read_response() == response_pieces(body)
        said = await picker.ask(body, {"x-llm-d-model-name-rewrite": "n"})
        sent = body_of(said)
        assert sent.startswith(b'{"max_tokens":100,"model":"n","prompt":"a story')
        assert len(sent) == len(completion("n", prompt)) - 7  # the blanks between members


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """413 with the first byte too many; what comes after that is ignored, and nothing is held."""
    async with whole_picker(tmp_path, pods(page())) as picker:
        stream = GatewayStream(picker.channel)
        await stream.request_headers()
        piece = b"x" * (4 * MIB)
        for _ in range(MAX_BODY_BYTES // len(piece)):
            await stream.request_body(piece, ends=False)
        await stream.request_body(b"x", ends=False)
        text = f"PayloadTooLarge - the request body exceeds {MAX_BODY_BYTES} bytes"
        assert await stream.read(2) == refused(413, text)
        await until(picker.is_idle)
        code = "PayloadTooLarge"
        assert await picker.series("llm_d_epp_request_error_total", error_code=code) == 1


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        (
            {f"x-{number}": "y" for number in range(1001)},
            "the request has more than 1000 headers",
        ),
        ({"x-large": "y" * (256 * 1024)}, "the request's headers exceed 262144 bytes"),
    ],
)
async def test_headers_that_are_too_many_or_too_large_are_refused(
    tmp_path: Path, headers: dict[str, str], text: str
) -> None:
    """431, before any body is awaited; with a body and without."""
    async with whole_picker(tmp_path, pods(page())) as picker:
        for ends in (False, True):
            async with picker.stream() as stream:
                await stream.request_headers(headers, ends=ends)
                assert await stream.read(1) == refused(431, f"HeadersTooLarge - {text}")
        assert await picker.outcomes() == {"refused": 2}


async def test_as_many_headers_as_are_allowed(tmp_path: Path) -> None:
    """Large ones, too, are nobody's business but the endpoint's."""
    one = pods(page())
    headers = {f"x-{number}": "y" * 200 for number in range(900)}
    async with whole_picker(tmp_path, one) as picker:
        said = await picker.ask(completion(), headers)
        assert said == directed(one[0].host_port, completion())


async def test_of_two_values_of_a_header_the_raw_one_counts(tmp_path: Path) -> None:
    """U2; names are read without their case, and bytes that are no text do no harm."""
    one = pods(page())
    async with whole_picker(tmp_path, one) as picker, picker.stream() as stream:
        message = pb.HttpHeaders()
        add = message.headers.headers.add
        add(key=":path", value="/v1/completions")
        add(key="X-Request-Id", value="an-id")
        add(key="X-LLM-D-Model-Name-Rewrite", value="value", raw_value=b"raw")
        add(key="x-bytes", raw_value=b"\xff\x00")
        await stream.send(request_headers=message)
        await stream.request_body(b'{"model":"m","prompt":"p"}')
        expected = directed(one[0].host_port, b'{"model":"raw","prompt":"p"}')
        assert await stream.read_request() == expected


async def test_many_requests_on_one_connection(tmp_path: Path) -> None:
    """Each stream gets its own answer."""
    three = pods(page(), page(), page())
    async with whole_picker(tmp_path, three, None) as picker:
        streams = [GatewayStream(picker.channel) for _ in range(50)]
        bodies = [completion(prompt=f"{number} " * number + "x") for number in range(50)]
        for stream, body in zip(streams, bodies, strict=True):
            await stream.request_headers()
            await stream.request_body(body[:7], ends=False)
        for stream, body in zip(streams, bodies, strict=True):
            await stream.request_body(body[7:])
        for stream, body in zip(streams, bodies, strict=True):
            assert body_of(await stream.read_request()) == body
        assert await picker.requests() == 50
        for stream in streams:
            assert await stream.rest() == []
        await until(picker.is_idle)
