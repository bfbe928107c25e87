"""`POST /generate`, as SGLang and forge-infer have it: bodies, the text completion that they stand
for, and answers. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from worker.api.http.limits import malformed
from worker.api.schema.answers import Count
from worker.api.schema.parse import Whole, hint
from worker.api.schema.requests import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REQUEST_ID_CHARS,
    MAX_SEQUENCES,
    TokenIds,
    only,
    ranged,
    refuse_unsupported,
    says,
)
from worker.errors import RequestError

Json = dict[str, Any]
DEFAULT_NEW_TOKENS = 128
FORGE_TOKENS = 32


class SglangSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params` of SGLang."""

    max_new_tokens: Annotated[Whole | None, says(minimum=1)] = None
    min_new_tokens: Annotated[Whole | None, says(minimum=0)] = None
    n: Annotated[Whole | None, says(minimum=1, maximum=MAX_SEQUENCES)] = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    temperature: Annotated[float | None, ranged("temperature")] = None
    top_p: Annotated[float | None, says(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[Whole | None, says(minimum=-1)] = None
    min_p: Annotated[float | None, ranged("min_p")] = None
    frequency_penalty: Annotated[float | None, ranged("frequency_penalty")] = None
    presence_penalty: Annotated[float | None, ranged("presence_penalty")] = None
    repetition_penalty: Annotated[float | None, says(exclusiveMinimum=0)] = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Whole | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stream_interval: Annotated[Whole | None, says(minimum=1)] = None
    custom_params: Annotated[Any, hint({})] = None  # of custom processors


class SglangRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of SGLang's `POST /generate`: one or several texts, or as many lists of token ids."""

    text: Annotated[str | list[str] | None, says(minItems=1)] = None
    input_ids: Annotated[list[int | list[int]] | None, says(minItems=1)] = None
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[Whole | None, says(minimum=0)] = None
    token_ids_logprob: Annotated[list[int] | None, says(maxItems=MAX_LOGPROB_TOKEN_IDS)] = None
    return_text_in_logprobs: bool | None = None
    rid: Annotated[str | None, says(minLength=1, maxLength=MAX_REQUEST_ID_CHARS)] = None
    priority: Whole | None = None
    extra_key: str | None = None
    model: str | None = None
    logprob_start_len: Annotated[Whole | None, says(minimum=-1)] = None
    input_embeds: Annotated[Any, only()] = None
    image_data: Annotated[Any, only([])] = None
    video_data: Annotated[Any, only([])] = None
    audio_data: Annotated[Any, only([])] = None
    return_hidden_states: Annotated[Any, only(False)] = None
    lora_path: Annotated[Any, only()] = None
    session_params: Annotated[Any, only({})] = None
    custom_logit_processor: Annotated[Any, only()] = None
    background: Annotated[Any, only(False)] = None


class ForgeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of forge-infer's `POST /generate`; greedy, as that is."""

    prompt: str
    max_tokens: Annotated[Whole | None, says(minimum=1)] = None


class MetaInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Part of `SglangAnswer`. `finish_reason` is null in a stream until the last event."""

    id: str
    finish_reason: Any
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: int = -1
    output_token_logprobs: Any = None
    output_top_logprobs: Any = None
    input_token_logprobs: Any = None


class SglangAnswer(msgspec.Struct, kw_only=True):
    """One answer of SGLang's `/generate`; of several prompts, or n > 1, it is a list."""

    text: str
    output_ids: list[Count]
    meta_info: MetaInfo


class ForgeAnswer(msgspec.Struct):
    """Answer of forge-infer's `/generate`."""

    text: str
    prompt_tokens: Count
    completion_tokens: Count


def is_single(request: SglangRequest) -> bool:
    """Whether the answer is one object."""
    n = 1 if request.sampling_params is None else request.sampling_params.n or 1
    if request.text is not None:
        return isinstance(request.text, str) and n == 1
    ids = request.input_ids
    return bool(ids) and isinstance(ids[0], int) and n == 1  # type: ignore[index]


_CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_SAME = (
    *("n", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
)


def completion_of(request: SglangRequest, max_model_len: int) -> Json:
    """The body of the text completion that it stands for. Raises `RequestError`."""
    refuse_unsupported(request)
    if (request.text is None) is (request.input_ids is None):
        raise malformed("Send either text or input_ids", "text")
    sampling = request.sampling_params or SglangSampling()
    refuse_unsupported(sampling, "sampling_params.")
    body: Json = {name: getattr(sampling, name) for name in _SAME}
    asked = {
        kind: value
        for name, kind in _CONSTRAINTS.items()
        if (value := getattr(sampling, name)) is not None
    }
    if len(asked) > 1:
        raise RequestError(
            f"sampling_params takes at most one of {', '.join(_CONSTRAINTS)}",
            param="sampling_params",
        )
    most = sampling.max_new_tokens
    body |= {
        "prompt": request.input_ids if request.text is None else request.text,
        "model": request.model,
        "max_tokens": min(DEFAULT_NEW_TOKENS, max_model_len) if most is None else most,
        "min_tokens": sampling.min_new_tokens,
        "seed": sampling.sampling_seed,
        "include_stop_str_in_output": sampling.no_stop_trim,
        "structured_outputs": asked or None,
        "stream": request.stream,
        "request_id": request.rid,
        "priority": request.priority,
        "cache_salt": request.extra_key,
    }
    if request.return_logprob:
        if request.logprob_start_len not in (None, -1):
            reason = "`logprob_start_len` is not supported yet; leave it out or send -1"
            raise RequestError(reason, param="logprob_start_len")
        body["logprobs"] = request.top_logprobs_num or 0
        body["logprob_token_ids"] = request.token_ids_logprob
    elif request.top_logprobs_num or request.token_ids_logprob:
        name = "top_logprobs_num" if request.top_logprobs_num else "token_ids_logprob"
        raise RequestError(f"`{name}` needs `return_logprob`", param=name)
    return body


def completion_of_forge(request: ForgeRequest, max_model_len: int) -> Json:
    """The body of the text completion that it stands for."""
    most = min(FORGE_TOKENS, max_model_len) if request.max_tokens is None else request.max_tokens
    return {"prompt": request.prompt, "max_tokens": most, "temperature": 0}
