"""Numbers and structure of a body: what parses, and how a refusal names the field."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.api.dialects.messages import MessagesRequest
from worker.api.dialects.responses import ResponsesRequest
from worker.api.dialects.sglang import SglangRequest
from worker.api.schema.embeddings import PoolingRequest
from worker.api.schema.parse import (
    Ignored,
    IgnoredFieldError,
    UnknownFieldError,
    Whole,
    decode,
    decode_supported,
    schema_hook,
    shown,
    without_ignored_fields,
)
from worker.api.schema.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    TokenizeRequest,
)
from worker.errors import RequestError


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    count: Whole | None = None
    counts: list[Whole] = []
    factor: float | None = None
    factors: dict[str, float] = {}


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("3.0", 3), ("-2e2", -200), ("1e18", 10**18)]
)
def test_whole_numbers_may_be_written_as_floats(text: str, expected: int) -> None:
    body = decode(f'{{"count": {text}, "counts": [{text}]}}'.encode(), Body)
    assert (body.count, body.counts) == (expected, [expected])
    assert isinstance(body.count, int)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ('{"count": 3.5}', "body.count", "Expected `int`, got 3.5"),
        ('{"count": "3"}', "body.count", "Expected `int`, got `str`"),
        ('{"count": true}', "body.count", "Expected `int`, got `bool`"),
        ('{"count": [1]}', "body.count", "Expected `int`, got `array`"),
        ('{"count": 1e30}', "body.count", "64 bits"),
        ('{"count": 9223372036854775808}', "body.count", "64 bits"),
        ('{"count": 1e400}', "body.count", "out of range"),
        ('{"count": %s}' % ("9" * 5000), "body.count", "out of range"),
        ('{"counts": [1, 2.5]}', "body.counts.1", "Expected `int`"),
        ('{"factor": 1e400}', "body.factor", "out of range"),
        ('{"factors": {"a": "b"}}', "body.factors", "Expected `float`"),
        ('{"other": 1}', "body.other", "Unknown field `other`"),
        ('{"factor": NaN}', "body.11", "not valid JSON"),
        ('{"factor": -Infinity}', "body.12", "not valid JSON"),
        ('{"count": ' + "[" * 100_000, "body", "JSON|deep"),
    ],
)
def test_any_number_is_taken_or_refused(body: str, param: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        decode(body.encode(), Body)
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "Bad Request", param)


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Body | None = None
    kind: Literal["a", "b"] | None = None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"f`o - at `$.x": 1}, "f`o - at `$.x"),
        ({"a` - at `$.x` or": 1}, "a` - at `$.x` or"),
        ({"line\nbreak": 1}, "line\nbreak"),
        ({"inner": {"f`o - at `$.x": 1}}, "inner.f`o - at `$.x"),
        ({"kind": " - at `$.x`"}, "kind"),
        ({"kind": "x` - at `$.inner`"}, "kind"),
    ],
)
def test_a_clients_text_is_not_read_as_a_place(body: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(msgspec.json.encode(body), Outer)
    assert caught.value.param == f"body.{param}"


@pytest.mark.parametrize("body", [{"x" * 100_000: 1}, {"kind": "x" * 100_000}])
def test_refusals_do_not_repeat_all_that_was_sent(body: Any) -> None:
    with pytest.raises(RequestError) as caught:
        decode(msgspec.json.encode(body), Outer)
    assert len(caught.value.message) + len(caught.value.param or "") < 500


def test_the_json_schema_of_a_whole_number_is_an_integer() -> None:
    schema = msgspec.json.schema(Body, schema_hook=schema_hook)
    count = schema["$defs"]["Body"]["properties"]["count"]
    assert {"type": "null"} in count["anyOf"]
    assert {o.get("type") for o in count["anyOf"]} == {"null", "integer"}


def test_long_values_are_cut_in_messages() -> None:
    assert shown(5) == "5"
    assert shown("x" * 500) == "x" * 80 + "…"


@pytest.mark.parametrize(
    ("body", "known", "ignored"),
    [
        ('{"nope": 1, "seed": 1e2}', '{"seed":1e2}', ["nope"]),
        ('{"a": {"b": 1}, "model": "x", "c": [[]]}', '{"model":"x"}', ["a", "c"]),
        (
            '{"messages": [{"role": "user"}, {"role": "user", "x": 1}]}',
            '{"messages":[{"role":"user"},{"role":"user"}]}',
            ["messages[1].x"],
        ),
        (
            '{"tools": [{"function": {"name": "f", "cost": 2, "parameters": {"any": 1}}}]}',
            '{"tools":[{"function":{"name":"f","parameters":{"any": 1}}}]}',
            ["tools[0].function.cost"],
        ),
        (
            '{"response_format": {"type": "json_object", "x": 1}}',
            '{"response_format":{"type":"json_object"}}',
            ["response_format.x"],
        ),
        (
            '{"tool_choice": {"type": "f", "x": 1}}',
            '{"tool_choice":{"type":"f"}}',
            ["tool_choice.x"],
        ),
        ('{"stream_options": {"x": 1}, "stop": [ "a" ]}', None, ["stream_options.x"]),
        # What is wrong in another way stays as it is, for the decoder to name.
        ('{"response_format": {"type": "other", "x": 1}}', None, []),
        ('{"messages": [7, {"y": 1}], "x": 1}', '{"messages":[7,{}]}', ["messages[1].y", "x"]),
        (' {"x": 1, "seed": 123456789012345678901234567890} ', None, ["x"]),
    ],
)
def test_unknown_fields_are_left_out_at_any_depth(
    body: str, known: str | None, ignored: list[str]
) -> None:
    rest, found = without_ignored_fields(body.encode(), ChatRequest)
    assert found == Ignored(unknown=ignored)
    if known is not None:
        assert rest == known.encode()
    assert without_ignored_fields(rest, ChatRequest) == (rest, Ignored())


def test_a_body_with_unknown_fields_says_so_and_may_still_be_broken() -> None:
    """The decoder stops at the first unknown field, before what follows it."""
    body = b'{"x": 1, "seed": 1'
    with pytest.raises(UnknownFieldError) as caught:
        decode(body, ChatRequest)
    assert (caught.value.body, caught.value.kind) == (body, ChatRequest)
    with pytest.raises(RequestError, match="not valid JSON"):
        without_ignored_fields(body, ChatRequest)


TURN = {"role": "user", "content": "x"}
TOOL = {"name": "f", "input_schema": {}}


@pytest.mark.parametrize(
    ("kind", "fields", "hints"),
    [
        (ChatRequest, {"messages": [TURN], "store": True, "user": "me"}, ["store", "user"]),
        (ChatRequest, {"messages": [TURN], "stream_options": {"include_obfuscation": True}}, None),
        (ResponsesRequest, {"input": "x", "text": {"verbosity": "low"}}, ["text.verbosity"]),
        (
            MessagesRequest,
            {
                "messages": [TURN],
                "max_tokens": 1,
                "tools": [TOOL, {**TOOL, "defer_loading": True}],
                "output_config": {"effort": "utmost"},
            },
            ["tools[1].defer_loading", "output_config.effort"],
        ),
    ],
)
def test_hints_are_found_and_left_out_at_any_depth(
    kind: type[msgspec.Struct], fields: dict[str, object], hints: list[str] | None
) -> None:
    body = msgspec.json.encode(fields)
    with pytest.raises(IgnoredFieldError) as caught:
        decode(body, kind)
    assert not isinstance(caught.value, UnknownFieldError)
    rest, found = without_ignored_fields(body, kind)
    assert found == Ignored(hints=hints or ["stream_options.include_obfuscation"])
    assert without_ignored_fields(body, kind, all_known=True) == (rest, found)
    decode(rest, kind)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"store": False, "user": None, "metadata": {}, "service_tier": "auto"}),
        (ResponsesRequest, {"metadata": {"a": "b"}, "user": "me", "truncation": "disabled"}),
        (MessagesRequest, {"max_tokens": 1, "output_config": {"effort": "high"}}),
        (MessagesRequest, {"max_tokens": 1, "cache_control": {}, "context_management": {}}),
    ],
)
def test_a_body_without_ignored_fields_is_decoded_once(
    kind: type[msgspec.Struct], fields: dict[str, object]
) -> None:
    given = {"input": "x"} if kind is ResponsesRequest else {"messages": [TURN]}
    decode(msgspec.json.encode(given | fields), kind)


def test_a_hint_is_not_taken_for_another_type() -> None:
    body = msgspec.json.encode({"messages": [TURN], "store": 0})
    assert without_ignored_fields(body, ChatRequest)[1].hints == ["store"]


def hints_of(kind: msgspec.inspect.Type, path: str = "") -> Iterator[str]:
    extra = getattr(kind, "extra", None) or {}
    if "hint" in extra:
        yield path
    elif isinstance(kind, msgspec.inspect.Metadata):
        yield from hints_of(kind.type, path)
    elif isinstance(kind, msgspec.inspect.ListType):
        yield from hints_of(kind.item_type, f"{path}[]")
    elif isinstance(kind, msgspec.inspect.UnionType):
        for option in kind.types:
            yield from hints_of(option, path)
    elif isinstance(kind, msgspec.inspect.StructType):
        for one in kind.fields:
            yield from hints_of(one.type, f"{path}.{one.name}" if path else one.name)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (("chats, text completions", "chats"), ChatRequest),
        (("chats, text completions",), CompletionRequest),
        (("Responses",), ResponsesRequest),
        (("Messages",), MessagesRequest),
        (("`/inference/v1/generate`",), GenerateRequest),
        (("SGLang's `/generate`",), SglangRequest),
        (("embeddings",), PoolingRequest),
    ],
)
def test_the_documentation_has_every_hint(
    rows: tuple[str, ...], kind: type[msgspec.Struct]
) -> None:
    page = (Path(__file__).parents[4] / "docs/http-api.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith(tuple(f"| {r} |" for r in rows))]
    ignored = " ".join(line.split("|")[2] for line in lines)
    paths = list(hints_of(msgspec.inspect.type_info(kind)))
    assert paths
    assert [path for path in paths if f"`{path}`" not in ignored] == []


MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def chat(extra: str) -> ChatRequest:
    return decode_supported(b"{" + MESSAGES + extra.encode() + b"}", ChatRequest)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        (',"foo":1', "body.foo"),
        (',"stop":["a",5]', "body.stop.1"),
        (',"stream":true,"stream_options":{"bar":1}', "body.stream_options.bar"),
        (',"prompt":"x"', "body.prompt"),
        (',"n":true', "body.n"),
        (',"repetition_detection":{"max_pattern_size":1,"x":1}', "body.repetition_detection.x"),
        (',"best_of":"2"', "body.best_of"),
        (',"early_stopping":"always"', "body.early_stopping"),
        (',"tools":[{"function":{"name":"f","x":1}}]', "body.tools.0.function.x"),
        (',"tool_choice":1', "body.tool_choice"),
        (',"tool_choice":{"type":"function"}', "body.tool_choice.function"),
        (',"priority":3.5', "body.priority"),
        (',"kv_transfer_params":[1]', "body.kv_transfer_params"),
        (',"structured_outputs":{"regex":1}', "body.structured_outputs.regex"),
        (',"return_token_offsets":true', "return_token_offsets"),
        (',"guided_json":1', "body.guided_json"),
    ],
)
def test_a_refusal_names_the_field(extra: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(extra)
    assert caught.value.param == param
    assert caught.value.status == 400
    assert caught.value.type == ("Bad Request" if param.startswith("body.") else "BadRequestError")
    assert param.removesuffix(".1").split(".")[-1] in caught.value.message


def test_values_that_ask_for_nothing_are_taken() -> None:
    neutral = (
        '"n":1,"logprobs":false,"top_logprobs":null,"kv_transfer_params":{},"documents":[],'
        '"presence_penalty":0,"frequency_penalty":0.0,'
        '"logit_bias":{},"tools":null,"response_format":{"type":"text"},"user":null,"metadata":{},'
        '"store":false,"service_tier":"auto","parallel_tool_calls":true,"seed":7,"min_p":0,'
        '"repetition_penalty":1.0,"top_k":-1,"min_tokens":0,"ignore_eos":false,"echo":false,'
        '"best_of":1,"cache_salt":"s","priority":0,"request_id":"r","reasoning_effort":"low",'
        '"stop":["a"],"stop_token_ids":[1],"skip_special_tokens":true,"max_completion_tokens":4,'
        '"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":false}'
    )
    request = chat("," + neutral)
    assert request.seed == 7
    assert request.stream_options is not None
    assert request.stream_options.include_usage is True
    every = {name: None for name in ChatRequest.__struct_fields__ if name != "messages"}
    assert chat("," + ",".join(f'"{name}":null' for name in every)).max_tokens is None


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{}", "messages"),
        (b"{", "not valid JSON"),
        (b"", "empty"),
        (b"1", "object"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "UTF-8"),
        (b'{"messages":[],"metadata":' + b"[" * 100_000, "nested too deeply"),
        (b'{"messages":[],"user":NaN}', "not valid JSON"),
    ],
)
def test_a_body_that_is_not_a_request_is_refused(body: bytes, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        decode_supported(body, ChatRequest)


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda t: b'{"prompt":' + t.encode()))
@examples(150)
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with suppress(RequestError):
            assert isinstance(decode_supported(body, kind), kind)


def test_tokenize_refuses_what_it_does_not_know() -> None:
    with pytest.raises(RequestError, match="nope"):
        decode(b'{"prompt":"a","nope":1}', TokenizeRequest)


def test_lists_of_tokens_cost_no_call_for_each() -> None:
    """A body may hold millions: they stay plain numbers until their count is known to be right."""
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        ids = getattr(chat(f',"{name}":[1,2.0,3]'), name)
        assert [type(i) for i in ids] == [int, float, int]
        with pytest.raises(RequestError) as caught:
            chat(f',"{name}":[1,true]')
        assert caught.value.param == f"body.{name}.1"
