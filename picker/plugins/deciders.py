"""Deciders: whether a stage of a disaggregated request is worth its profile (`Decider`).

always-disagg-pd-decider: every request gets a prefill endpoint.

always-disagg-multimodal-decider: requests with images, video or audio get encode endpoints.

prefix-based-pd-decider: prefill elsewhere what the decode endpoint has not cached.

    run ⇔ input − hit ≥ nonCachedTokens,   hit = cached blocks at the decode endpoint · block size

`input` is the number of tokens of the request's prompts. The stage never runs with nonCachedTokens
0 (which turns disaggregation off), with input < nonCachedTokens or < promptTokens, without a decode
endpoint, or without a finding of approx-prefix-cache-producer, whose findings alone count.
"""

from typing import Any

from picker.framework.attributes import Attributes, DataKey
from picker.framework.registry import NonNegativeInt, Parameters, PluginType
from picker.prefix.match import match_info_key
from picker.types import Candidate, InferenceRequest


class AlwaysDecider:
    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        return True


class MultiModalDecider:
    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        return any(request.features or request.body.features)

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        return "the request has no image, video or audio"


_MATCH_KEY = match_info_key("approx-prefix-cache-producer")


class PrefixBasedPdDecider(Parameters, frozen=True):
    non_cached_tokens: NonNegativeInt = 0
    prompt_tokens: NonNegativeInt = 0

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        return (_MATCH_KEY,) if self.non_cached_tokens else ()

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        if not self.non_cached_tokens or picked is None:
            return False
        tokens = request.num_tokens
        if tokens < max(self.non_cached_tokens, self.prompt_tokens):
            return False
        info = attributes.get(_MATCH_KEY)
        if info is None:
            return False
        hit = info.match_blocks.get(picked.key, 0) * info.block_size_tokens
        return tokens - hit >= self.non_cached_tokens

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        tokens, least = request.num_tokens, max(self.non_cached_tokens, self.prompt_tokens)
        if not self.non_cached_tokens:
            return "nonCachedTokens is 0, which turns it off"
        if picked is None:
            return "there is no decode endpoint"
        if tokens < least:
            return f"the prompt has {tokens} tokens, fewer than {least}"
        info = attributes.get(_MATCH_KEY)
        if info is None:
            return "nothing is known of cached prefixes"
        hit = info.match_blocks.get(picked.key, 0) * info.block_size_tokens
        return (
            f"of {tokens} tokens {hit} are cached at {picked.endpoint.name}, which leaves fewer "
            f"than {self.non_cached_tokens}"
        )


PLUGINS = (
    PluginType("always-disagg-pd-decider", AlwaysDecider),
    PluginType("always-disagg-multimodal-decider", MultiModalDecider),
    PluginType("prefix-based-pd-decider", PrefixBasedPdDecider),
)
