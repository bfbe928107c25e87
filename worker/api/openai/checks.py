"""The checks that APIs share, which turn a request and its prompts into engine requests."""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec

from worker.api.generate.adapters import ServedAdapters
from worker.api.generate.answer_plans import AnswerPlan, AnswerPlans
from worker.api.generate.frames import Frames, PromptFacts, ResponseHead
from worker.api.generate.logprobs import LogprobsWriter
from worker.api.generate.prepared import Prepared, Shown
from worker.api.generate.resumption import check_resume, resumption_of
from worker.api.generate.text import ModelText
from worker.api.http.arrival import Arrival
from worker.api.http.field_errors import Field, FieldError, malformed, refused
from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema.kv_transfer import KvTransfer, kv_peer, kv_peer_answer, kv_transfer
from worker.api.schema.params import ModelLimits, Sampling, SamplingContext, invalid, sampling_of
from worker.api.schema.parse import Whole
from worker.api.schema.requests import (
    MAX_CACHE_SALT_CHARS,
    MAX_PROMPTS,
    MAX_REQUEST_ID_CHARS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResumeFields,
)
from worker.config import ApiConfig
from worker.engine.messages import AddRequest
from worker.errors import RequestError
from worker.types import Adapter, KvPeer

DEFAULT_COMPLETION_TOKENS = 16
NewFrames = Callable[[ResponseHead, PromptFacts], Frames]
NewLogprobs = Callable[[bool], LogprobsWriter]
_NO_TRANSFER = KvTransfer()
_NO_RESUME = ResumeFields()
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request and their fields; `texts` are as sent, empty if any is not text."""

    ids: list[list[int]]
    fields: Sequence[str]
    are_encoded: bool = True
    texts: Sequence[str] = ()


class RequestChecks:
    """Checks requests to one worker."""

    def __init__(
        self, config: ApiConfig, text: ModelText, rng: random.Random, adapters: ServedAdapters
    ) -> None:
        self.config = config
        self.text = text
        self.adapters = adapters
        self.plans = AnswerPlans(config, text)
        self._rng = rng
        self._limits = replace(text.limits, max_logprobs=config.max_logprobs)
        self._sampling = SamplingContext(
            self._limits,
            partial(text.tokenizer.encode, add_special_tokens=False),
            dict(config.default_sampling),
            config.logits_processors,
        )
        # A fine-tune's tokenizer may name tokens its model has no embedding for.
        self._may_encode_unknown = text.tokenizer.vocab_size > text.limits.vocab_size
        self._eos_id = text.eos_token_ids[0] if text.eos_token_ids else None
        self._extra_eos_ids = frozenset(text.eos_token_ids[1:])

    async def prepared(
        self,
        request: ChatRequest | CompletionRequest,
        arrival: Arrival,
        adapter: Adapter | None,
        prompts: Prompts,
        plan: AnswerPlan,
        new_frames: NewFrames,
        new_logprobs: NewLogprobs,
    ) -> Prepared:
        """Check a request. `new_logprobs(True)` gives tokens as ids. Raises `RequestError`."""
        _check_stream(request)
        limit = max_tokens_of(request, self._limits)
        prompts = await self._fitted(request, prompts, limit)
        # After truncation, which leaves room for the number that the client asked for.
        limit = self._capped(limit)
        name, created = _identity(request, arrival)
        first, sampling = self._first(request, arrival, adapter, prompts, limit, plan)
        # Last, as compiling costs more than all other checks.
        if plan.constraint is not None:
            params = replace(first.params, grammar=await self.plans.grammar(plan))
            first = msgspec.structs.replace(first, params=params)
        requests = self._requests(request, first, name, prompts.ids, sampling.n)
        resumption = None
        # Only such streams carry the header, whose checksum costs a pass over the prompt.
        if request.resume is not None:
            kv = kv_peer_answer(requests[0].request_id, self.config.kv_role, self.config.kv_address)
            resumption = resumption_of(request, requests, name, created, kv)
        shown_ids = prompts.ids if request.return_token_ids else None
        facts = PromptFacts(shown_ids, choices_each=sampling.n)
        params = sampling.params
        return Prepared(
            requests,
            replace(
                sampling.text,
                echo_only=limit == 0,
                eos_id=None if params.ignore_eos else self._eos_id,
                extra_eos_ids=self._extra_eos_ids,
                shown_ids=plan.shown_ids,
            ),
            new_frames(self.head(name, adapter, created), facts),
            bool(request.stream),
            self._shown(request, None if params.logprobs is None else new_logprobs),
            await self._echoes(request, prompts),
            self.config.sse_keep_alive_seconds,
            plan.constraint,
            plan.form,
            resumption,
        )

    def _first(
        self,
        request: ChatRequest | CompletionRequest,
        arrival: Arrival,
        adapter: Adapter | None,
        prompts: Prompts,
        limit: int | None,
        plan: AnswerPlan,
    ) -> tuple[AddRequest, Sampling]:
        sizes = [len(ids) for ids in prompts.ids]
        rooms = [room_for_output(size, self._limits) for size in sizes]
        transfer, peer = self._kv(request, arrival, sizes)
        resume = request.resume or _NO_RESUME
        check_token_ids(resume.token_ids or (), self._limits, "resume.token_ids")
        # The longest room bounds the answers; each prompt's own room is applied below.
        sampled, most = request, max(rooms) if limit is None else max(1, limit)
        if resume.seed is not None:
            sampled = msgspec.structs.replace(sampled, seed=resume.seed)
        if transfer.name is not None:  # another worker answers
            sampled, most = msgspec.structs.replace(sampled, min_tokens=Whole(0)), 1
        sampling = sampling_of(
            sampled,
            most,
            sizes,
            self._sampling,
            self._rng,
            searches=not transfer.keeps,
            constraint=None if plan.constraint is None else plan.constraint.field,
        )
        first = AddRequest(
            "",
            [],
            sampling.params,
            arrival.seconds,
            self.priority(request.priority, arrival),
            request.cache_salt,
            tenant=arrival.tenant,
            adapter=adapter,
            kv_source=transfer.source,
            keeps_kv=transfer.keeps,
            kv_name=transfer.name,
            output_token_ids=resume.token_ids or [],
            kv_peer=peer,
        )
        return first, sampling

    async def _fitted(
        self, request: GenerationFields, prompts: Prompts, max_tokens: int | None
    ) -> Prompts:
        if request.truncate_prompt_tokens is not None:
            asked, side = request.truncate_prompt_tokens, request.truncation_side
            room = max(1, max_tokens or 1)
            ids = [truncated(ids, asked, side, room, self._limits) for ids in prompts.ids]
            prompts = replace(prompts, ids=ids, texts=())
        # The tokenizer's own ids are the model's unless it knows more of them.
        if self._may_encode_unknown or not prompts.are_encoded:
            await self.check_ids(prompts.ids, prompts.fields)
        return prompts

    async def check_ids(self, prompts: Sequence[Sequence[int]], fields: Sequence[str]) -> None:
        def check() -> None:
            for ids, name in zip(prompts, fields, strict=True):
                check_token_ids(ids, self._limits, name)

        await off_loop_when_large(sum(map(len, prompts)), check)

    def _capped(self, max_tokens: int | None) -> int | None:
        defaults = self._sampling.defaults
        own = defaults.get("max_tokens", defaults.get("max_new_tokens"))
        if own is None:
            return max_tokens
        return int(own) if max_tokens is None else min(max_tokens, int(own))

    def _kv(
        self, request: GenerationFields, arrival: Arrival, prompt_sizes: Sequence[int]
    ) -> tuple[KvTransfer, KvPeer | None]:
        role, given = self.config.kv_role, request.kv_transfer_params
        # The usual worker transfers nothing, and the usual request asks for nothing.
        if role is None and not given and request.bootstrap_room is None:
            return _NO_TRANSFER, None
        transfer = kv_transfer(request, role, prompt_sizes)
        resumed = None if request.resume is None else request.resume.kv
        peer = kv_peer(resumed, given, arrival.kv_source, role, self.config.kv_address)
        return transfer, peer

    def _requests(
        self,
        request: GenerationFields,
        first: AddRequest,
        response_id: str,
        prompts: Sequence[list[int]],
        n: int,
    ) -> tuple[AddRequest, ...]:
        resume, params = request.resume or _NO_RESUME, first.params
        draws_seeds = request.seed in (None, -1) and resume.seed in (None, -1)
        requests = []
        for index, ids in enumerate(prompts):
            # Equal prompts of one request are to have different answers.
            if index and draws_seeds:
                params = replace(params, seed=self._rng.getrandbits(63))
            room = self._limits.max_model_len - len(ids)
            # Clients may repeat an id (a retry); inside the engine it is unique all the same.
            request_id = f"{response_id}-{index}-{secrets.token_hex(4)}"
            requests.append(
                msgspec.structs.replace(
                    first,
                    request_id=request_id,
                    prompt_token_ids=ids,
                    params=replace(params, max_tokens=min(params.max_tokens, room)),
                    branch_ids=[f"{i + 1}_{request_id}" for i in range(n - 1)],
                )
            )
        return tuple(requests)

    async def _echoes(
        self, request: ChatRequest | CompletionRequest, prompts: Prompts
    ) -> tuple[str, ...]:
        if isinstance(request, ChatRequest) or not request.echo:
            return ()
        return tuple(prompts.texts or await self.text.decode_all(prompts.ids))

    def head(self, response_id: str, adapter: Adapter | None, created: int) -> ResponseHead:
        model = self.config.served_model_names[0] if adapter is None else adapter.name
        return ResponseHead(response_id, model, created, self.config.system_fingerprint)

    def _shown(self, request: GenerationFields, new_logprobs: NewLogprobs | None) -> Shown:
        config, options = self.config, request.stream_options
        interval = request.stream_interval
        if interval is not None and interval < 1:
            message = f"stream_interval must be at least 1, got {interval}."
            raise malformed(message, "stream_interval")
        usage = config.enable_force_include_usage or bool(options and options.include_usage)
        as_ids = request.return_tokens_as_token_ids
        as_ids = config.return_tokens_as_token_ids if as_ids is None else as_ids
        likeliest = request.prompt_logprobs
        return Shown(
            new_logprobs=None if new_logprobs is None else partial(new_logprobs, as_ids),
            prompt_logprobs=None if likeliest is None else int(likeliest),
            token_ids=bool(request.return_token_ids),
            cached_tokens=config.enable_prompt_tokens_details,
            metrics=config.enable_per_request_metrics,
            usage=usage,
            continuous_usage=usage and bool(options and options.continuous_usage_stats),
            interval=config.stream_interval if interval is None else int(interval),
        )

    def priority(self, asked: int | None, arrival: Arrival) -> int:
        """Return the header's priority, else the body's. Raises `RequestError` if not enabled."""
        # The gateway's header outranks the client's body.
        priority = arrival.priority
        if priority is None:
            priority = int(asked or 0)
        if priority and not self.config.enable_priority:
            reason = f"Got priority {priority} but Priority scheduling is not enabled."
            raise invalid("priority", priority, reason)
        return priority


def _check_stream(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        message = "Stream options can only be defined when `stream=True`."
        raise RequestError(f"{message} (parameter=stream_options)", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise RequestError(f"{message} (parameter=prompt_logprobs)", param="prompt_logprobs")
    check_cache_salt(request.cache_salt)


def check_cache_salt(salt: str | None) -> None:
    """Check the salt: it separates tenants' prefix caches, so an empty one is a mistake."""
    if salt is None:
        return
    if not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or set(salt) & set("@/\\\0"):
        limit = f"must have 1 to {MAX_CACHE_SALT_CHARS} characters, none of @ / \\ NUL"
        raise refused("cache_salt", limit)


