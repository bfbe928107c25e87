"""anthropic-parser: understands the request bodies of Anthropic's Messages API.

`messages`: any JSON object; without readable messages it is routed without a prefix.
`messages/count_tokens`: only the model is read, because counting fills no cache; the response is
not read.

A response reports its usage in `usage`; a stream in its `message_start` and `message_delta`.
"""

from collections.abc import Mapping

from picker.errors import RefusedError
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._json_bodies import json_object, model_of, salt_of, whole_number
from picker.plugins.parsers._usage import anthropic_usage, usage_reader
from picker.types import Api, ParsedBody

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
    """The endpoint refuses a body that is not a JSON object, so it is passed on unread."""
    try:
        payload = json_object(body)
    except RefusedError:
        return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
    return ParsedBody(Api.RAW, model=model_of(payload), payload=payload, skip_response=True)


PLUGIN = PluginType("anthropic-parser", AnthropicParser)
