"""openai-parser: understands the request bodies of the OpenAI APIs, as far as routing needs them.

Only bodies that are not JSON objects are refused: missing members and wrong types are the
endpoint's business, and a request without a readable prompt is routed without a prefix. Lists of
token ids are prompts that need no tokenizer, and so are lists of such lists. vLLM's own `pooling`
is treated as `embeddings`.

A response reports its usage in its `usage`, or in that of an event.
"""

from collections.abc import Mapping
from functools import lru_cache

from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._json_bodies import json_object, model_of, salt_of, whole_number
from picker.plugins.parsers._usage import openai_usage, usage_reader
from picker.tokenization.token_ids import packed_prompts
from picker.types import Api, ParsedBody

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
PLUGIN = PluginType("openai-parser", OpenAIParser)
