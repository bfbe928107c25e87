"""Offline use: `LLM` answers prompts in the caller's process, without HTTP and an engine process.

It is another caller of the server's parts: prompts pass the checks of the HTTP API, the same engine
core runs them, and the same code turns tokens into text. Names and results are those of vLLM's.
"""

import asyncio
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar, cast

import msgspec

from worker.api.generate.adapters import load_adapters
from worker.api.generate.choice import Choice, Piece, joined
from worker.api.generate.frames import OpenAiFrames
from worker.api.generate.logprobs import ranked
from worker.api.generate.prepared import Prepared
from worker.api.generate.response import PromptRun, prompt_runs
from worker.api.generate.text import build_text
from worker.api.http.arrival import Arrival
from worker.api.openai.chat import ChatApi
from worker.api.openai.checks import RequestChecks
from worker.api.openai.completions import CompletionApi
from worker.api.openai.embeddings import EmbeddingApi, EmbeddingFrames
from worker.api.schema.embeddings import EmbeddingRequest
from worker.api.schema.parse import checked, refuse_unsupported
from worker.api.schema.requests import ChatRequest, CompletionRequest, TokenSampling, fields_shared
from worker.cli.flags import read_config
from worker.cli.keywords import options_of
from worker.engine.core import EngineCore
from worker.engine.messages import Command, CommandReply, RequestOutput
from worker.engine.process.build import build_core
from worker.engine.process.client import merge
from worker.engine.sequences.grammar import GrammarCompiler
from worker.errors import RequestError, WorkerError
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import TokenLogprobs