def max_tokens_of(request: ChatRequest | CompletionRequest, limits: ModelLimits) -> int | None:
    """Return the checked limit of an answer's tokens; None if it may fill the context."""
    # An echo alone is an answer of no tokens.
    least, name, value = 1, "max_tokens", request.max_tokens
    if isinstance(request, CompletionRequest):
        least = 0 if request.echo else 1
        if value is None:
            return DEFAULT_COMPLETION_TOKENS
    elif request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    if value is None:
        return None
    if value < least:
        raise invalid("max_tokens", value, Field(name), f" must be at least 1, got {value}.")
    if value > limits.max_model_len:
        limit = f"max_model_len={limits.max_model_len}."
        reason = f"={value} cannot be greater than {limit} Please request fewer output tokens."
        raise invalid(name, value, Field(name), reason)
    return int(value)


def _identity(request: ChatRequest | CompletionRequest, arrival: Arrival) -> tuple[str, int]:
    """Return a response's id and time of creation; a resumed stream already has both."""
    prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
    resume = request.resume
    if resume is not None:
        check_resume(resume, prefix)
        if resume.id is not None and resume.created is not None:
            return resume.id, int(resume.created)
    return response_id(prefix, request.request_id, arrival), int(time.time())


def response_id(prefix: str, asked: str | None, arrival: Arrival) -> str:
    """Return the id in the header, else the one that the body asks for, else a new one."""
    # The id becomes part of the response and of the ids in the engine.
    if asked is not None and not (0 < len(asked) <= MAX_REQUEST_ID_CHARS and asked.isprintable()):
        reason = f" must have 1 to {MAX_REQUEST_ID_CHARS} printable characters."
        raise invalid("request_id", asked, Field("request_id"), reason)
    return f"{prefix}-{arrival.request_id or asked or secrets.token_hex(16)}"


