"""The routes that generate: let in, prepare, run, answer; abort when the client leaves."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from worker.api.generate.admission import Admission
from worker.api.generate.embeddings import EmbeddingPreparer
from worker.api.generate.prepare import Prepared, RequestPreparer, TokenPreparer
from worker.api.generate.runner import Runner
from worker.api.generate.text import ModelText
from worker.api.generate.translated import TranslatedPreparer
from worker.api.http.arrival import Arrival, arrival_of
from worker.api.http.exchange import ClientGoneError, Exchange
from worker.api.http.limits import malformed
from worker.api.schema.parse import decode
from worker.api.schema.routes import Handler
from worker.config import ApiConfig
from worker.types import EngineStats

if TYPE_CHECKING:
    from worker.api.routes.pd_proxy import PdProxy

_T = TypeVar("_T")
Prepare = Callable[[bytes, Arrival], Awaitable[Prepared]]


class _Shape(msgspec.Struct):
    """What tells the kinds of bodies apart; raw, because it is all about presence."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class GenerationRoutes:
    """Chats, text completions, token-level generation, the same in the words of other APIs,
    embeddings, and whatever `/invocations` is sent.
    """

    def __init__(
        self,
        config: ApiConfig,
        stats: Callable[[], EngineStats],
        admission: Admission,
        runner: Runner,
        text: ModelText,
        preparer: RequestPreparer,
    ) -> None:
        self._config = config
        self._stats = stats
        self._admission = admission
        self._runner = runner
        self._preparer = preparer
        self._tokens = TokenPreparer(config, text, preparer)
        self._embeddings = EmbeddingPreparer(config, text, preparer)
        self._translated = TranslatedPreparer(config.served_model_names[0], text, preparer)
        self._pd_proxy: PdProxy | None = None
        if config.pd_proxy:
            self._pd_proxy = importlib.import_module("worker.api.routes.pd_proxy").PdProxy(config)

    def handlers(self) -> dict[str, Handler]:
        """By the names of `routes.GENERATION_ROUTES`."""
        return {
            "chat": lambda e: self._generate(e, self._preparer.chat),
            "completion": lambda e: self._generate(e, self._preparer.completion),
            "generate": lambda e: self._generate(e, self._tokens.prepare),
            "chat_batch": lambda e: self._generate(e, self._translated.batch),
            "responses": lambda e: self._generate(e, self._translated.responses),
            "messages": lambda e: self._generate(e, self._translated.messages),
            "generate_text": lambda e: self._generate(e, self._translated.generate),
            "embeddings": lambda e: self._generate(e, self._embeddings.embeddings),
            "pooling": lambda e: self._generate(e, self._embeddings.pooling),
            "invocations": lambda e: self._generate(e, self._by_shape),
        }

    async def _by_shape(self, body: bytes, arrival: Arrival) -> Prepared:
        shape = decode(body, _Shape)
        if shape.messages is not msgspec.UNSET:
            return await self._preparer.chat(body, arrival)
        if shape.token_ids is not msgspec.UNSET:
            return await self._tokens.prepare(body, arrival)
        if shape.prompt is not msgspec.UNSET:
            return await self._preparer.completion(body, arrival)
        raise malformed("Send messages, prompt or token_ids", "messages")

    async def _generate(self, exchange: Exchange, prepare: Prepare) -> None:
        """Refusals for want of room come before the work: before the body is read, and again when
        it is known how much it asks for.
        """
        arrival = arrival_of(exchange, exchange.request_id, time.monotonic(), self._config.api_keys)
        self._admission.check()
        with self._admission.entered(1):
            body = await exchange.json_body(self._config.max_body_bytes)
            if self._pd_proxy is not None and exchange.known_body is None:
                body = await self._watched(exchange, self._pd_proxy.second_body(exchange, body))
                exchange.known_body = body  # one leg, however often the body is looked at
            prepared = await prepare(body, arrival)
            num_tokens = sum(
                len(request.prompt_token_ids) + len(request.output_token_ids)
                for request in prepared.requests
            )
            self._admission.check(prepared.num_sequences - 1, num_tokens)
            if not prepared.stream:
                self._report_load(exchange)
            with self._admission.entered(prepared.num_sequences - 1):
                await self._watched(exchange, self._runner.answer(prepared, exchange))

    async def _watched(self, exchange: Exchange, work: Coroutine[Any, Any, _T]) -> _T:
        """Do it, unless the client leaves first: then everything it asked for is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(exchange.disconnected(), name="disconnect-watcher")
                result = await work
                watcher.cancel()
        except BaseExceptionGroup as failures:
            raise _cause(failures) from None
        return result

    def _report_load(self, exchange: Exchange) -> None:
        """ORCA-style load in a response header, for balancers that ask for it."""
        form = (exchange.header(b"endpoint-load-metrics-format") or "").lower()
        if form not in ("text", "json"):
            return
        stats = self._stats()
        usage, waiting = float(stats.kv_cache_usage), float(stats.num_waiting)
        value = (
            f"TEXT named_metrics.kv_cache_usage_perc={usage!r},"
            f" named_metrics.num_requests_waiting={waiting!r}"
            if form == "text"
            else f'JSON {{"named_metrics": {{"kv_cache_usage_perc": {usage!r},'
            f' "num_requests_waiting": {waiting!r}}}}}'
        )
        exchange.add_header(b"endpoint-load-metrics", value)


def _cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure to report. A client that left explains whatever else went wrong."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        failure = todo.pop()
        if isinstance(failure, BaseExceptionGroup):
            todo.extend(failure.exceptions)
        else:
            leaves.append(failure)
    gone = [leaf for leaf in leaves if isinstance(leaf, ClientGoneError)]
    return (gone or leaves)[0]
