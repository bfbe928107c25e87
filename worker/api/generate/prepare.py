"""Bodies → what to ask of the engine and how to answer. Every error a client can make is found
here, before the engine hears of the request.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from worker.api.generate.adapters import ServedAdapters
from worker.api.generate.answer_forms import AnswerForms
from worker.api.generate.frames import (
    ChatFrames,
    CompletionFrames,
    Frames,
    PromptFacts,
    ResponseHead,
    TokenFrames,
)
from worker.api.generate.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter
from worker.api.generate.open_sequences import response_of
from worker.api.generate.resumption import Resumption, check_resume, resumption_of
from worker.api.generate.text import Encode, ModelText, opens_a_turn
from worker.api.http.arrival import Arrival
from worker.api.http.limits import malformed
from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema.constraints import CALLS, Constraint, constraint_of, grammar_of, refused
from worker.api.schema.kv_transfer import kv_peer, kv_peer_answer, kv_transfer
from worker.api.schema.params import (
    ModelLimits,
    SamplingContext,
    TextParams,
    beam_params,
    check_cache_salt,
    check_count,
    check_logprobs,
    check_min_tokens,
    check_prompt_logprobs_size,
    invalid,
    logits_processors,
    num_sequences,
    requested_max_tokens,
    sampling_params,
    searching,
    text_params,
    unknown_model,
)
from worker.api.schema.parse import decode, plain
from worker.api.schema.prompts import (
    check_token_ids,
    content_of,
    prompts_of,
    room_for_output,
    truncated,
)
from worker.api.schema.requests import (
    MAX_PROMPTS,
    MAX_REQUEST_ID_CHARS,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationFields,
    ResumeFields,
    TokenSampling,
    decode_generation,
    refuse_unsupported,
)
from worker.api.tools.answer import AnswerForm
from worker.config import ApiConfig
from worker.engine.messages import AddRequest
from worker.errors import RequestError
from worker.types import Adapter, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
COMPILE_SECONDS = 10.0  # of a grammar, others that it waits for included

_OF_COMPLETIONS = frozenset(CompletionRequest.__struct_fields__)
# Fields of token-level requests, beside sampling parameters, that completions have too.
_OF_ALL = (
    "model",
    "stream",
    "stream_options",
    "cache_salt",
    "priority",
    "request_id",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
_encode = msgspec.json.Encoder(enc_hook=plain).encode


@dataclass(frozen=True, slots=True)
class Shown:
    """Which facts an answer shows besides its text. `new_logprobs` makes the writer of one choice;
    None: log probabilities were not asked for. `prompt_logprobs` is how many of the likeliest
    tokens go with each token of the prompt. `usage` and `continuous_usage` are about streams, and
    so is `interval`: tokens per frame.
    """

    new_logprobs: Callable[[], LogprobsWriter] | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    cached_tokens: bool = True
    metrics: bool = False
    usage: bool = False
    continuous_usage: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: what to ask of the engine, and how to answer. `echoes` are the texts of
    the prompts, where the answer begins with them. `constraint` is what it must match, `form` what
    parsers look for in the answers. With `resumption` its stream can go on elsewhere.
    """

    requests: tuple[AddRequest, ...]
    text: TextParams
    frames: Frames
    stream: bool
    shown: Shown
    echoes: tuple[str, ...] = ()
    keep_alive_seconds: float | None = None
    constraint: Constraint | None = None
    form: AnswerForm | None = None
    resumption: Resumption | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences run at once."""
        beams = [request.params.beam for request in self.requests]
        return sum(
            1 + len(request.branch_ids) if beam is None else beam.width
            for request, beam in zip(self.requests, beams, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the endpoints have found out by themselves. `echoes` are the texts of the prompts, when
    they are to be echoed; `max_tokens` None: as many as fit.
    """

    request: GenerationFields
    arrival: Arrival
    response_id: str
    created: int
    prompts: list[list[int]]
    echoes: tuple[str, ...]
    max_tokens: int | None
    logprobs: int | None
    constraint: Constraint | None
    grammar: str | None
    adapter: Adapter | None


