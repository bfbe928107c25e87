"""The parsers of the HTTP APIs: what they read of bodies, and what they forward."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import RefusedError
from picker.framework.interfaces import Parser
from picker.plugins.parsers.http_parsers import (
    AnthropicParser,
    OpenAIParser,
    SglangHttpParser,
    VllmHttpParser,
    api_of,
)
from picker.tokenization.estimate import PromptEstimator
from picker.tokenization.media import EstimateParameters, MediaTokens
from picker.tokenization.render import question_of
from picker.types import Api, MultiModalFeature, ParsedBody, Usage
from tests.depth import examples

ESTIMATOR = PromptEstimator(MediaTokens(EstimateParameters()))


def parse(parser: Parser, path: str, body: object) -> ParsedBody:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parser.parse(path, {}, data)


def openai(path: str, body: object) -> ParsedBody:
    return parse(OpenAIParser(), path, body)


def anthropic(path: str, body: object) -> ParsedBody:
    return parse(AnthropicParser(), path, body)


def sglang(body: object, path: str = "/generate") -> ParsedBody:
    return parse(SglangHttpParser(), path, body)


def vllm(body: object) -> ParsedBody:
    return parse(VllmHttpParser(), "/inference/v1/generate", body)


@pytest.mark.parametrize("parser", [OpenAIParser(), AnthropicParser(), VllmHttpParser()])
@pytest.mark.parametrize("body", [b"nonsense", b"[]", b"", b'{"prompt":' + b"[" * 100_000])
def test_another_body_than_a_json_object_is_refused(parser: Parser, body: bytes) -> None:
    with pytest.raises(RefusedError, match="the request body cannot be read as JSON: ") as refusal:
        parse(parser, f"/v1/{parser.claims[0]}", body)
    assert refusal.value.status == 400


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_chat_request_is_read() -> None:
    body = {
        "model": "m",
        "messages": MESSAGES,
        "stream": True,
        "max_tokens": 7,
        "max_completion_tokens": 5,
        "cache_salt": "s",
        "extra": 1,
    }
    assert openai(CHAT, body) == ParsedBody(
        api=Api.CHAT_COMPLETIONS,
        model="m",
        stream=True,
        payload=body,
        max_output_tokens=5,
        cache_salt="s",
    )


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT_COMPLETIONS),
        ("/v1/chat/completions/render", Api.CHAT_COMPLETIONS),
        ("/v1/completions/", Api.COMPLETIONS),
        ("/v1/completions/render", Api.COMPLETIONS),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/conversations", Api.CONVERSATIONS),
        ("/v1/images/generations", Api.IMAGES),
        ("/anything", Api.COMPLETIONS),
    ],
)
def test_the_api_is_chosen_by_the_end_of_the_path(path: str, api: Api) -> None:
    assert api_of(path) is api


def chat(*content: object, **members: object) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "user", "content": list(content)}], **members}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (CHAT, body)
            for body in ({}, {"messages": []}, {"messages": "hi"}, {"messages": ["hi"]})
        ),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
        (CHAT, {"messages": [None, {"role": 1, "content": {}, "tool_calls": {}}]}),
        (CHAT, chat("text", None, {"type": 1}, {"text": ["x"]}, {"type": "odd", "odd": 1})),
        (CHAT, chat({"type": "image_url", "image_url": 1}, {"type": "image_embeds"})),
        (CHAT, chat(tools={}, documents="x", chat_template=[], add_generation_prompt=0)),
        ("/v1/chat/completions/batch", {"messages": [{"role": "user"}]}),
        *((COMPLETIONS, {"prompt": prompt}) for prompt in ("x", "", [], ["x", ""], [-1], [1.5], 3)),
        *((COMPLETIONS, {"prompt": prompt}) for prompt in ([[1], []], [[1], "x"], [2**32], [True])),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"prompt_embeds": ["AAAA", "BBBB"], "prompt": None}),
        ("/pooling", {"data": {"data": "https://a/x.tif", "data_format": "url"}}),
        ("/pooling", {"messages": []}),
        ("/v1/embeddings", {"input": [{"content": [{"type": "image_base64"}]}]}),
        ("/v1/embeddings", {"messages": MESSAGES, "input_type": "query"}),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}, "previous_response_id": "r"}),
        ("/v1/conversations", {"items": [], "metadata": 1}),
        ("/v1/images/generations", {"prompt": ["a"], "n": 1.5, "size": 1}),
    ],
)
def test_an_incomplete_body_is_forwarded(path: str, body: dict[str, Any]) -> None:
    parsed = openai(path, {"model": "m", **body})
    assert (parsed.api, parsed.model, parsed.can_rewrite) == (api_of(path), "m", True)
    assert parsed.prompts == ()
    prompts = ESTIMATOR.prompts(parsed.api, parsed.payload or {}, {})
    assert all(prompt.tokens for prompt in prompts)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt_embeds": "AAAA", "prompt": None}),
        ("/pooling", {"data": {"a": 1}}),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}),
        ("/v1/conversations", {}),
        (CHAT, {"messages": []}),
    ],
)
def test_a_body_without_text_has_no_prefix(path: str, body: dict[str, Any]) -> None:
    parsed = openai(path, body)
    assert ESTIMATOR.prompts(parsed.api, parsed.payload or {}, {}) == ()


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ([0, 2**32 - 1], (b"\0\0\0\0\xff\xff\xff\xff",)),
        ([[1], [2, 3]], (b"\1\0\0\0", b"\2\0\0\0\3\0\0\0")),
        ("text", ()),
        (["text"], ()),
    ],
)
def test_token_ids_are_prompts_that_need_no_tokenizer(
    value: object, prompts: tuple[bytes, ...]
) -> None:
    assert openai(COMPLETIONS, {"prompt": value}).prompts == prompts
    assert openai("/v1/embeddings", {"input": value}).prompts == prompts


def test_the_content_type_of_a_response_chooses_its_reader() -> None:
    parser, body = OpenAIParser(), openai(COMPLETIONS, {"prompt": "x"})
    document = b'{"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}}'
    for content_type, data in (
        ("application/json", document),
        ("text/event-stream; charset=utf-8", b"data: " + document + b"\n\ndata: [DONE]\n\n"),
    ):
        reader = parser.response_reader(body, content_type)
        reader.feed(data, True)
        assert reader.usage == Usage(5, 10, 15)


@pytest.mark.parametrize("stream", ["true", 1, None, False])
def test_only_a_true_boolean_asks_for_streaming(stream: object) -> None:
    assert openai(CHAT, {"messages": MESSAGES, "stream": stream}).stream is False


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "prompt", "content", "model"]), inner)
    ),
    max_leaves=10,
)


@examples(200)
@given(st.sampled_from([CHAT, COMPLETIONS, "/v1/embeddings"]), json_values | st.binary())
def test_a_refusal_is_the_only_error(path: str, body: object) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "replace")
    try:
        status = OpenAIParser().parse(path, {}, data) and 200
    except RefusedError as error:
        status = error.status
    assert status in (200, 400)


ANTHROPIC = "/v1/messages"
USER = {"role": "user", "content": "hi"}


def test_a_message_is_read() -> None:
    body = {
        "model": "m",
        "messages": [USER],
        "system": [{"type": "text", "text": "x"}],
        "tools": [{"name": "t", "input_schema": {}}],
        "max_tokens": 9,
        "stream": True,
        "cache_salt": "s",
    }
    assert anthropic(ANTHROPIC, body) == ParsedBody(
        api=Api.MESSAGES, model="m", stream=True, payload=body, max_output_tokens=9, cache_salt="s"
    )


def test_the_model_of_a_count_is_read() -> None:
    """Counting fills no cache, so there is no prompt."""
    found = anthropic("/v1/messages/count_tokens", {"model": "m", "messages": [USER]})
    assert (found.api, found.model, found.can_rewrite, found.skip_response) == (
        *(Api.RAW, "m", True, True),
    )


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]"])
def test_a_count_is_forwarded_raw(body: bytes) -> None:
    expected = ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
    assert anthropic("/v1/messages/count_tokens", body) == expected
    assert anthropic("/v1/messages/count_tokens/", body) == expected


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": ["hi", {"role": 1}, {"content": 1}, {"content": ["x", {"source": 1}]}]},
        {"messages": [USER, {"role": "system", "content": "later"}], "system": 1},
        {"messages": [USER], "tools": [1], "system": ["x"], "cache_salt": 1},
        {"messages": [{"role": "user", "content": {"type": "text"}}], "tools": {}},
    ],
)
def test_an_incomplete_message_is_forwarded(body: dict[str, Any]) -> None:
    parsed = anthropic(ANTHROPIC, {"model": "m", **body})
    assert (parsed.api, parsed.model, parsed.can_rewrite) == (Api.MESSAGES, "m", True)
    assert all(one.tokens for one in ESTIMATOR.prompts(parsed.api, parsed.payload or {}, {}))
    question_of(parsed, "m")


@pytest.mark.parametrize("content", [None, "", "hi", [], [{"type": "odd"}]])
def test_contents_are_texts_or_blocks(content: object) -> None:
    assert anthropic(ANTHROPIC, {"messages": [{"role": "user", "content": content}]}).can_rewrite


def test_usage_is_read_from_responses() -> None:
    parser = AnthropicParser()
    reader = parser.response_reader(anthropic(ANTHROPIC, {"messages": [USER]}), "text/event-stream")
    reader.feed(
        b'event: a\ndata: {"type":"message_start","message":{"usage":{"input_tokens":4', False
    )
    reader.feed(b'}}}\n\ndata: {"type":"message_delta","usage":{"output_tokens":3}}\n\n', False)
    assert reader.usage == Usage(4, 3, 7)


def test_a_body_of_sglang_is_read_and_stays_raw() -> None:
    body = {
        "input_ids": [1, 2],
        "extra_key": "k",
        "sampling_params": {"max_new_tokens": 0},
        "stream": True,
        "model": "m",
    }
    assert sglang(body) == ParsedBody(
        api=Api.GENERATE,
        stream=True,
        max_output_tokens=0,
        cache_salt="k",
        can_rewrite=False,
        prompts=(b"\1\0\0\0\2\0\0\0",),
    )


@pytest.mark.parametrize(
    "path", ["/v1/generate", "/inference/v1/generate", "/generate/x", "/regenerate"]
)
def test_the_path_is_generate_and_nothing_else(path: str) -> None:
    assert sglang({"input_ids": [1]}, "/generate/").prompts
    assert sglang({"input_ids": [1]}, path) == ParsedBody(Api.RAW, can_rewrite=False)


def test_a_body_of_another_generate_is_not_read() -> None:
    """TGI has the prompt in another member."""
    assert sglang({"inputs": "hello"}) == ParsedBody(Api.RAW, can_rewrite=False)


@pytest.mark.parametrize("text", ["hello", ["hello", "you"]])
def test_text_is_a_prompt(text: Any) -> None:
    found = sglang({"text": text})
    assert (found.payload, found.can_rewrite, found.prompts) == ({"prompt": text}, False, ())


def test_token_ids_go_before_text_and_may_be_of_several_prompts() -> None:
    found = sglang({"text": "x", "input_ids": [[1], [2]]})
    assert (found.payload, found.prompts) == (None, (b"\1\0\0\0", b"\2\0\0\0"))


@pytest.mark.parametrize(
    ("body", "salt"),
    [
        ({"text": ""}, ""),
        ({"text": [1]}, ""),
        ({"input_ids": []}, ""),
        ({"input_ids": [[1], []]}, ""),
        ({"input_ids": [1.0]}, ""),
        ({"text": "", "extra_key": ["a", "b"]}, '["a","b"]'),
    ],
)
def test_an_unreadable_body_of_sglang_is_forwarded_without_a_prompt(body: Any, salt: str) -> None:
    parsed = sglang(body)
    assert (parsed.api, parsed.prompts, parsed.cache_salt) == (Api.GENERATE, (), salt)
    assert parsed.can_rewrite is False


@pytest.mark.parametrize("body", [{"input_embeds": [[0.5]]}, [1], None, "x"])
def test_a_body_without_a_prompt_is_not_read(body: Any) -> None:
    assert sglang(body) == ParsedBody(Api.RAW, can_rewrite=False)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_usage_is_read_from_meta_info(content_type: str) -> None:
    info = {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1, "finish_reason": "stop"}
    text = json.dumps({"text": "x", "meta_info": info})
    data = f"data: {text}\n\ndata: [DONE]\n\n" if "event" in content_type else text
    reader = SglangHttpParser().response_reader(sglang({"input_ids": [1]}), content_type)
    reader.feed(data.encode(), True)
    assert reader.usage == Usage(2, 3, 5, 1)


def test_token_ids_are_read_with_their_items() -> None:
    body = {
        "model": "m",
        "token_ids": [1, 2, 3],
        "features": {
            "mm_hashes": {"image": ["h"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
        },
        "sampling_params": {"max_tokens": 5},
        "stream": True,
        "cache_salt": "s",
    }
    assert vllm(body) == ParsedBody(
        api=Api.GENERATE,
        model="m",
        stream=True,
        payload=body,
        max_output_tokens=5,
        cache_salt="s",
        prompts=(b"\1\0\0\0\2\0\0\0\3\0\0\0",),
        features=((MultiModalFeature("image", "h", 1, 2),),),
    )


@pytest.mark.parametrize("token_ids", [[1.0, 2], [1e0, 2.0]])
def test_whole_numbers_may_be_written_as_fractions(token_ids: list[float]) -> None:
    """JSON has only one kind of numbers."""
    assert vllm({"token_ids": token_ids}).prompts == (b"\1\0\0\0\2\0\0\0",)


@pytest.mark.parametrize(
    "token_ids",
    [None, [], "1", [-1], [2**32], [1.5], [True], ["1"], [[1]], [1, None], [1e10], [4294967296.0]],
)
def test_other_token_ids_are_no_prompt(token_ids: Any) -> None:
    parsed = vllm({"model": "m", "token_ids": token_ids})
    assert (parsed.model, parsed.prompts, parsed.features) == ("m", (), ())


ENDLESS = {
    "mm_hashes": {"image": ["h"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 2**64}]},
}


@pytest.mark.parametrize("features", [[], ENDLESS, {"mm_hashes": []}])
def test_a_prompt_whose_items_cannot_be_placed_has_no_prefix(features: Any) -> None:
    """Without its items it would equal another prompt."""
    parsed = vllm({"token_ids": [1], "features": features, "cache_salt": 1})
    assert (parsed.prompts, parsed.features, parsed.cache_salt) == ((), (), "1")


@pytest.mark.parametrize("sampling_params", [None, [], {}, {"max_tokens": -1}])
def test_an_output_cap_may_be_missing(sampling_params: Any) -> None:
    assert vllm({"token_ids": [1], "sampling_params": sampling_params}).max_output_tokens is None


def test_usage_has_the_shape_of_openai() -> None:
    reader = VllmHttpParser().response_reader(vllm({"token_ids": [1]}), "application/json")
    reader.feed(b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}', True)
    assert reader.usage == Usage(1, 2, 3)
