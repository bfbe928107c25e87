"""The routes that generate: admit, prepare, run, answer; abort when the client leaves."""

import asyncio
import importlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from worker.api.generate.admission import Admission
from worker.api.generate.prepared import Prepare, Prepared
from worker.api.generate.runner import Runner
from worker.api.http.arrival import Arrival, arrival_of
from worker.api.http.exchange import ClientGoneError, Exchange
from worker.api.http.field_errors import malformed
from worker.api.openai.chat import ChatApi
from worker.api.openai.checks import RequestChecks
from worker.api.openai.completions import CompletionApi
from worker.api.openai.embeddings import EmbeddingApi
from worker.api.openai.tokens import TokenApi
from worker.api.schema.parse import decode
from worker.api.schema.routes import Handler
from worker.types import EngineStats

if TYPE_CHECKING:
    from worker.api.routes.pd_proxy import PdProxy

_T = TypeVar("_T")


class _Shape(msgspec.Struct):
    """The fields that distinguish the kinds of bodies; raw, because only their presence counts."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class GenerationRoutes:
    """Serves routes that generate; `/invocations` takes all their bodies. Dialects add routes."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        admission: Admission,
        runner: Runner,
        checks: RequestChecks,
    ) -> None:
        self.checks = checks
        self.chat = ChatApi(checks)
        self.completions = CompletionApi(checks)
        self._tokens = TokenApi(checks, self.completions)
        self._config = checks.config
        self._stats = stats
        self._admission = admission
        self._runner = runner
        self._pd_proxy: PdProxy | None = None
        if self._config.pd_proxy:
            # By name, as few workers need its HTTP client.
            pd_proxy = importlib.import_module("worker.api.routes.pd_proxy")
            self._pd_proxy = pd_proxy.PdProxy(self._config)

    def handlers(self) -> dict[str, Handler]:
        embeddings = EmbeddingApi(self.checks)
        return {
            "chat": self.handler(self.chat),
            "completion": self.handler(self.completions),
            "generate": self.handler(self._tokens),
            "embeddings": self.handler(embeddings.embeddings),
            "pooling": self.handler(embeddings.pooling),
            "invocations": self.handler(self._by_shape),
        }

    def handler(self, prepare: Prepare) -> Handler:
        return partial(self._generate, prepare)

    async def _by_shape(self, body: bytes, arrival: Arrival) -> Prepared:
        shape = decode(body, _Shape)
        if shape.messages is not msgspec.UNSET:
            return await self.chat(body, arrival)
        if shape.token_ids is not msgspec.UNSET:
            return await self._tokens(body, arrival)
        if shape.prompt is not msgspec.UNSET:
            return await self.completions(body, arrival)
        raise malformed("Send messages, prompt or token_ids", "messages")

    async def _generate(self, prepare: Prepare, exchange: Exchange) -> None:
        arrival = arrival_of(exchange, exchange.request_id, time.monotonic(), self._config.api_keys)
        # A refusal costs no body.
        self._admission.check()
        # From here on a drain waits for it, also while its body is read.
        with self._admission.entered(1):
            body = await exchange.json_body(self._config.max_body_bytes)
            if self._pd_proxy is not None and exchange.known_body is None:
                body = await self._watched(exchange, self._pd_proxy.second_body(exchange, body))
                exchange.known_body = body  # one leg, however often the body is looked at
            prepared = await prepare(body, arrival)
            more = prepared.num_sequences - 1
            # Again, as only the prepared request shows its answers and the tokens of its prompts.
            self._admission.check(more, prepared.num_tokens)
            if not prepared.stream:
                self._report_load(exchange)
            with self._admission.entered(more):
                await self._watched(exchange, self._runner.answer(prepared, exchange))

    async def _watched(self, exchange: Exchange, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            async with asyncio.TaskGroup() as group:
                # ASGI reports a disconnect only to a pending receive.
                watcher = group.create_task(exchange.disconnected(), name="disconnect-watcher")
                result = await work
                watcher.cancel()
        except BaseExceptionGroup as failures:
            raise _cause(failures) from None
        return result

    def _report_load(self, exchange: Exchange) -> None:
        """Report the load in a response header, in ORCA's format, to balancers that ask for it."""
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
    """Return the failure that caused the others: a client that left explains all of them."""
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