SamplingParams = TokenSampling
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Outputs = TypeVar("Outputs")
T = TypeVar("T")
_WAIT_SECONDS = 0.002  # while a grammar compiles, or a disk is read


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `token_ids` include the token that ended it. `logprobs`, if asked for, hold for
    each token itself and the likeliest ones, by id.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class PromptOutput(Generic[Outputs]):
    """A prompt and its answers, or its embedding. `prompt` is the text, of a conversation as the
    template wrote it; None for token ids. The first of `prompt_logprobs` is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Outputs
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    finished: bool = True


class LLM:
    """A model in this process. `flags` are those of `pointsman worker`, with underscores; without
    `model`, it is the default model. Calls of several threads run one after the other.

    All raise `WorkerError`: a `ConfigError` for flags, a `ModelError` for a checkpoint, and for a
    request a `RequestError` that names the prompt, before any prompt runs. On an engine's failure
    the LLM is closed.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **flags: Any) -> None:
        named = {} if model is None else {"model": os.fspath(model)}
        config, checkpoint = read_config(options_of({**flags, **named}), os.environ)
        parts = build_text(config, checkpoint)
        core, ready = build_core(config.engine)
        if parts.vocabulary is not None:
            core.take_vocabulary(parts.vocabulary)
        api = replace(config.api, max_model_len=min(config.api.max_model_len, ready.max_model_len))
        text = parts.of_model(replace(config, api=api))
        self._core: EngineCore | None = core
        # Runs at `close`, when no reference is left, or when the interpreter ends.
        self._closing = weakref.finalize(self, _close, core, text.grammars)
        self._lock = threading.RLock()
        self._tokenizer: Tokenizer = text.tokenizer
        try:
            # No reference to itself, or only the garbage collector would give back the memory.
            adapters = _result(load_adapters(config, weakref.proxy(self)))
        except BaseException:
            self.close()
            raise
        checks = RequestChecks(api, text, random.Random(api.seed), adapters)
        embeddings = EmbeddingApi(checks)
        self._apis: dict[type[msgspec.Struct], Callable[..., Awaitable[Prepared]]] = {
            CompletionRequest: CompletionApi(checks).prepared,
            ChatRequest: ChatApi(checks).prepared,
            EmbeddingRequest: lambda body, arrival: embeddings.prepared(body, arrival, "embd"),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back weights, KV cache and threads. Idempotent."""
        with self._lock:
            self._core = None
            self._closing()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **fields: Any
    ) -> list[PromptOutput[list[CompletionOutput]]]:
        """Complete texts, lists of token ids, or vLLM's `{"prompt": …}`, `{"prompt_token_ids": …}`;
        results are in their order. `sampling_params` are for all, or one for each; `max_tokens` is
        16 unless set. `fields` are others of `/v1/completions`, such as an adapter's name as
        `model`.
        """
        given = _prompts(prompts)
        params = _for_each(sampling_params, len(given), CompletionRequest)
        bodies = [{**fields, **own, "prompt": one} for one, own in zip(given, params, strict=True)]
        answers = self._answered(CompletionRequest, bodies)
        texts = [one if isinstance(one, str) else None for one in given]
        return [_answer(some, text) for some, text in zip(answers, texts, strict=True)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        **fields: Any,
    ) -> list[PromptOutput[list[CompletionOutput]]]:
        """Answer one conversation, or several. Without `max_tokens` an answer may fill the context.
        `fields` are others of `/v1/chat/completions`, such as `chat_template_kwargs`. The template
        shows `tools`; calls are not parsed.
        """
        talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
        fields |= {"return_prompt_text": True}
        if fields.get("tools"):
            fields["tool_choice"] = "none"
        params = _for_each(sampling_params, len(talks), ChatRequest)
        bodies = [
            {**fields, **own, "messages": one} for one, own in zip(talks, params, strict=True)
        ]
        answers = self._answered(ChatRequest, bodies)
        frames = [cast(OpenAiFrames, some[0].prepared.frames) for some in answers]
        return [_answer(some, one.prompt.text) for some, one in zip(answers, frames, strict=True)]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], **fields: Any
    ) -> list[PromptOutput[EmbeddingOutput]]:
        """Embed prompts. `fields` are others of `/v1/embeddings`: `dimensions`, `normalize` …"""
        bodies = [{**fields, "input": one} for one in _prompts(prompts)]
        found = []
        for [one] in self._answered(EmbeddingRequest, bodies):
            pooled = () if one.choice.last is None else one.choice.last.pooled
            numbers = cast(EmbeddingFrames, one.prepared.frames).numbers(pooled)
            found.append(_output([one], None, EmbeddingOutput(numbers)))
        return found

    async def run(self, command: Command) -> CommandReply:
        """Run a command, as the engine's client does."""
        core = self._running_core()
        core.command(msgspec.structs.replace(command, command_id=1))
        while not (replies := core.take_replies()):
            self._step(core, {})
        return replies[0]

    def _running_core(self) -> EngineCore:
        if self._core is None:
            raise WorkerError("this LLM is closed")
        return self._core

    def _answered(
        self, kind: type[msgspec.Struct], bodies: Sequence[Mapping[str, Any]]
    ) -> list[list["_Sequence"]]:
        """Run requests to their ends; return the sequences of each."""
        with self._lock:
            core = self._running_core()
            answers = [
                [
                    _Sequence(number, prepared, run, choice, self._tokenizer)
                    for choice in run.choices
                ]
                for number, prepared in enumerate(_result(self._prepared(kind, bodies)))
                for run in prompt_runs(prepared, self._tokenizer)
            ]
            running: dict[str, _Sequence] = {}
            with _ctrl_c() as interrupted:
                try:
                    for sequences in answers:
                        request = sequences[0].run.request
                        ids = (request.request_id, *request.branch_ids)
                        running |= zip(ids, sequences, strict=True)
                        core.add(request)
                    while running and not interrupted.is_set():
                        self._step(core, running)
                finally:
                    core.abort(running)
                    while self._core is not None and core.has_work:
                        self._step(core, {})
            return answers

    async def _prepared(
        self, kind: type[msgspec.Struct], bodies: Sequence[Mapping[str, Any]]
    ) -> list[Prepared]:
        arrival, found = Arrival(None, time.monotonic()), []
        for number, body in enumerate(bodies):
            with _naming(number):
                found.append(await self._apis[kind](checked(body, kind), arrival))
        return found

    def _step(self, core: EngineCore, running: dict[str, "_Sequence"]) -> None:
        if core.is_compiling or not core.has_work:
            time.sleep(_WAIT_SECONDS)
        try:
            step = core.step()
        except Exception:
            self.close()
            raise
        for output in () if step is None else step.outputs:
            sequence = running.get(output.request_id)
            if sequence is not None and sequence.take(output):
                del running[output.request_id]
                if output.finish_reason is None:  # a stop string, which the engine does not know
                    core.abort([output.request_id])


@dataclass(slots=True)
class _Sequence:
    """One choice of the prompt `number`. `outputs` are those that its text does not have yet."""

    number: int
    prepared: Prepared
    run: PromptRun
    choice: Choice
    tokenizer: Tokenizer
    outputs: list[RequestOutput] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def take(self, output: RequestOutput) -> bool:
        """Add an output; return whether it is the last one."""
        self.outputs.append(output)
        # Only stop strings need the text while the answer grows.
        if self.prepared.text.stop or output.finish_reason is not None:
            with _naming(self.number):
                self.pieces.append(self.run.take(self.choice, merge(*self.outputs)))
            self.outputs.clear()
        return self.choice.ending is not None

    def completion(self) -> CompletionOutput:
        piece, ending = joined(self.pieces), self.choice.ending
        assert ending is not None  # noqa: S101 (it has run)
        asked, entries = self.run.request.params.logprobs, piece.logprobs
        return CompletionOutput(
            self.choice.index,
            piece.text,
            list(piece.token_ids),
            ending.finish_reason,
            ending.stop_reason,
            None if asked is None else [self.logprobs(one, asked) for one in entries],
            None if asked is None else sum(one.logprobs[0] for one in entries),
        )

    def logprobs(self, entry: TokenLogprobs, num_likeliest: int) -> dict[int, Logprob]:
        spelled = self.tokenizer.token_bytes
        return {
            token_id: Logprob(logprob, rank, spelled(token_id).decode("utf-8", "replace"))
            for token_id, logprob, rank in ranked(entry, num_likeliest)
        }


def _answer(
    sequences: Sequence[_Sequence], prompt: str | None
) -> PromptOutput[list[CompletionOutput]]:
    return _output(sequences, prompt, [one.completion() for one in sequences])


def _output(
    sequences: Sequence[_Sequence], prompt: str | None, outputs: Outputs
) -> PromptOutput[Outputs]:
    first = sequences[0]
    request, asked = first.run.request, first.run.request.params.prompt_logprobs
    logprobs: list[dict[int, Logprob] | None] | None = None
    if asked is not None:
        logprobs = [None, *(first.logprobs(one, asked) for one in first.run.prompt_logprobs)]
    ids, num_cached = request.prompt_token_ids, first.choice.num_cached
    return PromptOutput(request.request_id, prompt, ids, outputs, logprobs, num_cached)


def _prompts(given: Prompt | Sequence[Prompt]) -> list[object]:
    is_one = isinstance(given, str | Mapping) or (len(given) > 0 and isinstance(given[0], int))
    found: list[object] = []
    for number, one in enumerate([given] if is_one else given):
        if isinstance(one, Mapping):
            one = one.get("prompt_token_ids", one.get("prompt"))
        # In a body, a list of these would be several prompts.
        if not isinstance(one, str) and not (one and set(map(type, cast(list[int], one))) <= {int}):
            raise RequestError(f"prompts[{number}] is neither a text nor a list of token ids")
        found.append(one)
    return found


def _for_each(params: Params, count: int, kind: type[msgspec.Struct]) -> Sequence[dict[str, Any]]:
    """Return each request's fields of `kind` that sampling parameters set."""
    if params is None or isinstance(params, TokenSampling):
        return [_fields(params, kind)] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters were given for {count} prompts")
    return [_fields(one, kind) for one in params]


def _fields(params: SamplingParams | None, kind: type[msgspec.Struct]) -> dict[str, Any]:
    if params is None:
        return {}
    refuse_unsupported(params)
    fields = fields_shared(params, kind)
    if params.extra_args is not None:
        fields["vllm_xargs"] = params.extra_args
    if kind is ChatRequest and params.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": params.logprobs}
    return fields


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Await on a thread of its own: the caller's may run an event loop, as a notebook's does."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Let Ctrl-C set an event, and raise it behind the block: no step may end half-way."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
    if asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Name the prompt in errors of its request."""
    try:
        yield
    except RequestError as error:
        message = f"prompts[{number}]: {error.message}"
        raise RequestError(message, error.param, error.status, error.type) from error


def _close(core: EngineCore, grammars: object) -> None:
    core.shutdown()
    if isinstance(grammars, GrammarCompiler):
        grammars.shutdown()
    gc.collect()  # the scheduler and its features refer to each other
