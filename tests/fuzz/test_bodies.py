"""Malformed bodies: parsers refuse, readers ignore, the token-producer continues."""

import json
import tracemalloc
from struct import pack

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from picker.errors import RefusedError
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Parser, ReadsResponses
from picker.plugins.producers.token_producer import TokenProducer
from picker.requestcontrol.pipeline import ParserTable
from picker.tokenization.prompt_stream import MAX_MEDIA_TOKENS
from picker.tokenization.render import prompts_of, question_of
from picker.types import Api, InferenceRequest, ParsedBody
from tests.fuzz.conftest import ForSeconds
from tests.support.picker.plugin_scenes import configured, types_of

MIB = 2**20
PARSERS: list[Parser] = [configured(name) for name in types_of(Parser)]
TABLE = ParserTable(PARSERS)
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/conversations",
    "/v1/images/generations",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/inference/v1/generate",
    "/generate",
    "/vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Embed",
    "/google.cloud.aiplatform.v1beta1.PredictionService/ChatCompletions",
    "/google.cloud.aiplatform.v1beta1.PredictionService/RawPredict",
    "/other",
]
CONTENT_TYPES = ["application/json", "text/event-stream", "application/grpc", ""]
HEADERS = {
    "x-llm-d-video-duration-seconds": "1e300",
    "x-llm-d-video-resolution": "999999999x999999999",
    "x-llm-d-video-fps": "1e300",
}


def check_body(path: str, body: bytes) -> ParsedBody | None:
    headers = {":path": path, **HEADERS}
    found = path.partition("?")[0]
    try:
        parsed = TABLE.select(found).parse(found, headers, body)
    except RefusedError as refusal:
        if refusal.status != 400:
            raise
        return None
    request = InferenceRequest("r", headers, parsed, parsed.model, parsed.model)
    request = TokenProducer().produce(request, [], Attributes())
    assert len(request.prompts) == len(request.features)
    assert all(prompt and len(prompt) % 4 == 0 for prompt in request.prompts)
    for prompt, features in zip(request.prompts, request.features, strict=True):
        if not parsed.prompts:
            assert all(4 * (one.offset + one.length) <= len(prompt) for one in features)
    question = question_of(parsed, "real")
    assert question is None or question.body["model"] == "real"
    return parsed


def check_response(parser: Parser, content_type: str, pieces: list[bytes]) -> None:
    if not isinstance(parser, ReadsResponses):
        return
    reader = parser.response_reader(ParsedBody(Api.RAW), content_type)
    for index, piece in enumerate(pieces):
        reader.feed(piece, index == len(pieces) - 1)
    usage = reader.usage
    if usage is not None:
        assert min(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) >= 0
        assert usage.cached_tokens is None or usage.cached_tokens >= 0


NAMES = """
    model messages prompt input items content role type text image_url video_url input_audio data
    url format source system tools token_ids input_ids extra_key cache_salt features mm_hashes
    mm_placeholders image offset length sampling_params max_tokens tool_use tool_result thinking
    name id usage prompt_tokens completion_tokens total_tokens message response meta_info
    finish_reason prompt_tokens_details cached_tokens input_schema
"""
TYPES = """
    text image image_url video_url input_audio tool_use tool_result thinking message_start
    message_delta response.completed data:image/png;base64,iVBORw0KGgo= 12 1e9 -1 user
"""
KEYS = st.sampled_from(NAMES.split())
WORDS = st.sampled_from(TYPES.split())
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | WORDS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=8)
DOCUMENTS = (OBJECTS | VALUES).map(lambda value: json.dumps(value).encode())


def framed(message: bytes) -> bytes:
    return pack(">BI", 0, len(message)) + message


def nested(message: bytes, numbers: list[int]) -> bytes:
    for number in reversed(numbers):
        size, length = len(message), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 0x7F | 0x80])
        message = bytes([number << 3 | 2]) + length + bytes([size]) + message
    return message


FRAMES = st.builds(
    lambda message, numbers: framed(nested(message, numbers)),
    st.binary(max_size=40) | DOCUMENTS,
    st.lists(st.integers(1, 8), max_size=3),
)


