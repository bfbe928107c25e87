"""vLLM's gRPC messages, encoded by hand from its descriptors."""

from itertools import pairwise
from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.contrib.grpc_parsers.vllm import MAX_ITEMS, VllmGrpcParser
from picker.types import Api, MultiModalFeature, ParsedBody, Usage
from tests.depth import examples
from tests.support.picker.grpc_messages import field, frame, message, varint

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
EMBED = "/vllm.grpc.engine.VllmEngine/Embed"


def parse(path: str, data: bytes) -> ParsedBody:
    return VllmGrpcParser().parse(path, {}, frame(data))


PACKED = varint(1) + varint(300) + varint(2**32 - 1)
TOKENIZED = message((1, "original"), (2, PACKED))
PROMPT = pack("<3I", 1, 300, 2**32 - 1)


def test_the_methods_are_claimed() -> None:
    methods = ("Generate", "Embed")
    assert VllmGrpcParser.claims == tuple(f"vllm.grpc.engine.VllmEngine/{one}" for one in methods)


def test_a_text_request_is_read() -> None:
    data = message((1, "id"), (3, "hello"), (4, message((8, 100), (1, 2))), (5, 1), (99, "new"))
    assert parse(GENERATE, data) == ParsedBody(
        api=Api.VLLM_GRPC,
        stream=True,
        payload={"prompt": "hello"},
        max_output_tokens=100,
        can_rewrite=False,
    )


def test_a_tokenized_request_is_read_with_its_items() -> None:
    places = [message((1, 4), (2, 8)), message((2, 1)), message((1, 9), (2, 9))]
    items = message(*((5, place) for place in places), (6, "a"), (6, "b"))
    assert parse(GENERATE, message((2, TOKENIZED), (7, items))) == ParsedBody(
        api=Api.VLLM_GRPC,
        can_rewrite=False,
        prompts=(PROMPT,),
        features=((MultiModalFeature("image", "a", 4, 8), MultiModalFeature("image", "b", 0, 1)),),
    )


@pytest.mark.parametrize(
    "items", [message((5, message((1, 0), (2, 2**63))), (6, "a")), field(6, "") * (MAX_ITEMS + 1)]
)
def test_the_cost_of_a_short_request_is_bounded(items: bytes) -> None:
    parsed = parse(GENERATE, message((2, TOKENIZED), (7, items)))
    assert parsed == ParsedBody(api=Api.VLLM_GRPC, can_rewrite=False)


def test_token_ids_may_be_packed_or_not() -> None:
    tokenized = message((2, 1), (2, varint(300)), (2, 2**32 - 1))
    assert parse(GENERATE, message((2, tokenized))).prompts == (PROMPT,)


def test_the_last_of_text_and_tokens_counts() -> None:
    """Protobuf resolves a repeated choice in this way."""
    assert parse(GENERATE, message((3, "x"), (2, TOKENIZED))).payload is None
    assert parse(GENERATE, message((2, TOKENIZED), (3, "x"))).prompts == ()


def test_an_embedding_request_is_read() -> None:
    parsed = parse(EMBED, message((1, "id"), (2, TOKENIZED)))
    assert (parsed.api, parsed.prompts, parsed.can_rewrite) == (Api.VLLM_GRPC, (PROMPT,), False)


@pytest.mark.parametrize("path", [GENERATE, EMBED])
@pytest.mark.parametrize("tokenized", [b"", message((1, "original")), message((2, b""))])
def test_a_prompt_without_tokens_is_forwarded(path: str, tokenized: bytes) -> None:
    items = message((5, message((1, 0), (2, 2**63))), (6, "a"))
    parsed = parse(path, message((2, tokenized), (7, items)))
    assert parsed == ParsedBody(api=Api.VLLM_GRPC, can_rewrite=False)


def test_an_empty_text_is_a_prompt() -> None:
    assert parse(GENERATE, message((3, ""))) == ParsedBody(api=Api.VLLM_GRPC, can_rewrite=False)


def test_other_methods_are_not_read() -> None:
    parsed = VllmGrpcParser().parse("/vllm.grpc.engine.VllmEngine/GetModelInfo", {}, b"anything")
    assert parsed == ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, b"no healthy upstream"),
        (GENERATE, b""),
        (GENERATE, frame(b"")),
        (GENERATE, frame(message((3, b"\xff")))),
        (GENERATE, frame(message((3, 7)))),
        (GENERATE, frame(message((2, b"\xff")))),
        (GENERATE, frame(message((3, "x")))[:-1]),
        (GENERATE, pack(">BI", 1, 3) + b"\x1f\x8b\x08"),
        (GENERATE, frame(message((3, "x"))) * 2),
        (EMBED, frame(message((1, "id")))),
        (EMBED, frame(b"\xff")),
    ],
)
def test_an_unreadable_body_is_forwarded(path: str, body: bytes) -> None:
    parsed = VllmGrpcParser().parse(path, {}, body)
    assert parsed == ParsedBody(api=Api.VLLM_GRPC, can_rewrite=False)


CHUNK = frame(message((1, message((1, PACKED), (2, 7), (3, 1), (4, 2)))))
COMPLETE = frame(message((2, message((1, PACKED), (2, "stop"), (3, 7), (4, 10), (5, 3)))))
EMBEDDED = frame(message((1, pack("<3f", 0.5, -1.0, 2.0)), (2, 9)))


def usage_of(*pieces: bytes) -> Usage | None:
    reader = VllmGrpcParser().response_reader(ParsedBody(Api.VLLM_GRPC), "application/grpc")
    for piece in pieces:
        reader.feed(piece, False)
    reader.feed(b"", True)
    return reader.usage


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (CHUNK, Usage(7, 1, 8, 2)),
        (CHUNK + COMPLETE, Usage(7, 10, 17, 3)),
        (COMPLETE, Usage(7, 10, 17, 3)),
        (EMBEDDED, Usage(9, 0, 9)),
        (frame(b"\xff") + COMPLETE, Usage(7, 10, 17, 3)),
        (b"no healthy upstream", None),
        (frame(b""), None),
        (b"", None),
    ],
)
def test_usage_is_read_from_frames(body: bytes, expected: Any) -> None:
    assert usage_of(body) == expected


@examples(50)
@given(st.lists(st.integers(0, len(CHUNK + COMPLETE)), max_size=5).map(sorted))
def test_pieces_of_frames_are_joined(cuts: list[int]) -> None:
    body = CHUNK + COMPLETE
    pieces = [body[a:b] for a, b in pairwise([0, *cuts, len(body)])]
    assert usage_of(*pieces) == Usage(7, 10, 17, 3)