def prompts_of(
    prompt: str | list[str | int | list[int]], limits: ModelLimits | None = None
) -> list[str | list[int]]:
    """Return the prompts. With `limits`, refuse too many ids before looking at each of them."""
    name = Field("prompt")
    if not prompt:
        raise FieldError(name, " cannot be empty", param=name if prompt == "" else None)
    if isinstance(prompt, str):
        return [prompt]
    is_ids = isinstance(prompt[0], int)
    if not is_ids and len(prompt) > MAX_PROMPTS:
        raise refused(name, f"takes at most {MAX_PROMPTS} prompts")
    if limits is not None:
        for ids in [prompt] if is_ids else prompt:
            if isinstance(ids, list):
                room_for_output(len(ids), limits)
    # One pass in C over what may be a million ids.
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds not in ({str}, {list}):
        reason = (
            " must be a string, a list of strings, a list of token ids, or a list of such lists;"
            " not a mixture"
        )
        other = next(n for n, one in enumerate(prompt) if type(one) is not int)
        raise malformed((name, reason), f"{name}[{other}]")
    return cast(list[str | list[int]], prompt)


def prompt_fields(given: Sequence[object], prompt: object) -> list[str]:
    if len(given) == 1 and given[0] is prompt:
        return ["prompt"]
    return [f"prompt[{n}]" for n in range(len(given))]