class RequestPreparer:
    """Bodies → `Prepared`. `defaults` are sampling values for what a request does not say, over
    those of the config.
    """

    def __init__(
        self,
        config: ApiConfig,
        text: ModelText,
        rng: random.Random,
        adapters: ServedAdapters,
        defaults: Mapping[str, float] | None = None,
        forms: AnswerForms | None = None,
    ) -> None:
        self._config = config
        self.adapters = adapters
        self._text = text
        self._rng = rng
        self._limits = replace(text.limits, max_logprobs=config.max_logprobs)
        self._sampling = SamplingContext(
            self._limits,
            text.encode_word,
            {**dict(config.default_sampling), **(defaults or {})},
            config.logits_processors,
        )
        # A fine-tune's tokenizer may name tokens its model has no embedding for.
        self._may_encode_unknown = text.tokenizer.vocab_size > text.limits.vocab_size
        self._accepted = {*config.served_model_names, *config.accepted_model_names}
        self._forms = forms or AnswerForms(config, text)

    def with_encoder(self, encode: Encode) -> RequestPreparer:
        """The same, with another encoder of prompts in front of the same randomness."""
        text = replace(self._text, prompt_encoder=encode)
        defaults = self._sampling.defaults
        parts = (self._rng, self.adapters, defaults, self._forms)
        return RequestPreparer(self._config, text, *parts)

    async def chat(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/chat/completions`; without a limit the answer may fill the context."""
        request = decode_generation(body, ChatRequest)
        adapter = self.check_model(request.model)
        prompt = self._text.render(request.messages, request)
        ids = await self._text.encode(prompt, add_special_tokens=bool(request.add_special_tokens))
        limit = requested_max_tokens(request, request.max_completion_tokens, self._limits)
        ids = self._truncated(request, ids, limit)
        if self._may_encode_unknown:
            await self.check_ids([ids], ["messages"])
        constraint = constraint_of(request)
        form, shown_ids = self._forms.form_of(request, prompt)
        asked = _Asked(
            request,
            arrival,
            *_identity("chatcmpl", request, arrival),
            [ids],
            (),
            self._capped(limit),
            _chat_logprobs(request, self._limits),
            constraint,
            await self._grammar(
                constraint, lambda text: self._forms.grammar_of(text, form, request, prompt)
            ),
            adapter,
        )
        role = "assistant" if opens_a_turn(request) else request.messages[-1].role
        frames = ChatFrames(
            self._head(asked),
            PromptFacts(
                token_ids=[ids] if request.return_token_ids else None,
                text=prompt if request.return_prompt_text else None,
                choices_each=_n(request),
            ),
            role=role,
            echo=_echoed_turn(request, role),
        )
        as_ids = self._tokens_as_ids(request)
        token_bytes = self._text.tokenizer.token_bytes
        prepared = self._prepared(asked, frames, lambda: ChatLogprobs(token_bytes, as_ids=as_ids))
        text = replace(prepared.text, shown_ids=shown_ids)
        if form is not None and constraint is not None and constraint.field != CALLS:
            form = form.without_calls()
        return replace(prepared, form=form, text=text)

    async def completion(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/completions`; without a limit the answer has 16 tokens."""
        request = decode_generation(body, CompletionRequest)
        adapter = self.check_model(request.model)
        least = 0 if request.echo else 1
        limit = requested_max_tokens(request, None, self._limits, least)
        limit = DEFAULT_COMPLETION_TOKENS if limit is None else limit
        truncates = request.truncate_prompt_tokens is not None
        given = prompts_of(request.prompt, None if truncates else self._limits)
        prompts = [self._truncated(request, ids, limit) for ids in await self._ids(given, request)]
        if self._may_encode_unknown or not isinstance(given[0], str):
            nested = len(given) > 1 or given[0] is not request.prompt
            names = [f"prompt[{n}]" if nested else "prompt" for n in range(len(prompts))]
            await self.check_ids(prompts, names)
        logprobs = request.logprobs
        constraint = constraint_of(request)
        asked = _Asked(
            request,
            arrival,
            *_identity("cmpl", request, arrival),
            prompts,
            await self._echoes(given, prompts, request),
            self._capped(limit),
            None if logprobs is None else check_logprobs("logprobs", logprobs, self._limits),
            constraint,
            await self._grammar(constraint),
            adapter,
        )
        shown_ids = prompts if request.return_token_ids else None
        frames = CompletionFrames(
            self._head(asked), PromptFacts(shown_ids, choices_each=_n(request))
        )
        return self._prepared(asked, frames, self._completion_logprobs(request))

    def check_model(self, name: str | None) -> Adapter | None:
        """The adapter of that name; None: the model itself, as where nothing is named. A wrong name
        is a 404.
        """
        if not name or name in self._accepted:
            return None
        served = self.adapters.find(name)
        if served is None:
            names = [*self._config.served_model_names, *self.adapters.names]
            raise unknown_model(name, names)
        return served.adapter

    async def _grammar(
        self, constraint: Constraint | None, whole: Callable[[str], str] = str
    ) -> str | None:
        """The grammar of an answer that is constrained; `whole` adds what comes before. It is
        compiled here to find what is wrong with it; the engine compiles its own.
        """
        if constraint is None:
            return None
        if self._text.grammars is None:
            raise refused(constraint.field, "this model has no end token, so no answer would end")
        text = whole(await asyncio.to_thread(grammar_of, constraint))
        compiling = asyncio.wrap_future(self._text.grammars.compile(text))
        await asyncio.wait({compiling}, timeout=COMPILE_SECONDS)
        if not compiling.done():
            raise refused(constraint.field, f"it takes more than {COMPILE_SECONDS:g} s to compile")
        error = compiling.result().error
        if error is not None:
            raise refused(constraint.field, error)
        return text

    async def _ids(
        self, given: Sequence[str | list[int]], request: CompletionRequest
    ) -> list[list[int]]:
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        special = request.add_special_tokens is not False
        encoded = iter(await self._text.encode_all(texts, add_special_tokens=special))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]

    async def check_ids(self, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """Refuse ids that are not the model's, by the names of their prompts."""

        def check() -> None:
            for ids, name in zip(prompts, names, strict=True):
                check_token_ids(ids, self._limits, name)

        await off_loop_when_large(sum(map(len, prompts)), check)

    async def _echoes(
        self,
        given: Sequence[str | list[int]],
        prompts: Sequence[Sequence[int]],
        request: CompletionRequest,
    ) -> tuple[str, ...]:
        """Texts as they were given; of token ids, or once cut, the text of the tokens."""
        if not request.echo:
            return ()
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        if len(texts) < len(given) or request.truncate_prompt_tokens is not None:
            texts = await self._text.decode_all(prompts)
        return tuple(texts)

    def _truncated(
        self, request: GenerationFields, ids: list[int], max_tokens: int | None
    ) -> list[int]:
        asked, side = request.truncate_prompt_tokens, request.truncation_side
        return truncated(ids, asked, side, max(1, max_tokens or 1), self._limits)

    def _capped(self, max_tokens: int | None) -> int | None:
        """The limit, within the model's own."""
        defaults = self._sampling.defaults
        own = defaults.get("max_tokens", defaults.get("max_new_tokens"))
        if own is None:
            return max_tokens
        return int(own) if max_tokens is None else min(max_tokens, int(own))

    def _tokens_as_ids(self, request: GenerationFields) -> bool:
        asked = request.return_tokens_as_token_ids
        return self._config.return_tokens_as_token_ids if asked is None else asked

    def _completion_logprobs(self, request: CompletionRequest) -> Callable[[], LogprobsWriter]:
        as_ids = self._tokens_as_ids(request)
        tokenizer = self._text.tokenizer
        skip_ids = tokenizer.special_ids if request.skip_special_tokens is not False else set()
        return lambda: CompletionLogprobs(tokenizer.token_bytes, as_ids=as_ids, skip_ids=skip_ids)

    def _head(self, asked: _Asked) -> ResponseHead:
        return ResponseHead(
            asked.response_id,
            self._config.served_model_names[0] if asked.adapter is None else asked.adapter.name,
            asked.created,
            self._config.system_fingerprint,
        )

    def _prepared(
        self, asked: _Asked, frames: Frames, new_logprobs: Callable[[], LogprobsWriter]
    ) -> Prepared:
        request = asked.request
        if request.stream and request.prompt_logprobs is not None:
            message = "`prompt_logprobs` are not available when `stream=True`."
            raise RequestError(f"{message} (parameter=prompt_logprobs)", param="prompt_logprobs")
        check_cache_salt(request.cache_salt)
        requests = self._engine_requests(asked)
        params, name = requests[0].params, requests[0].request_id
        kv = kv_peer_answer(name, self._config.kv_role, self._config.kv_address)
        return Prepared(
            requests=requests,
            text=replace(
                text_params(request),
                echo_only=asked.max_tokens == 0,
                eos_id=None if params.ignore_eos else self._text.eos_token_id,
                extra_eos_ids=frozenset(self._text.eos_token_ids[1:]),
            ),
            frames=frames,
            stream=bool(request.stream),
            shown=self._shown(request, None if params.logprobs is None else new_logprobs),
            echoes=asked.echoes,
            keep_alive_seconds=self._config.sse_keep_alive_seconds,
            constraint=asked.constraint,
            resumption=resumption_of(request, requests, asked.response_id, asked.created, kv),
        )

    def _shown(
        self, request: GenerationFields, new_logprobs: Callable[[], LogprobsWriter] | None
    ) -> Shown:
        config, options = self._config, request.stream_options
        interval = request.stream_interval
        if interval is not None and interval < 1:
            message = f"stream_interval must be at least 1, got {interval}."
            raise malformed(message, "stream_interval")
        asked = None if request.prompt_logprobs is None else int(request.prompt_logprobs)
        usage = config.enable_force_include_usage or bool(options and options.include_usage)
        return Shown(
            new_logprobs=new_logprobs,
            prompt_logprobs=asked,
            token_ids=bool(request.return_token_ids),
            cached_tokens=config.enable_prompt_tokens_details,
            metrics=config.enable_per_request_metrics,
            usage=usage,
            continuous_usage=usage and bool(options and options.continuous_usage_stats),
            interval=config.stream_interval if interval is None else int(interval),
        )

    def _engine_requests(self, asked: _Asked) -> tuple[AddRequest, ...]:
        request, limits = asked.request, self._limits
        resume = request.resume or ResumeFields()
        if resume.seed is not None:
            request = msgspec.structs.replace(request, seed=resume.seed)
        transfer = kv_transfer(request, self._config.kv_role, [len(ids) for ids in asked.prompts])
        rooms = [room_for_output(len(ids), limits) for ids in asked.prompts]
        most = max(rooms) if asked.max_tokens is None else max(1, asked.max_tokens)
        if transfer.name is not None:  # the answer is another worker's
            most, request = 1, msgspec.structs.replace(request, min_tokens=0)
        params = sampling_params(request, most, asked.logprobs, self._sampling, self._rng)
        if asked.echoes and params.prompt_logprobs is None:
            # An echoed prompt shows the same log probabilities as the answer.
            params = replace(params, prompt_logprobs=params.logprobs)
        processors = logits_processors(request.vllm_xargs, self._sampling)
        params = replace(params, grammar=asked.grammar, logits_processors=processors)
        answered = resume.token_ids or []
        check_token_ids(answered, limits, "resume.token_ids")
        n = num_sequences(request, 1.0 if request.use_beam_search else params.temperature)
        if not transfer.keeps:  # else another worker searches
            params = self._searching(params, asked, n)
        if n * len(asked.prompts) > MAX_PROMPTS:
            reason = f"n × the number of prompts must be at most {MAX_PROMPTS}."
            raise invalid("n", n, reason)
        num_tokens = n * sum(map(len, asked.prompts))
        name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
        check_prompt_logprobs_size(params.prompt_logprobs, num_tokens, name, limits)
        priority = self.priority(request.priority, asked.arrival)
        kv = (request.kv_transfer_params, asked.arrival.kv_source)
        peer = kv_peer(resume.kv, *kv, self._config.kv_role, self._config.kv_address)
        requests = []
        for index, (ids, room) in enumerate(zip(asked.prompts, rooms, strict=True)):
            if index and request.seed in (None, -1):
                params = replace(params, seed=self._rng.getrandbits(63))
            check_min_tokens(params.min_tokens, min(most, room))
            # Clients may repeat an id (a retry); inside the engine it is unique all the same.
            request_id = f"{asked.response_id}-{index}-{secrets.token_hex(4)}"
            requests.append(
                AddRequest(
                    request_id=request_id,
                    prompt_token_ids=ids,
                    params=replace(params, max_tokens=min(most, room)),
                    arrival_seconds=asked.arrival.seconds,
                    priority=priority,
                    cache_salt=request.cache_salt,
                    branch_ids=[f"{i + 1}_{request_id}" for i in range(n - 1)],
                    tenant=asked.arrival.tenant,
                    adapter=asked.adapter,
                    kv_source=transfer.source,
                    keeps_kv=transfer.keeps,
                    kv_name=transfer.name,
                    output_token_ids=answered,
                    kv_peer=peer,
                )
            )
        return tuple(requests)

    def _searching(self, params: SamplingParams, asked: _Asked, n: int) -> SamplingParams:
        """The parameters for `n` answers by a beam search, where the request asks for one."""
        beam = beam_params(asked.request, n, params.logprobs, self._limits)
        if beam is None:
            return params
        if asked.constraint is not None:
            name = asked.constraint.field
            raise RequestError(f"`{name}` cannot be used with a beam search; leave it out", name)
        return searching(params, beam)

    def priority(self, asked: int | None, arrival: Arrival) -> int:
        """The header's, or what the body asks for. Raises `RequestError` where there are none."""
        priority = arrival.priority
        if priority is None:
            priority = int(asked or 0)
        if priority and not self._config.enable_priority:
            reason = f"Got priority {priority} but Priority scheduling is not enabled."
            raise invalid("priority", priority, reason)
        return priority


class TokenPreparer:
    """Bodies of `/inference/v1/generate` → `Prepared`: a text completion of token ids, which is
    checked as such and answered in another form.
    """

    def __init__(self, config: ApiConfig, text: ModelText, preparer: RequestPreparer) -> None:
        self._model = config.served_model_names[0]
        self._limits = text.limits
        self._token_bytes = text.tokenizer.token_bytes
        self._preparer = preparer

    async def prepare(self, body: bytes, arrival: Arrival) -> Prepared:
        """Without a limit the answer may fill the context. Raises `RequestError` (400, 404)."""
        request = decode(body, GenerateRequest)
        refuse_unsupported(request)
        sampling = request.sampling_params or TokenSampling()
        refuse_unsupported(sampling)
        arrival = replace(arrival, request_id=request.request_id or arrival.request_id)
        try:
            if sampling.truncate_prompt_tokens is None:
                room_for_output(len(request.token_ids), self._limits)  # before a look at each
            body = self._as_completion(request, sampling)
            prepared = await self._preparer.completion(body, arrival)
        except RequestError as error:
            if error.param is not None:
                error.param = error.param.replace("body.prompt", "body.token_ids", 1)
                error.param = error.param.replace("vllm_xargs", "extra_args", 1)
            error.message = error.message.replace("prompt[", "token_ids[", 1)
            error.message = error.message.replace("`vllm_xargs`", "`extra_args`", 1)
            raise  # in the words of the client
        shown = replace(prepared.shown, token_ids=True)
        if shown.new_logprobs is not None:
            shown = replace(
                shown, new_logprobs=lambda: ChatLogprobs(self._token_bytes, as_ids=True)
            )
        adapter = prepared.requests[0].adapter
        frames = TokenFrames(
            # As the client knows it, and as it may abort it: without the prefix of completions.
            response_of(prepared.requests[0].request_id).partition("-")[2],
            self._model if adapter is None else adapter.name,
            int(time.time()),
            with_text=request.output_mode == "text",
        )
        return replace(prepared, frames=frames, shown=shown)

    def _as_completion(self, request: GenerateRequest, sampling: TokenSampling) -> bytes:
        fields: dict[str, Any] = {
            name: value
            for name, value in msgspec.to_builtins(sampling, enc_hook=plain).items()
            if value is not None and name in _OF_COMPLETIONS
        }
        fields.setdefault("max_tokens", max(1, self._limits.max_model_len - len(request.token_ids)))
        for name in _OF_ALL:
            fields[name] = getattr(request, name)
        fields["prompt"], fields["vllm_xargs"] = request.token_ids, sampling.extra_args
        return _encode(fields)


def _n(request: GenerationFields) -> int:
    return 1 if request.n is None else max(1, int(request.n))


def _identity(prefix: str, request: GenerationFields, arrival: Arrival) -> tuple[str, int]:
    """The response's id, and when it was created: those that it has already, if it goes on."""
    resume = request.resume
    if resume is not None:
        check_resume(resume, prefix)
        if resume.id is not None and resume.created is not None:
            return resume.id, int(resume.created)
    return response_id(prefix, request.request_id, arrival), int(time.time())


def response_id(prefix: str, asked: str | None, arrival: Arrival) -> str:
    """The id of a response: the header's, the one the body asks for, or a new one."""
    if asked is not None and not (0 < len(asked) <= MAX_REQUEST_ID_CHARS and asked.isprintable()):
        reason = f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} printable characters."
        raise invalid("request_id", asked, reason)
    return f"{prefix}-{arrival.request_id or asked or secrets.token_hex(16)}"


def _chat_logprobs(request: ChatRequest, limits: ModelLimits) -> int | None:
    """How many of the likeliest tokens a chat asks for; None: no log probabilities at all."""
    asked = request.top_logprobs or 0
    check_count("top_logprobs", asked)
    if request.logprobs:
        return check_logprobs("logprobs", asked, limits)
    if asked:
        reason = "when using `top_logprobs`, `logprobs` must be set to true."
        raise invalid("top_logprobs", asked, reason)
    return None


def _echoed_turn(request: ChatRequest, role: str) -> str:
    """The last message, when the answer is the same speaker's and is to begin with it."""
    last = request.messages[-1]
    if not request.echo or last.role != role:
        return ""
    return content_of(last)
