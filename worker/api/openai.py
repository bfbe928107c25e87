"""OpenAI requests ↔ engine requests: parse, check, render, tokenize; then run and answer."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from worker.api.choice import Choice
from worker.api.engine import Engine, OutputStream
from worker.api.exchange import Exchange
from worker.api.params import (
    ModelLimits,
    TextParams,
    check_cache_salt,
    check_prompt_chars,
    check_token_ids,
    prompts_of,
    requested_max_tokens,
    room_for_output,
    sampling_params,
    template_messages,
    text_params,
)
from worker.api.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    decode_generation,
)
from worker.api.sse import (
    DONE,
    Answer,
    ChatFrames,
    CompletionFrames,
    Frames,
    ResponseHead,
    Usage,
)
from worker.config import ApiConfig
from worker.engine.messages import AddRequest, RequestOutput
from worker.errors import EngineDeadError, RequestError
from worker.metrics import WorkerMetrics
from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import FinishReason

DEFAULT_COMPLETION_TOKENS = 16
# A longer text is encoded in a thread; below, the hand-over costs more than it saves.
_INLINE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class TextSide:
    """The model's text: tokenizer, template (None: not a chat model), and limits."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: ModelLimits

    def render(self, messages: Sequence[ChatMessage], request: ChatOptions) -> str:
        """The prompt of a conversation."""
        if self.template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions", param="messages"
            )
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        return self.template.render(
            template_messages(messages),
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=variables,
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, long ones in a thread. Refuses a hopelessly long one (400)."""
        check_prompt_chars(text, self.limits)
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )


class ChatOptions(Protocol):
    """The part of a request that the chat template sees besides the messages."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, object] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: what to ask of the engine, and how to answer."""

    requests: tuple[AddRequest, ...]
    text: TextParams
    frames: Frames
    stream: bool
    include_usage: bool
    continuous_usage: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came in: its id as the client gave it, and when (monotonic)."""

    request_id: str | None
    seconds: float


class RequestPreparer:
    """Bodies → `Prepared`. Every error a client can make is found here, before the engine."""

    def __init__(self, config: ApiConfig, text: TextSide, rng: random.Random) -> None:
        self._text = text
        self._rng = rng
        self._model = config.served_model_names[0]
        self._served = config.served_model_names
        self._accepted = {*config.served_model_names, *config.accepted_model_names}

    async def chat(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/chat/completions`; without a limit the answer may fill the context."""
        request = decode_generation(body, ChatRequest)
        self.check_model(request.model)
        prompt = self._text.render(request.messages, request)
        ids = await self._text.encode(prompt, add_special_tokens=bool(request.add_special_tokens))
        limit = requested_max_tokens(request, request.max_completion_tokens, self._text.limits)
        return self._prepare(request, [ids], limit, arrival)

    async def completion(self, body: bytes, arrival: Arrival) -> Prepared:
        """`POST /v1/completions`; without a limit the answer has 16 tokens."""
        request = decode_generation(body, CompletionRequest)
        self.check_model(request.model)
        special = request.add_special_tokens is not False
        prompts = []
        for prompt in prompts_of(request.prompt):
            if isinstance(prompt, str):
                prompts.append(await self._text.encode(prompt, add_special_tokens=special))
            else:
                check_token_ids(prompt, self._text.limits)
                prompts.append(prompt)
        limit = requested_max_tokens(request, None, self._text.limits)
        return self._prepare(request, prompts, limit or DEFAULT_COMPLETION_TOKENS, arrival)

    def check_model(self, name: str | None) -> None:
        """A model nobody named is ours; a wrong name is a 404."""
        if name and name not in self._accepted:
            raise RequestError(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self._served)}.",
                param="model",
                status=404,
                type="NotFoundError",
            )

    def _prepare(
        self,
        request: GenerationFields,
        prompts: list[list[int]],
        max_tokens: int | None,
        arrival: Arrival,
    ) -> Prepared:
        check_cache_salt(request.cache_salt)
        is_chat = isinstance(request, ChatRequest)
        external = arrival.request_id or request.request_id or secrets.token_hex(16)
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{external}"
        head = ResponseHead(response_id, self._model, int(time.time()))
        options = request.stream_options
        return Prepared(
            requests=tuple(
                self._engine_request(request, n, ids, max_tokens, response_id, arrival)
                for n, ids in enumerate(prompts)
            ),
            text=text_params(request),
            frames=ChatFrames(head) if is_chat else CompletionFrames(head),
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )

    def _engine_request(
        self,
        request: GenerationFields,
        index: int,
        ids: list[int],
        max_tokens: int | None,
        response_id: str,
        arrival: Arrival,
    ) -> AddRequest:
        limits = self._text.limits
        room = room_for_output(len(ids), limits)
        allowed = room if max_tokens is None else min(max_tokens, room)
        return AddRequest(
            # Clients may repeat an id (a retry); inside the engine it is unique all the same.
            request_id=f"{response_id}-{index}-{secrets.token_hex(4)}",
            prompt_token_ids=ids,
            params=sampling_params(request, allowed, limits, self._rng),
            arrival_seconds=arrival.seconds,
            cache_salt=request.cache_salt,
        )