def room_for_output(num_prompt_tokens: int, limits: ModelLimits) -> int:
    """Return how many tokens can follow a prompt; one that leaves none is refused."""
    if num_prompt_tokens == 0:
        raise RequestError("The decoder prompt cannot be empty")
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" prompt contains {num_prompt_tokens} input tokens, which leaves no room for an"
            " answer. Please reduce the length of the prompt.",
            # As vLLM, to which a prompt of just the context leaves max_tokens of 0.
            param="input_tokens" if room else "max_tokens",
        )
    return room


def truncated(
    token_ids: list[int], asked: int | None, side: str | None, max_tokens: int, limits: ModelLimits
) -> list[int]:
    """Cut a prompt to `asked` tokens; -1 leaves room for `max_tokens` in the context."""
    if asked is None:
        return token_ids
    name = "truncate_prompt_tokens"
    if asked < -1:
        raise malformed(f"{name} must be at least 1, or -1, got {asked}.", name)
    if asked == 0:
        reason = f"{name} must be at least 1, or -1, got 0: the "
        raise FieldError(reason, Field("prompt"), " would be empty.")
    if asked > limits.max_model_len:
        reason = f"{name}={asked} cannot be greater than max_model_len = {limits.max_model_len}."
        raise invalid(name, asked, f"{reason} Please request a smaller truncation size.")
    size = max(1, limits.max_model_len - max_tokens) if asked == -1 else asked
    return token_ids[:size] if side == "right" else token_ids[-size:]


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, name: str = "prompt") -> None:
    """Refuse ids in the field `name` that are not the model's; the engine trusts them."""
    if not token_ids:
        return
    # Two passes in C; the place of a wrong id is looked for only if there is one.
    least, most = min(token_ids), max(token_ids)
    if least < 0 or most >= _INT64:
        wrong = next(n for n, i in enumerate(token_ids) if not 0 <= i < _INT64)
        place = f"{name}[{wrong}]"
        reason = f": Token ids must be in [0, {limits.vocab_size})"
        raise malformed((Field(place), reason), place)
    if most >= limits.vocab_size:
        raise RequestError(
            f"Token id {most} is out of vocabulary: ids must be in [0, {limits.vocab_size})",
            name if name.startswith("resume.") else None,  # vLLM names no field of its own
        )
