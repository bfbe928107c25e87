"""Parsers of the HTTP APIs: one for each API, and the fallback.

Only bodies that are not JSON objects are refused: missing members and wrong types are the
endpoint's business, and a request without a readable prompt is routed without a prefix.

openai-parser: understands bodies of the OpenAI APIs.

Lists of token ids are prompts that need no tokenizer, and so are lists of such lists. vLLM's own
`pooling` is treated as `embeddings`.

anthropic-parser: understands bodies of Anthropic's Messages API.

Of `messages/count_tokens` only the model is read, because counting fills no cache.

sglanghttp-parser: understands bodies of SGLang's `/generate`.

`input_ids` is a list of integers in [0, 2**32), or a list of such lists; else `text` is a text or a
list of texts. `extra_key` is the cache salt, and `sampling_params.max_new_tokens` caps the output.
The body is forwarded unchanged; it names no model. A body with neither, and a body of another path
that ends in `/generate`, belongs to another server's API and is forwarded unread.

vllmhttp-parser: understands bodies of vLLM's `/inference/v1/generate`.

`token_ids`, a list of whole numbers in [0, 2**32), is the prompt; `features` may place multi-modal
items in it, and `sampling_params.max_tokens` caps the output. A body with other token ids or items
is routed without a prefix.

passthrough-parser: takes all other paths, and keeps bodies raw.
"""

from collections.abc import Mapping
from functools import lru_cache

from picker.errors import RefusedError
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._json_bodies import json_object, model_of, salt_of, whole_number
from picker.plugins.parsers._usage import (
    META_INFO,
    anthropic_usage,
    openai_usage,
    sglang_event_usage,
    sglang_usage,
    usage_reader,
)
from picker.tokenization.multimodal import read_features
from picker.tokenization.token_ids import pack_token_ids, packed_prompts
from picker.types import Api, MultiModalFeature, ParsedBody

MAX_REMEMBERED = 64  # paths, which clients choose


class OpenAIParser:
    claims: tuple[str, ...] = (
        "chat/completions",
        "chat/completions/batch",
        "completions",
        "embeddings",
        "pooling",
        "responses",
        "conversations",
        "chat/completions/render",
        "completions/render",
        "images/generations",
    )

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        payload = json_object(body)
        api = api_of(path)
        return ParsedBody(
            api=api,
            model=model_of(payload),
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=whole_number(payload, _OUTPUT_CAPS.get(api, ())),
            cache_salt=salt_of(payload, "cache_salt"),
            prompts=packed_prompts(payload.get(_TOKEN_IDS[api])) if api in _TOKEN_IDS else (),
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, openai_usage)


@lru_cache(MAX_REMEMBERED)
def api_of(path: str) -> Api:
    """Return the API that `path` belongs to; completions when none is recognised."""
    trimmed = path.rstrip("/").removesuffix("/render")
    for suffix, api in _API_BY_SUFFIX:
        if trimmed.endswith(suffix):
            return api
    return Api.COMPLETIONS


# The members that may hold prompts as token ids, and those that cap the output.
_TOKEN_IDS: Mapping[Api, str] = {
    Api.COMPLETIONS: "prompt",
    Api.EMBEDDINGS: "input",
    Api.POOLING: "input",
}
_OUTPUT_CAPS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT_COMPLETIONS: ("max_completion_tokens", "max_tokens"),
    Api.CHAT_BATCH: ("max_completion_tokens", "max_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
}
_API_BY_SUFFIX = (
    ("/conversations", Api.CONVERSATIONS),
    ("/responses", Api.RESPONSES),
    ("/chat/completions", Api.CHAT_COMPLETIONS),
    ("/chat/completions/batch", Api.CHAT_BATCH),
    ("/completions", Api.COMPLETIONS),
    ("/embeddings", Api.EMBEDDINGS),
    ("/pooling", Api.POOLING),
    ("/images/generations", Api.IMAGES),
)


_COUNT_TOKENS = "/messages/count_tokens"


class AnthropicParser:
    claims: tuple[str, ...] = ("messages", "messages/count_tokens")

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        if path.rstrip("/").endswith(_COUNT_TOKENS):
            return _counted(body)
        payload = json_object(body)
        return ParsedBody(
            api=Api.MESSAGES,
            model=model_of(payload),
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=whole_number(payload, ("max_tokens",)),
            cache_salt=salt_of(payload, "cache_salt"),
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, anthropic_usage)


def _counted(body: bytes) -> ParsedBody:
    """Read only the model; the endpoint itself refuses a body that is not a JSON object."""
    try:
        payload = json_object(body)
    except RefusedError:
        return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
    return ParsedBody(Api.RAW, model=model_of(payload), payload=payload, skip_response=True)


_PATH = "/generate"


class SglangHttpParser:
    claims: tuple[str, ...] = ("generate",)

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        unread = ParsedBody(Api.RAW, can_rewrite=False)
        if path.rstrip("/") != _PATH:
            return unread
        try:
            payload = json_object(body)
        except RefusedError:
            return unread  # it names no model that routing needs
        token_ids, text = payload.get("input_ids"), payload.get("text")
        if token_ids is None and text is None:
            return unread
        return ParsedBody(
            api=Api.GENERATE,
            stream=payload.get("stream") is True,
            payload={"prompt": text} if token_ids is None else None,
            max_output_tokens=whole_number(payload.get("sampling_params"), ("max_new_tokens",)),
            cache_salt=salt_of(payload, "extra_key"),
            can_rewrite=False,
            prompts=packed_prompts(token_ids),
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, sglang_usage, META_INFO, sglang_event_usage)


class VllmHttpParser:
    claims: tuple[str, ...] = ("inference/v1/generate",)

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        payload = json_object(body)
        prompts, features = _prompt_of(payload)
        return ParsedBody(
            api=Api.GENERATE,
            model=model_of(payload),
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=whole_number(payload.get("sampling_params"), ("max_tokens",)),
            cache_salt=salt_of(payload, "cache_salt"),
            prompts=prompts,
            features=features,
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, openai_usage)


def _prompt_of(
    payload: Mapping[str, object],
) -> tuple[tuple[bytes, ...], tuple[tuple[MultiModalFeature, ...], ...]]:
    """Return the prompt and its multi-modal items; neither if either is unreadable."""
    token_ids = payload.get("token_ids")
    prompt = pack_token_ids(token_ids) or pack_token_ids(_whole(token_ids))
    if prompt is None:
        return (), ()
    try:
        return (prompt,), (read_features(payload.get("features"), prompt),)
    except ValueError:
        return (), ()


def _whole(value: object) -> object:
    """Return a list of numbers with 5.0 written as 5; None if `value` is no such list."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
        return None
    return [int(one) if isinstance(one, float) and one.is_integer() else one for one in value]


class PassthroughParser:
    """Accepts every body and reads no model, prompt or usage."""

    claims: tuple[str, ...] = ()

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        return ParsedBody(Api.RAW, can_rewrite=False)


PLUGINS = (
    PluginType("openai-parser", OpenAIParser),
    PluginType("anthropic-parser", AnthropicParser),
    PluginType("sglanghttp-parser", SglangHttpParser),
    PluginType("vllmhttp-parser", VllmHttpParser),
    PluginType("passthrough-parser", PassthroughParser),
)