Sink = Callable[[Choice, str], Awaitable[None]]


class Runner:
    """Runs prepared requests on the engine and writes the answers."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._token_bytes = tokenizer.token_bytes
        self._special_ids = tokenizer.special_ids
        self._metrics = metrics

    async def answer(self, prepared: Prepared, exchange: Exchange) -> None:
        """Run to the end and reply. Cancellation aborts whatever still runs in the engine.

        Nothing is sent before the first token, so that an error before it has a status of its own
        and a proxy can still retry elsewhere. Raises `RequestError`, `EngineDeadError`,
        `ClientGoneError`.
        """
        choices = [
            Choice(n, request, prepared.text, self._token_bytes, self._special_ids)
            for n, request in enumerate(prepared.requests)
        ]
        if prepared.stream:
            await self._run_all(choices, _StreamWriter(prepared, choices, exchange))
            return
        texts: list[list[str]] = [[] for _ in choices]

        async def collect(choice: Choice, text: str) -> None:
            texts[choice.index].append(text)

        await self._run_all(choices, collect)
        answers = [
            Answer("".join(parts), choice.ending)
            for parts, choice in zip(texts, choices, strict=True)
            if choice.ending is not None
        ]
        await exchange.reply(prepared.frames.body(answers, _usage(choices)))

    async def _run_all(self, choices: list[Choice], sink: Sink) -> None:
        if len(choices) == 1:
            await self._run(choices[0], sink)
            return
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(self._run(choice, sink), name=choice.request.request_id)

    async def _run(self, choice: Choice, sink: Sink) -> None:
        previous: float | None = None
        try:
            stream = self._open(choice.request)
            with closing(stream):
                while choice.ending is None:
                    output = await stream.next()
                    text = choice.take(output)
                    self._observe(choice, output, previous)
                    previous = output.last_token_seconds
                    await sink(choice, text)
        except EngineDeadError:
            choice.reason = FinishReason.ERROR
            raise
        finally:
            self._metrics.request_ended(choice.record(time.monotonic()))

    def _open(self, request: AddRequest) -> OutputStream:
        return self._engine.open(request)[0]

    def _observe(self, choice: Choice, output: RequestOutput, previous: float | None) -> None:
        """Time to first token, then one gap for every output step; a consumer that lagged gets
        several steps as one output, and counts as that many equal gaps.
        """
        latest = output.last_token_seconds
        if latest is None or not output.token_ids:
            return
        if previous is None:
            self._metrics.first_token(time.monotonic() - choice.request.arrival_seconds)
            return
        steps = len(output.token_ids)
        for _ in range(steps):
            self._metrics.next_tokens((latest - previous) / steps)


class _StreamWriter:
    """The sink of a streamed response. Owns which choices have begun and how many have ended."""

    def __init__(self, prepared: Prepared, choices: list[Choice], exchange: Exchange) -> None:
        self._frames = prepared.frames
        self._include_usage = prepared.include_usage
        self._continuous_usage = prepared.continuous_usage
        self._choices = choices
        self._exchange = exchange
        self._begun = [False] * len(choices)
        self._lock = asyncio.Lock()  # choices of several prompts write from tasks of their own

    async def __call__(self, choice: Choice, text: str) -> None:
        """Write what one engine step gave one choice, in one piece."""
        frames = b""
        if not self._begun[choice.index]:
            self._begun[choice.index] = True
            frames = self._frames.opening(choice.index)
        if text or choice.ending is not None:
            usage = _usage([choice]) if self._continuous_usage else None
            frames += self._frames.delta(choice.index, text, choice.ending, usage)
        last = all(c.ending is not None for c in self._choices)
        if last:
            if self._include_usage:
                frames += self._frames.usage(_usage(self._choices))
            frames += DONE
        if frames:
            async with self._lock:
                await self._exchange.write_event(frames, last=last)


def _usage(choices: list[Choice]) -> Usage:
    return Usage(
        prompt_tokens=sum(len(c.request.prompt_token_ids) for c in choices),
        completion_tokens=sum(c.num_generated for c in choices),
        cached_tokens=sum(c.num_cached for c in choices),
    )
