"""The `derender` routes, which turn generated token ids into the answer that the client wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from worker.api.generate.choice import REPETITION_DETECTED, Choice
from worker.api.generate.frames import Answer, Frames, ResponseHead, TokenCounts
from worker.api.generate.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter
from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival, arrival_of
from worker.api.http.exchange import Exchange
from worker.api.http.field_errors import malformed
from worker.api.http.off_loop import off_loop_when_large
from worker.api.openai.chat import ChatFrames
from worker.api.openai.completions import CompletionFrames
from worker.api.routes.generation import GenerationRoutes
from worker.api.schema.answers import ChatCompletion, TextCompletion
from worker.api.schema.parse import Whole, decode_supported, refuse_unsupported
from worker.api.schema.requests import (
    MAX_PROMPTS,
    MAX_REQUEST_ID_CHARS,
    ChatRequest,
    CompletionRequest,
    TokenId,
    only,
)
from worker.api.schema.routes import Handler, text_route
from worker.engine.messages import RequestOutput
from worker.errors import RequestError
from worker.types import FinishReason, TokenLogprobs

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class TokenEntry(msgspec.Struct):
    """A token, written as its id (`token_id:N`), and its log probability; `bytes` are not read."""

    token: Annotated[str, msgspec.Meta(pattern=r"^token_id:[0-9]{1,18}$")]
    logprob: float
    bytes: Any = None
    top_logprobs: list[TokenEntry] | None = None

    @property
    def token_id(self) -> int:
        return int(self.token.removeprefix("token_id:"))

    def logprobs(self) -> TokenLogprobs:
        """Return the log probabilities; the rank counts only the listed likeliest tokens."""
        others = self.top_logprobs or []
        return TokenLogprobs(
            (self.token_id, *(other.token_id for other in others)),
            (self.logprob, *(other.logprob for other in others)),
            1 + sum(other.logprob > self.logprob for other in others),
        )


class TokenEntries(msgspec.Struct):
    """The `logprobs` of a choice."""

    content: list[TokenEntry] | None = None


class GeneratedChoice(msgspec.Struct):
    """One continuation, as token ids. Other fields may have any value."""

    token_ids: list[TokenId] | None = None
    logprobs: TokenEntries | None = None
    finish_reason: Literal["stop", "length", "abort", "repetition"] | None = None
    stop_reason: str | int | None = None


class GenerateAnswer(msgspec.Struct):
    """Answer of `/inference/v1/generate`, ours or vLLM's; only these fields are read."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
    choices: Annotated[list[GeneratedChoice], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class DerenderChatRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/chat/completions/derender`; tool calls need the `chat_request`."""

    generate_response: GenerateAnswer
    model: str | None = None
    prompt_tokens: _Tokens | None = None
    chat_request: ChatRequest | None = None
    stream: Annotated[Any, only(False)] = None


class DerenderCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/completions/derender`: an answer and a number of tokens for each prompt."""

    generate_responses: Annotated[
        list[GenerateAnswer], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
    ]
    model: str | None = None
    prompt_tokens: list[_Tokens] | None = None
    completion_request: CompletionRequest | None = None
    stream: Annotated[Any, only(False)] = None


class Derenderer:
    def __init__(self, generation: GenerationRoutes) -> None:
        self._generation = generation
        self._checks = generation.checks
        self._config = generation.checks.config
        self._text = generation.checks.text

    async def chat(self, exchange: Exchange) -> None:
        body = decode_supported(await self._body(exchange), DerenderChatRequest)
        given = body.generate_response
        new = partial(ChatLogprobs, self._text.tokenizer.token_bytes, as_ids=False)
        asked = body.chat_request
        prepared, known = await self._prepared(exchange, body.model, asked, given, ChatFrames, new)
        count = sum(known) if body.prompt_tokens is None else body.prompt_tokens
        await self._answer(exchange, prepared, ["generate_response"], [given], count)

    async def completion(self, exchange: Exchange) -> None:
        body = decode_supported(await self._body(exchange), DerenderCompletionRequest)
        given, asked = body.generate_responses, body.completion_request
        if asked is not None and asked.echo:
            message = "`completion_request.echo` is not supported; leave it out"
            raise RequestError(message, param="completion_request.echo")
        tokenizer = self._text.tokenizer
        special = tokenizer.special_ids
        new = partial(CompletionLogprobs, tokenizer.token_bytes, as_ids=False, skip_ids=special)
        prepared, known = await self._prepared(
            exchange, body.model, asked, given[0], CompletionFrames, new
        )
        if asked is None:
            known = [0] * len(given)
        counts = known if body.prompt_tokens is None else body.prompt_tokens
        for name, number in (("completion_request", len(known)), ("prompt_tokens", len(counts))):
            if number != len(given):
                message = f"{name} has {number} prompts, generate_responses has {len(given)}"
                raise malformed(message, name)
        names = [f"generate_responses[{n}]" for n in range(len(given))]
        await self._answer(exchange, prepared, names, given, sum(n or 0 for n in counts))

    async def _prepared(
        self,
        exchange: Exchange,
        model: str | None,
        request: ChatRequest | CompletionRequest | None,
        given: GenerateAnswer,
        new_frames: Callable[[ResponseHead], Frames],
        new_logprobs: Callable[[], LogprobsWriter],
    ) -> tuple[Prepared, list[int]]:
        """Check a request, with its own route's errors; return also the sizes of its prompts."""
        self._checks.adapters.adapter_of(model)
        if request is not None:
            refuse_unsupported(request)
            if isinstance(request, ChatRequest):
                arrival = self._arrival(exchange, given.request_id.removeprefix("chatcmpl-"))
                prepared = await self._generation.chat.prepared(request, arrival)
            else:
                arrival = self._arrival(exchange, given.request_id.removeprefix("cmpl-"))
                prepared = await self._generation.completions.prepared(request, arrival)
            return prepared, [len(ask.prompt_token_ids) for ask in prepared.requests]
        # A request without options stands for the one that is not given.
        plain = CompletionRequest(model=model, prompt=[0], max_tokens=Whole(1))
        arrival = self._arrival(exchange, "")
        prepared = await self._generation.completions.prepared(plain, arrival)
        adapter = prepared.requests[0].adapter
        head = self._checks.head(given.request_id, adapter, int(time.time()))
        shown = replace(prepared.shown, new_logprobs=new_logprobs)
        return replace(prepared, frames=new_frames(head), shown=shown), []

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.json_body(self._config.max_body_bytes)

    def _arrival(self, exchange: Exchange, request_id: str) -> Arrival:
        return arrival_of(exchange, request_id or None, time.monotonic(), self._config.api_keys)

    async def _answer(
        self,
        exchange: Exchange,
        prepared: Prepared,
        names: Sequence[str],
        given: Sequence[GenerateAnswer],
        prompt_tokens: int,
    ) -> None:
        choices = [
            (f"{name}.choices[{n}]", choice)
            for name, one in zip(names, given, strict=True)
            for n, choice in enumerate(one.choices)
        ]
        if len(choices) > MAX_PROMPTS:
            raise malformed(f"There are {len(choices)} choices, at most {MAX_PROMPTS}", names[0])
        for name, choice in choices:
            self._check_length(name, choice)
        ids = [choice.token_ids or [] for _, choice in choices]
        await self._checks.check_ids(ids, [f"{name}.token_ids" for name, _ in choices])
        frames: Frames = prepared.frames

        def body() -> bytes:
            answers = [self._derendered(n, *one, prepared) for n, one in enumerate(choices)]
            usage = TokenCounts(prompt_tokens, sum(map(len, ids)), None)
            return frames.body(answers, usage, None)

        await exchange.reply(await off_loop_when_large(sum(map(len, ids)), body))

    def _check_length(self, name: str, choice: GeneratedChoice) -> None:
        count, most = len(choice.token_ids or []), self._text.limits.max_model_len
        if count > most:
            place = f"{name}.token_ids"
            raise malformed(f"{place} has {count} ids, this model's context {most}", place)

    def _derendered(
        self, index: int, name: str, given: GeneratedChoice, prepared: Prepared
    ) -> Answer:
        text, ids = prepared.text, given.token_ids or []
        stopped_at = given.stop_reason
        if isinstance(stopped_at, str) and stopped_at not in ("", REPETITION_DETECTED):
            text = replace(text, stop=tuple({*text.stop, stopped_at}))
        choice = Choice(index, prepared.requests[0], text, self._text.tokenizer, prepared.form)
        reason = FinishReason(given.finish_reason or "stop")
        ends = {stopped_at, text.eos_id, *text.extra_eos_ids}
        ends |= {*prepared.requests[0].params.stop_token_ids}
        is_ended = reason is FinishReason.STOP and bool(ids) and ids[-1] in ends
        piece = choice.take(
            RequestOutput(
                prepared.requests[0].request_id,
                ids,
                finish_reason=reason,
                stop_token_id=ids[-1] if is_ended else None,
                logprobs=self._logprobs(name, given),
            )
        )
        assert choice.ending is not None  # noqa: S101 (the output has a reason)
        ending = replace(choice.ending, stop_reason=stopped_at)
        shown, logprobs = prepared.shown, None
        if shown.new_logprobs is not None and given.logprobs is not None:
            logprobs = shown.new_logprobs().take(piece.logprobs)
        return Answer(
            text=piece.text,
            ending=ending,
            logprobs=logprobs,
            token_ids=ids if shown.token_ids else None,
            reasoning=piece.reasoning,
            calls=piece.calls,
        )

    def _logprobs(self, name: str, given: GeneratedChoice) -> list[TokenLogprobs]:
        content = None if given.logprobs is None else given.logprobs.content
        if content is None:
            return []
        place = f"{name}.logprobs.content"
        if len(content) != len(given.token_ids or []):
            raise malformed(f"{place} must have an entry for each of token_ids", place)
        entries = [entry.logprobs() for entry in content]
        size = self._text.limits.vocab_size
        if any(token_id >= size for entry in entries for token_id in entry.token_ids):
            raise malformed(f"{place} names a token that is out of vocabulary", place)
        return entries


ROUTES = (
    text_route(
        "/v1/completions/derender",
        "derender_completion",
        "Answers of /inference/v1/generate, one a prompt, as the answer of /v1/completions",
        DerenderCompletionRequest,
        TextCompletion,
    ),
    text_route(
        "/v1/chat/completions/derender",
        "derender_chat",
        "An answer of /inference/v1/generate as the answer of /v1/chat/completions",
        DerenderChatRequest,
        ChatCompletion,
    ),
)


def handlers(generation: GenerationRoutes) -> dict[str, Handler]:
    derenderer = Derenderer(generation)
    return {"derender_chat": derenderer.chat, "derender_completion": derenderer.completion}
