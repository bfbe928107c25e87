"""sglanghttp-parser: understands the bodies of SGLang's `/generate`.

`input_ids` is a list of integers in [0, 2**32), or a list of such lists; else `text` is a text or a
list of texts. `extra_key` is the cache salt, and `sampling_params.max_new_tokens` caps the output.
The body is forwarded unchanged; it names no model. A body with neither, and a body of another path
that ends in `/generate`, belongs to another server's API and is forwarded unread.

A response reports its usage in `meta_info`; a stream in the event that has a finish reason.
"""

from collections.abc import Mapping

from picker.errors import RefusedError
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._json_bodies import json_object, salt_of, whole_number
from picker.plugins.parsers._usage import META_INFO, sglang_event_usage, sglang_usage, usage_reader
from picker.tokenization.token_ids import packed_prompts
from picker.types import Api, ParsedBody

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


PLUGIN = PluginType("sglanghttp-parser", SglangHttpParser)
