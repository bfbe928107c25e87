"""sglanghttp-parser: understands the bodies of SGLang's `/generate`.

`input_ids` is a list of integers in [0, 2**32), or a list of such lists; else `text` is a text or a
list of texts; neither may be empty. `extra_key` is the cache salt, and
`sampling_params.max_new_tokens` caps the output. The body goes on as it came; it names no model. A
body with neither, and one of another path that ends in `/generate`, is of another server's API and
goes on unread.

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
    """Takes the path `/generate`."""

    claims: tuple[str, ...] = ("generate",)

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        if path.rstrip("/") != _PATH:
            return ParsedBody(Api.RAW, can_rewrite=False)
        payload = json_object(body)
        token_ids, text = payload.get("input_ids"), payload.get("text")
        if token_ids is None and text is None:
            return ParsedBody(Api.RAW, can_rewrite=False)
        prompts = () if token_ids is None else _packed(token_ids)
        if token_ids is None and not _is_text(text):
            raise bad_request(f"invalid {_NAME} request: text must be a text or a list of texts")
        return ParsedBody(
            api=Api.GENERATE,
            stream=payload.get("stream") is True,
            payload={"prompt": text} if token_ids is None else None,
            max_output_tokens=whole_number(payload.get("sampling_params"), ("max_new_tokens",)),
            cache_salt=text_member(payload, "extra_key", _NAME),
            can_rewrite=False,
            prompts=prompts,
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, sglang_usage, META_INFO, sglang_event_usage)


def _packed(value: object) -> tuple[bytes, ...]:
    """The prompts; each element of a list of lists is one. Raises `RefusedError` (400)."""
    batch = value if isinstance(value, list) and set(map(type, value)) == {list} else [value]
    prompts = [packed for ids in batch if (packed := pack_token_ids(ids)) is not None]
    if len(prompts) < len(batch):
        text = "input_ids must be a list of integers of 32 bits, or a list of such lists"
        raise bad_request(f"invalid {_NAME} request: {text}")
    return tuple(prompts)


def _is_text(value: object) -> bool:
    """Whether it is a text, or texts, and not empty."""
    return bool(value) and (
        isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) == {str})
    )


PLUGIN = PluginType("sglanghttp-parser", Parameters, plain(SglangHttpParser))
