"""The ASGI application: exact routes, one place where errors become statuses, abort on disconnect.

A failure after the first byte becomes an error event, and the connection is cut without the
stream's end, so that no client and no proxy takes half an answer for a whole one.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec

from base.tracing import Tracing
from worker.api.generate.admission import Admission
from worker.api.generate.engine import Engine
from worker.api.generate.open_sequences import OpenSequences
from worker.api.generate.runner import Runner
from worker.api.http.arrival import ApiKeys
from worker.api.http.exchange import (
    ClientGoneError,
    Exchange,
    Receive,
    Scope,
    Send,
    error_body,
    error_frame,
    status_error,
)
from worker.api.http.off_loop import off_loop_when_large
from worker.api.openai.checks import RequestChecks
from worker.api.routes.control import AdapterRoutes, ControlRoutes
from worker.api.routes.generation import GenerationRoutes
from worker.api.routes.probes import ProbeRoutes
from worker.api.routes.tokenization import TokenizationRoutes
from worker.api.schema.openapi import document_bytes
from worker.api.schema.parse import (
    IgnoredFieldError,
    UnknownFieldError,
    shown,
    without_ignored_fields,
)
from worker.api.schema.requests import MAX_REQUEST_ID_CHARS
from worker.api.schema.routes import (
    GUARDED_PATHS,
    MODEL_PATH,
    ROUTES,
    Handler,
    Route,
    dialects,
    model_id,
)
from worker.config import ApiConfig, EngineConfig, KvEventsConfig
from worker.errors import EngineDeadError, RequestError
from worker.metrics.page import WorkerMetrics
from worker.types import EngineStats

logger = logging.getLogger(__name__)

_NUM_IGNORED_SHOWN = 8  # fields, in a warning
_NUM_IGNORED_LOGGED = 64  # fields, each once; clients choose their names
_INDEX = re.compile(r"\[\d+\]")
_CLIENT_CLOSED_REQUEST = 499  # for the counters; the client does not read it


class WorkerApi:
    """The ASGI callable. It starts and stops nothing."""

    def __init__(
        self,
        config: ApiConfig,
        engine: Engine,
        admission: Admission,
        metrics: WorkerMetrics,
        checks: RequestChecks,
        engine_config: EngineConfig | None = None,
        stats: Callable[[], EngineStats] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Use `stats` instead of the engine's own for metrics and load reports."""
        self._config = config
        self._metrics = metrics
        self._tracing = tracing or Tracing()
        self._keys = ApiKeys(config.api_keys)
        self._ignored: set[str] = set()  # fields that the log names already
        stats = stats or (lambda: engine.stats)
        sequences = OpenSequences(engine, admission)
        runner = Runner(sequences, checks.text.tokenizer, metrics)
        adapters = checks.adapters
        kv_events = KvEventsConfig() if engine_config is None else engine_config.kv_events
        generation = GenerationRoutes(stats, admission, runner, checks)
        handlers: dict[str, Handler] = {
            **generation.handlers(),
            **TokenizationRoutes(checks).handlers(),
            **ProbeRoutes(
                config, engine, stats, admission, metrics, kv_events, adapters
            ).handlers(),
            **AdapterRoutes(config, adapters).handlers(),
            **ControlRoutes(config, engine, sequences, engine_config).handlers(),
        }
        routes = [route for route in ROUTES if route.is_served(config)]
        for dialect in dialects():
            routes += dialect.ROUTES
            handlers.update(dialect.handlers(generation))
        handlers["openapi"] = _OpenApiDocument(routes, has_keys=bool(self._keys)).reply
        self._routes: dict[str, dict[str, tuple[Route, Handler]]] = {}
        for route in routes:
            methods = self._routes.setdefault(route.path, {})
            methods[route.method] = (route, handlers[route.name])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange. Raises nothing but cancellation."""
        if scope["type"] != "http":
            return
        begun = time.monotonic()
        config = self._config
        exchange = Exchange(
            scope,
            receive,
            send,
            write_stall_seconds=config.write_stall_seconds,
            body_timeout_seconds=config.body_timeout_seconds,
        )
        if exchange.method == "POST":
            exchange.trace = self._tracing.request(exchange.headers())
        try:
            await self._answer(exchange)
        except ClientGoneError:
            return
        finally:
            if exchange.trace is not None:
                exchange.trace.end(exchange.status)
            # Unknown paths share one label: a scanner must not fill the metrics.
            path = self._path_of(exchange)
            self._metrics.http.done(
                path if path in self._routes else "none",
                exchange.method,
                exchange.status or _CLIENT_CLOSED_REQUEST,
                time.monotonic() - begun,
                exchange.num_body_bytes,
                exchange.num_reply_bytes,
            )

    async def _answer(self, exchange: Exchange) -> None:
        try:
            exchange.check_headers()
            self._name(exchange)
            await self._handled(exchange)
        except RequestError as error:
            await self._fail(exchange, error)
        except EngineDeadError as error:
            await self._fail(exchange, _lost(error))
        except ClientGoneError:
            raise  # else it counts as an internal error
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            self._metrics.internal_error()
            failure = RequestError("Internal server error", status=500, type="InternalServerError")
            await self._fail(exchange, failure)

    async def _handled(self, exchange: Exchange) -> None:
        """Run the handler; rerun it without ignored fields, as it has not asked the engine yet."""
        handle = self._handler(exchange)
        try:
            await handle(exchange)
        except IgnoredFieldError as error:
            # Hints are part of the API, so strictness accepts them.
            if self._config.strict_fields and isinstance(error, UnknownFieldError):
                raise
            body, kind, known = error.body, error.kind, not isinstance(error, UnknownFieldError)
            exchange.known_body, ignored = await off_loop_when_large(
                len(body), lambda: without_ignored_fields(body, kind, all_known=known)
            )
            self._warn(
                exchange,
                ignored.unknown,
                "unknown fields",
                "fields that are not part of this API",
                "; --strict-fields refuses them",
            )
            self._warn(
                exchange, ignored.hints, "fields without effect", "fields that have no effect here"
            )
            await handle(exchange)

    def _warn(
        self, exchange: Exchange, paths: list[str], briefly: str, what: str, more: str = ""
    ) -> None:
        """Name ignored fields in RFC 9111's `Warning` header and, the first time, in the log."""
        if not paths:
            return
        num_hidden = len(paths) - _NUM_IGNORED_SHOWN
        names = ", ".join(_printable(name) for name in paths[:_NUM_IGNORED_SHOWN])
        text = f"ignored {briefly}: {names}" + (f" and {num_hidden} more" if num_hidden > 0 else "")
        exchange.add_header(b"warning", f'299 - "{text}"')
        fields = {_printable(_INDEX.sub("[]", name)) for name in paths[:_NUM_IGNORED_SHOWN]}
        # A client sends the same field with every request; the log has it once.
        new = sorted(fields - self._ignored)
        if new and len(self._ignored) < _NUM_IGNORED_LOGGED:
            self._ignored.update(new)
            logger.warning(
                "%s: ignored %s: %s (each is logged once%s)",
                exchange.path,
                what,
                ", ".join(new),
                more,
            )

    def _name(self, exchange: Exchange) -> None:
        exchange.request_id = _request_id(exchange)
        if self._config.enable_request_id_headers:
            exchange.request_id = exchange.request_id or uuid.uuid4().hex
            exchange.add_header(b"x-request-id", exchange.request_id)

    def _path_of(self, exchange: Exchange) -> str:
        """Return the route's path. A slash at the end does not count: some clients send one."""
        path = exchange.path.removesuffix("/")
        if path in self._routes:
            return path
        return exchange.path if model_id(exchange.path) is None else MODEL_PATH

    def _handler(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(self._path_of(exchange), {})
        # Answered without a key: browsers send none with a preflight.
        if exchange.method == "OPTIONS" and methods:
            exchange.add_header(b"allow", ", ".join([*methods, "OPTIONS"]))
            return _no_content
        route, handler = methods.get(exchange.method, (None, None))
        if route is not None:
            exchange.errors = route.errors
        guarded = exchange.path.startswith(GUARDED_PATHS) or (route is not None and route.guarded)
        # Before 404 and 405: a client without a key learns nothing of the routes.
        if self._keys and guarded and not self._keys.let_in(exchange):
            return _unauthorized
        if not methods:
            raise status_error(HTTPStatus.NOT_FOUND)
        if handler is None:
            exchange.add_header(b"allow", ", ".join([*methods, "OPTIONS"]))
            raise status_error(HTTPStatus.METHOD_NOT_ALLOWED)
        return handler

    async def _fail(self, exchange: Exchange, error: RequestError) -> None:
        if exchange.started:
            # Not the last chunk: the HTTP server cuts the connection when we return.
            with contextlib.suppress(ClientGoneError):
                await exchange.write_event(error_frame(error, exchange.errors), last=False)
            return
        # OpenAI's clients, for one, wait this long before they try again.
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            exchange.add_header(b"retry-after", "1")
        # Behind an unread body the connection would be of no use to the next request.
        await exchange.discard_body()
        await exchange.reply(error_body(error, exchange.errors), error.status)


class _OpenApiDocument:
    """The description of the routes, built once in a thread, as that takes about 0.1 s of CPU."""

    def __init__(self, routes: Sequence[Route], *, has_keys: bool) -> None:
        self._routes = routes
        self._has_keys = has_keys
        self._body: bytes | None = None
        self._building = asyncio.Lock()

    async def reply(self, exchange: Exchange) -> None:
        async with self._building:
            if self._body is None:
                self._body = await asyncio.to_thread(
                    document_bytes, self._routes, has_keys=self._has_keys
                )
        await exchange.reply(self._body)


def _lost(error: EngineDeadError) -> RequestError:
    """Return the 503 of a request that was lost; refusals at admission have another type."""
    message = f"The engine is not running: {error}"
    return RequestError(message, status=503, type="ServiceUnavailableError")


def _printable(name: str) -> str:
    text = shown(name).replace("…", "...")
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text)


def _request_id(exchange: Exchange) -> str | None:
    given = exchange.header(b"x-request-id")
    if not given or len(given) > MAX_REQUEST_ID_CHARS:
        return None
    return given if given.isascii() and given.isprintable() else None


async def _no_content(exchange: Exchange) -> None:
    await exchange.reply(b"", HTTPStatus.OK, ())


async def _unauthorized(exchange: Exchange) -> None:
    await exchange.discard_body()
    exchange.add_header(b"www-authenticate", "Bearer")
    body = msgspec.json.encode(exchange.errors.unauthorized)
    await exchange.reply(body, HTTPStatus.UNAUTHORIZED)
