"""sglanghttp-parser: understands the bodies of SGLang's `/generate`, as far as they hold token ids.

`input_ids` must be a flat list, not empty, of integers in [0, 2**32): text prompts are refused, as
nothing could be known about them here. `extra_key` is the cache salt, and
`sampling_params.max_new_tokens` caps the output. The body goes on as it came; it names no model.

A response tells its usage in `meta_info`; a stream in the event that has a finish reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from picker.errors import bad_request
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins.parsers._json_bodies import json_object, text_member, whole_number
from picker.plugins.parsers._usage import META_INFO, sglang_event_usage, sglang_usage, usage_reader
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api, ParsedBody

_NAME = "generate"
_PATH = "/generate"


class SglangHttpParser:
    """Takes the path `/generate` alone."""

    claims: tuple[str, ...] = ("generate",)

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        if path.rstrip("/") != _PATH:
            raise bad_request(f"unsupported SGLang API path '{path}'")
        payload = json_object(body)
        prompt = pack_token_ids(payload.get("input_ids"))
        if prompt is None:
            text = "must have input_ids field, a flat list of integers of 32 bits"
            raise bad_request(f"invalid {_NAME} request: {text}")
        return ParsedBody(
            api=Api.GENERATE,
            stream=payload.get("stream") is True,
            max_output_tokens=whole_number(payload.get("sampling_params"), ("max_new_tokens",)),
            cache_salt=text_member(payload, "extra_key", _NAME),
            can_rewrite=False,
            prompts=(prompt,),
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, sglang_usage, META_INFO, sglang_event_usage)


PLUGIN = PluginType("sglanghttp-parser", Parameters, plain(SglangHttpParser))
