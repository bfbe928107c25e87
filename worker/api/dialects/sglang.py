"""`POST /generate` of SGLang and forge-infer: a text completion under other names."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET

from worker.api.dialects.named_events import answered_by
from worker.api.generate.frames import DONE, Answer, Delta, Ending, Frames, TokenCounts, encode
from worker.api.generate.logprobs import LogprobsWriter, TokenBytes, clamped
from worker.api.generate.open_sequences import own_id
from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival
from worker.api.http.field_errors import fields_named, malformed
from worker.api.routes.generation import GenerationRoutes
from worker.api.schema.answers import Count
from worker.api.schema.parse import Whole, decode, decode_supported, hint, refuse_unsupported
from worker.api.schema.requests import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SEQUENCES,
    CompletionRequest,
    DrawFields,
    RequestId,
    StructuredOutputs,
    TokenIds,
    only,
    says,
)
from worker.api.schema.routes import Handler, generation_route
from worker.errors import RequestError
from worker.types import FinishReason, TokenLogprobs

Json = dict[str, Any]
DEFAULT_NEW_TOKENS = 128
FORGE_TOKENS = 32
# The completion's fields, as SGLang calls them.
_NAMES = {
    "structured_outputs.json": "sampling_params.json_schema",
    "structured_outputs.grammar": "sampling_params.ebnf",
    "structured_outputs": "sampling_params",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "cache_salt": "extra_key",
    "request_id": "rid",
}


class SglangSampling(DrawFields, kw_only=True):
    """SGLang's `sampling_params`, under SGLang's own names."""

    max_new_tokens: Annotated[Whole | None, says(minimum=1)] = None
    min_new_tokens: Annotated[Whole | None, says(minimum=0)] = None
    n: Annotated[Whole | None, says(minimum=1, maximum=MAX_SEQUENCES)] = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Whole | None = None
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
    rid: RequestId = None
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
    """Body of forge-infer's `POST /generate`; like that server, it always draws greedily."""

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
    """One answer of SGLang's `/generate`, which returns a list for several prompts or n > 1."""

    text: str
    output_ids: list[Count]
    meta_info: MetaInfo


class ForgeAnswer(msgspec.Struct):
    """Answer of forge-infer's `/generate`."""

    text: str
    prompt_tokens: Count
    completion_tokens: Count


def is_single(request: SglangRequest) -> bool:
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
    *DrawFields.__struct_fields__,
    *("n", "stop", "stop_token_ids", "logit_bias"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
)


def completion_of(request: SglangRequest, max_model_len: int) -> CompletionRequest:
    """Return the text completion that a request stands for. Raises `RequestError`."""
    if (request.text is None) is (request.input_ids is None):
        raise malformed("Send either text or input_ids", "text")
    sampling = request.sampling_params or SglangSampling()
    refuse_unsupported(sampling, "sampling_params.")
    constraints = {
        kind: value
        for name, kind in _CONSTRAINTS.items()
        if (value := getattr(sampling, name)) is not None
    }
    if len(constraints) > 1:
        reason = f"sampling_params takes at most one of {', '.join(_CONSTRAINTS)}"
        raise RequestError(reason, param="sampling_params")
    most = sampling.max_new_tokens
    completion = CompletionRequest(
        prompt=request.input_ids if request.text is None else request.text,  # type: ignore[arg-type]
        model=request.model,
        max_tokens=Whole(min(DEFAULT_NEW_TOKENS, max_model_len)) if most is None else most,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        include_stop_str_in_output=sampling.no_stop_trim,
        structured_outputs=StructuredOutputs(**constraints) if constraints else None,
        stream=request.stream,
        request_id=request.rid,
        priority=request.priority,
        cache_salt=request.extra_key,
        **{name: getattr(sampling, name) for name in _SAME},
    )
    if request.return_logprob:
        if request.logprob_start_len not in (None, -1):
            reason = "`logprob_start_len` is not supported yet; leave it out or send -1"
            raise RequestError(reason, param="logprob_start_len")
        completion.logprobs = request.top_logprobs_num or Whole(0)
        completion.logprob_token_ids = request.token_ids_logprob  # type: ignore[assignment]
    elif request.top_logprobs_num or request.token_ids_logprob:
        name = "top_logprobs_num" if request.top_logprobs_num else "token_ids_logprob"
        raise RequestError(f"`{name}` needs `return_logprob`", param=name)
    return completion


