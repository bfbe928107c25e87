"""Bodies are parsed strictly, and every refusal names the field."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.api.schema.parse import decode, decode_supported
from worker.api.schema.requests import ChatRequest, CompletionRequest, TokenizeRequest
from worker.errors import RequestError

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
