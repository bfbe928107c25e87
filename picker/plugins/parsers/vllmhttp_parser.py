"""vllmhttp-parser: understands the bodies of vLLM's token-level API, `/inference/v1/generate`.

`token_ids`, a list of whole numbers in [0, 2**32), is the prompt; `features` may place multi-modal
items in it, and `sampling_params.max_tokens` caps the output. A body with other token ids or items
is routed without a prefix.

A response reports its usage as those of the OpenAI APIs do.
"""

from collections.abc import Mapping

from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._json_bodies import json_object, model_of, salt_of, whole_number
from picker.plugins.parsers._usage import openai_usage, usage_reader
from picker.tokenization.multimodal import read_features
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api, MultiModalFeature, ParsedBody


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
    """Return the prompt and its items; neither if one of them is unreadable."""
    token_ids = payload.get("token_ids")
    prompt = pack_token_ids(token_ids) or pack_token_ids(_whole(token_ids))
    if prompt is None:
        return (), ()
    try:
        return (prompt,), (read_features(payload.get("features"), prompt),)
    except ValueError:
        return (), ()


def _whole(value: object) -> object:
    """Return `value`, a list of numbers, with 5.0 written as 5; None for another value."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
        return None
    return [int(one) if isinstance(one, float) and one.is_integer() else one for one in value]


PLUGIN = PluginType("vllmhttp-parser", VllmHttpParser)
