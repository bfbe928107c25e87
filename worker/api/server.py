"""The ASGI application: exact routes, one place where errors become statuses, abort on disconnect.

A failure after the first byte cannot have a status any more. It is told as an error event, and the
connection is cut without the stream's end (`[DONE]`, the last HTTP chunk), so that no client and no
proxy takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from worker.api.admin import AdminRoutes
from worker.api.admission import Admission, unavailable
from worker.api.engine import Engine
from worker.api.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from worker.api.openai import Arrival, Prepared, RequestPreparer, Runner, TextSide
from worker.api.sse import error_body, error_frame
from worker.config import ApiConfig
from worker.errors import EngineDeadError, RequestError
from worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
Prepare = Callable[[bytes, Arrival], Awaitable[Prepared]]

MAX_REQUEST_ID_CHARS = 128


class WorkerApi:
    """The ASGI callable. Everything it needs is given; it starts and stops nothing."""

    def __init__(
        self,
        config: ApiConfig,
        engine: Engine,
        admission: Admission,
        metrics: WorkerMetrics,
        text: TextSide,
        preparer: RequestPreparer,
    ) -> None:
        self._config = config
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._runner = Runner(engine, text.tokenizer, metrics)
        self._keys = tuple(key.encode() for key in config.api_keys)
        admin = AdminRoutes(config, text, preparer, engine, admission, metrics)
        self._routes: dict[str, dict[str, Handler]] = {
            "/metrics": {"GET": admin.metrics},
            "/v1/chat/completions": {"POST": lambda e: self._generate(e, preparer.chat)},
            "/v1/completions": {"POST": lambda e: self._generate(e, preparer.completion)},
            "/v1/models": {"GET": admin.models},
            "/health": {"GET": admin.health},
            "/health/ready": {"GET": admin.ready},
            "/ping": {"GET": admin.health, "POST": admin.health},
            "/version": {"GET": admin.version},
            "/load": {"GET": admin.load},
            "/tokenize": {"POST": admin.tokenize},
            "/detokenize": {"POST": admin.detokenize},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange. Never raises but for cancellation."""
        if scope["type"] != "http":
            return
        stall = self._config.write_stall_seconds
        exchange = Exchange(scope, receive, send, write_stall_seconds=stall)
        try:
            exchange.check_headers()
            await self._handler(exchange)(exchange)
        except ClientGoneError:
            return
        except RequestError as error:
            await self._fail(exchange, error)
        except EngineDeadError as error:
            await self._fail(exchange, unavailable(f"The engine is not running: {error}"))
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            self._metrics.internal_error()
            failure = RequestError("Internal server error", status=500, type="InternalServerError")
            await self._fail(exchange, failure)

    def _handler(self, exchange: Exchange) -> Handler:
        """The route's handler; 404, 405 or 401 when there is none for this client."""
        methods = self._routes.get(exchange.path)
        if methods is None:
            raise _phrase(HTTPStatus.NOT_FOUND)
        handler = methods.get(exchange.method)
        if handler is None:
            exchange.add_header(b"allow", ", ".join(methods))
            raise _phrase(HTTPStatus.METHOD_NOT_ALLOWED)
        if self._keys and exchange.path.startswith("/v1") and not self._is_let_in(exchange):
            return _unauthorized
        return handler

    def _is_let_in(self, exchange: Exchange) -> bool:
        scheme, _, given = (exchange.header(b"authorization") or "").partition(" ")
        token = given.encode("latin-1")
        # Compare with every key, so that the time tells nothing about which came close.
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    async def _generate(self, exchange: Exchange, prepare: Prepare) -> None:
        arrival = Arrival(_request_id(exchange), time.monotonic())
        if arrival.request_id is not None:
            exchange.add_header(b"x-request-id", arrival.request_id)
        body = await exchange.json_body(self._config.max_body_bytes)
        self._admission.check()
        with self._admission.entered(1):
            prepared = await prepare(body, arrival)
            if not prepared.stream:
                self._report_load(exchange)
            with self._admission.entered(len(prepared.requests) - 1):
                await self._run_watched(exchange, prepared)

    async def _run_watched(self, exchange: Exchange, prepared: Prepared) -> None:
        """Answer, unless the client leaves first: then everything it asked for is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(exchange.disconnected(), name="disconnect-watcher")
                await self._runner.answer(prepared, exchange)
                watcher.cancel()
        except BaseExceptionGroup as failures:
            raise _cause(failures) from None

    def _report_load(self, exchange: Exchange) -> None:
        """ORCA-style load in a response header, for balancers that ask for it."""
        form = (exchange.header(b"endpoint-load-metrics-format") or "").lower()
        if form not in ("text", "json"):
            return
        stats = self._engine.stats
        usage, waiting = float(stats.kv_cache_usage), float(stats.num_waiting)
        value = (
            f"TEXT named_metrics.kv_cache_usage_perc={usage!r},"
            f" named_metrics.num_requests_waiting={waiting!r}"
            if form == "text"
            else f'JSON {{"named_metrics": {{"kv_cache_usage_perc": {usage!r},'
            f' "num_requests_waiting": {waiting!r}}}}}'
        )
        exchange.add_header(b"endpoint-load-metrics", value)

    async def _fail(self, exchange: Exchange, error: RequestError) -> None:
        if exchange.started:
            # Not the last chunk: the HTTP server cuts the connection when we return.
            with contextlib.suppress(ClientGoneError):
                await exchange.write_event(error_frame(error), last=False)
            return
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            exchange.add_header(b"retry-after", "1")
        await exchange.reply(error_body(error), error.status)


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


def _request_id(exchange: Exchange) -> str | None:
    """The client's `x-request-id`, when it can be part of an id and of a header."""
    given = exchange.header(b"x-request-id")
    if not given or len(given) > MAX_REQUEST_ID_CHARS:
        return None
    return given if given.isascii() and given.isprintable() else None


def _phrase(status: HTTPStatus) -> RequestError:
    return RequestError(status.phrase, status=status.value, type=status.phrase)


async def _unauthorized(exchange: Exchange) -> None:
    await exchange.reply(b'{"error":"Unauthorized"}', HTTPStatus.UNAUTHORIZED)