class SglangLogprobs(LogprobsWriter):
    """Writes `[logprob, id, text]` of the drawn tokens and the `num_top` likeliest."""

    def __init__(self, num_top: int, token_bytes: TokenBytes | None) -> None:
        self._num_top = num_top
        self._bytes = token_bytes

    def take(self, entries: Sequence[TokenLogprobs]) -> Json:
        drawn, top = [], []
        for entry in entries:
            pairs = zip(entry.token_ids, entry.logprobs, strict=True)
            entries_of = [self._entry(token_id, logprob) for token_id, logprob in pairs]
            drawn.append(entries_of[0])
            top.append(entries_of[1 : 1 + self._num_top])
        if not self._num_top:
            return {"output_token_logprobs": drawn}
        return {"output_token_logprobs": drawn, "output_top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> list[Any]:
        text = None if self._bytes is None else self._bytes(token_id).decode("utf-8", "replace")
        return [clamped(logprob), token_id, text]


@dataclass(slots=True)
class _SoFar:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)


class SglangFrames(Frames):
    """Frames that each repeat the whole answer so far."""

    done = DONE

    def __init__(self, response_id: str, *, single: bool) -> None:
        self._id = response_id
        self._single = single
        self._so_far: dict[int, _SoFar] = {}

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        answer = self._answer(delta.index, delta, delta.usage)
        numbered: Json = msgspec.to_builtins(answer)
        if not self._single:
            numbered["index"] = delta.index
        return b"data: " + encode(numbered) + b"\n\n"

    def usage(self, usage: TokenCounts, metrics: Json | None) -> bytes:
        return b""

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        whole = [self._answer(n, answer, answer.usage) for n, answer in enumerate(answers)]
        return encode(whole[0] if self._single else whole)

    def _answer(self, index: int, part: Delta | Answer, usage: TokenCounts | None) -> SglangAnswer:
        so_far = self._so_far.setdefault(index, _SoFar())
        so_far.text.append(part.text)
        so_far.token_ids += part.token_ids or ()
        logprobs = part.logprobs
        if isinstance(logprobs, msgspec.Raw):
            logprobs = msgspec.json.decode(logprobs)
        for name, entries in (logprobs or {}).items():
            so_far.logprobs.setdefault(name, []).extend(entries)
        counts = usage or TokenCounts(0, 0, None)
        info = MetaInfo(
            id=self._id,
            finish_reason=_reason(part.ending, so_far.token_ids),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=-1 if counts.cached_tokens is None else counts.cached_tokens,
            **so_far.logprobs,
        )
        return SglangAnswer(
            text="".join(so_far.text), output_ids=list(so_far.token_ids), meta_info=info
        )


def _reason(ending: Ending | None, token_ids: Sequence[int]) -> Json | None:
    if ending is None:
        return None
    if ending.finish_reason == FinishReason.LENGTH.value:
        return {"type": "length", "length": len(token_ids)}
    if ending.finish_reason != FinishReason.STOP.value:
        return {"type": ending.finish_reason}
    # The model's own end has no name: it is the last token.
    matched = ending.stop_reason
    return {"type": "stop", "matched": token_ids[-1] if matched is None else matched}


class ForgeFrames(Frames):
    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        [answer] = answers
        return encode(ForgeAnswer(answer.text, usage.prompt_tokens, usage.completion_tokens))


class _Shape(msgspec.Struct):
    prompt: msgspec.Raw | msgspec.UnsetType = UNSET


async def _prepared(generation: GenerationRoutes, body: bytes, arrival: Arrival) -> Prepared:
    text = generation.checks.text
    most = text.limits.max_model_len
    if decode(body, _Shape).prompt is not UNSET:
        forge = decode(body, ForgeRequest)
        default = Whole(min(FORGE_TOKENS, most))
        limit = default if forge.max_tokens is None else forge.max_tokens
        completion = CompletionRequest(prompt=forge.prompt, max_tokens=limit, temperature=0)
        prepared = await generation.completions.prepared(completion, arrival)
        return replace(prepared, frames=ForgeFrames())
    request = decode_supported(body, SglangRequest)
    with fields_named(_NAMES | {"prompt": "input_ids" if request.text is None else "text"}):
        prepared = await generation.completions.prepared(completion_of(request, most), arrival)
    frames = SglangFrames(own_id(prepared.requests[0].request_id), single=is_single(request))
    prepared = answered_by(frames, prepared, total_usage=False)
    shown = replace(prepared.shown, token_ids=True)
    if shown.new_logprobs is not None:
        num_top = int(request.top_logprobs_num or 0)
        named = text.tokenizer.token_bytes if request.return_text_in_logprobs else None
        shown = replace(shown, new_logprobs=lambda: SglangLogprobs(num_top, named))
    return replace(prepared, shown=shown)


ROUTES = (
    replace(
        generation_route(
            "/generate",
            "generate_text",
            "Continue texts or token ids as SGLang does, or a prompt as forge-infer",
            (SglangRequest, ForgeRequest),
            (SglangAnswer, list[SglangAnswer], ForgeAnswer),
        ),
        guarded=True,
    ),
)


def handlers(generation: GenerationRoutes) -> dict[str, Handler]:
    return {"generate_text": generation.handler(partial(_prepared, generation))}