@st.composite
def mutated(draw: st.DrawFn, documents: SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(documents))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 3))
        data[at : at + length] = draw(st.binary(max_size=4) | st.just(bytes(data[: at // 2])))
    return bytes(data)


BODIES = mutated(DOCUMENTS | FRAMES | st.binary(max_size=60))
RESPONSES = st.lists(
    BODIES | DOCUMENTS.map(lambda document: b"data: " + document + b"\n\n") | FRAMES, max_size=5
)


def test_any_body_is_read_or_refused(for_seconds: ForSeconds) -> None:
    for_seconds(st.tuples(st.sampled_from(PATHS), BODIES), lambda example: check_body(*example))


def test_any_body_of_the_right_shape_is_read_or_refused(for_seconds: ForSeconds) -> None:
    required = {
        "messages": st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=3),
        "prompt": VALUES,
        "input": VALUES,
        "items": st.lists(VALUES, min_size=1, max_size=3),
        "token_ids": st.just([1, 2]),
        "input_ids": st.just([3]),
        "tools": st.lists(OBJECTS, max_size=2),
        "features": VALUES,
    }
    bodies = st.fixed_dictionaries({}, optional=required).map(
        lambda body: json.dumps(body).encode()
    )
    for_seconds(st.tuples(st.sampled_from(PATHS), bodies), lambda example: check_body(*example))


def test_any_response_is_read(for_seconds: ForSeconds) -> None:
    examples = st.tuples(st.sampled_from(PARSERS), st.sampled_from(CONTENT_TYPES), RESPONSES)
    for_seconds(examples, lambda example: check_response(*example))


def test_any_answer_of_a_render_route_is_read_or_refused(for_seconds: ForSeconds) -> None:
    def check(answer: object) -> None:
        try:
            prompts = prompts_of(answer)
        except ValueError:
            return
        assert all(prompt.tokens for prompt in prompts)

    for_seconds(VALUES | st.lists(OBJECTS, max_size=2), check)


VIDEO = b'{"type":"video_url","video_url":"x"},'
BOMBS = {
    "lists in lists": b'{"prompt":' + b"[" * MIB,
    "objects in objects": b'{"messages":' + b'{"a":' * MIB,
    "as deep as can be read": b'{"messages":[{"content":"x"}],"tools":'
    + b"[" * 800
    + b"]" * 800
    + b"}",
    "a long integer": b'{"prompt":' + b"9" * 4 * MIB + b"}",
    "integers of more than 64 bits": b'{"input":['
    + b"9" * 30
    + b'],"prompt":"x","items":['
    + b"9" * 30
    + b"]}",
    "a number beyond all": b'{"prompt":1e999999}',
    "not a number": b'{"prompt":NaN}',
    "a lone surrogate": b'{"prompt":"\\ud800","messages":[{"content":"\\udfff"}]}',
    "a member over and over": b"{" + b'"messages":[],' * 100_000 + b'"messages":[{"content":"x"}]}',
    "many members": b"{" + b",".join(b'"%d":1' % n for n in range(200_000)) + b',"prompt":"x"}',
    "many numbers": b'{"prompt":[' + b"1," * (2 * MIB) + b'1],"input":"x"}',
    "many lists of numbers": b'{"prompt":[' + b"[1]," * 100_000 + b"[1]]}",
    "a long text": b'{"prompt":"'
    + b"x" * 4 * MIB
    + b'","messages":[{"content":"'
    + b"y" * MIB
    + b'"}]}',
    "many videos": b'{"messages":[{"content":[' + VIDEO * 50_000 + VIDEO[:-1] + b"]}]}",
    "spaces": b" " * 4 * MIB,
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"],
)
def test_bombs_take_no_more_memory_than_their_size_allows(path: str, bomb: str) -> None:
    body = BOMBS[bomb]
    tracemalloc.start()
    try:
        check_body(path, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * len(body) + 4 * 4 * MAX_MEDIA_TOKENS + MIB


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_endless_responses_take_bounded_memory(content_type: str) -> None:
    pieces = [b'data: "usage" "meta_info" ' + b"x" * 65536] * 400 + [b""]
    for parser in PARSERS:
        tracemalloc.start()
        try:
            check_response(parser, content_type, pieces)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 20 * MIB
