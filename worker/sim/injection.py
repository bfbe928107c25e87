"""Injected faults: an ASGI application around the API that delays, breaks or replaces its answers.

It runs only with the simulator or `--enable-fault-injection`. The seed and the request's number
decide each draw, so that the same requests fail on every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import msgspec

from worker.api.generate.engine import Engine
from worker.api.http.arrival import ApiKeys
from worker.api.http.exchange import (
    JSON,
    ClientGoneError,
    Exchange,
    Headers,
    Message,
    Send,
    Unauthorized,
    error_body,
)
from worker.config import ServeConfig
from worker.engine.messages import Configure
from worker.errors import ConfigError, EngineDeadError, RequestError
from worker.sim import settings as sim_settings
from worker.sim.config import FaultConfig, settings_in
from worker.sim.faults import (
    ALL_FAILURES,
    FAILURES,
    Crash,
    Faults,
    Update,
    Wave,
    failure_of,
    parse_update,
    show,
)
from worker.sim.random import bits, stream
from worker.types import EngineStats

logger = logging.getLogger(__name__)

App = Callable[[Any, Any, Any], Awaitable[None]]
Rest = Callable[[Send], Awaitable[None]]  # runs the application with a given `send`

CONFIG_PATH = "/admin/config"
GENERATION_PATHS = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/invocations",
        "/inference/v1/generate",
    )
)
_CRASH_DELAY_SECONDS = 0.1  # so that the answer leaves first
_FAILURES, _STALLS = 5, 6  # purposes of random streams
_WHOLE = 1 << 32
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_CHUNK = b"# HELP vllm:padding Fills a page of the requested size.\n" * 800
_GARBAGE_BYTES = 64 << 10
_STATS_FIELDS = {
    "running-requests": "num_running",
    "waiting-requests": "num_waiting",
    "kv-cache-usage": "kv_cache_usage",
}


class FaultInjection:
    """Sole owner of the faults in force. Used on the event loop of the HTTP process.

    `clock` is monotonic; `die` ends this process at once. A real engine takes no faults of its own.
    """

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        clock: Callable[[], float],
        die: Callable[[], None],
    ) -> None:
        setup = config.faults or FaultConfig()
        self._config = config.api
        self._keys = ApiKeys(config.api.api_keys)
        self._reply_headers: Headers = tuple(
            (name.encode(), value.encode()) for name, value in setup.reply_headers
        )
        sim = settings_in(config.engine)
        self._seed = sim.seed
        self._sim_at_start = sim if config.engine.engine == "sim" else None
        self._engine = engine
        self._clock = clock
        self._die = die
        self._ready_at = clock() + setup.startup_seconds
        self._faults = Faults()
        self._sim = self._sim_at_start
        self._num_restarts = 0  # of the engine, at the last check
        self._changing = asyncio.Lock()
        self._fakes_since = clock()
        self._num_requests = 0
        self._requests_left: int | None = None

    def stats(self) -> EngineStats:
        stats, fakes = self._engine.stats, self._faults.fake_metrics
        if not fakes:
            return stats
        elapsed = self._clock() - self._fakes_since
        changed: dict[str, Any] = {}
        for name, fake in fakes.items():
            value = fake.at(elapsed) if isinstance(fake, Wave) else fake
            # Waves of counts are rounded; a constant is reported unchanged, however odd.
            is_count = isinstance(fake, Wave) and name != "kv-cache-usage"
            changed[_STATS_FIELDS[name]] = round(value) if is_count else value
        return msgspec.structs.replace(stats, **changed)

    def around(self, app: App) -> App:
        async def faulty(scope: Any, receive: Any, send: Any) -> None:
            async def rest(send: Send) -> None:
                await app(scope, receive, send)

            if scope["type"] != "http":
                await rest(send)
                return
            exchange = Exchange(
                scope,
                receive,
                send,
                write_stall_seconds=self._config.write_stall_seconds,
                body_timeout_seconds=self._config.body_timeout_seconds,
            )
            with contextlib.suppress(ClientGoneError):
                if exchange.path == CONFIG_PATH:
                    await self._configure(exchange)
                elif exchange.path == "/metrics":
                    await self._metrics(exchange, rest, send)
                elif exchange.path in GENERATION_PATHS and exchange.method == "POST":
                    await self._generate(exchange, rest, send)
                elif exchange.path == "/health/ready" and self._clock() < self._ready_at:
                    await exchange.reply(b"", HTTPStatus.SERVICE_UNAVAILABLE, (_TEXT,))
                else:
                    await rest(send)

        return faulty

    # ---- requests that generate -------------------------------------------------------------

    async def _generate(self, exchange: Exchange, rest: Rest, send: Send) -> None:
        self._num_requests += 1
        faults, number = self._faults, self._num_requests
        self._count_down()
        failure = _asked_failure(exchange) or self._drawn_failure(faults, number)
        if failure is not None:
            # The connection stays usable for the next request.
            await exchange.discard_body()
            headers = (JSON, *self._reply_headers)
            await exchange.reply(error_body(failure), failure.status, headers)
            return
        stall = 0.0
        if self._share(_STALLS, number) * 100 < faults.stall_rate:
            stall = faults.stall_stream_seconds
            if faults.stall_before_seconds:
                await asyncio.sleep(faults.stall_before_seconds)
        if not stall and not self._reply_headers:
            await rest(send)
            return
        after_events = faults.stall_after_events if stall else None
        async with StalledReply(send, self._reply_headers, after_events, stall) as reply:
            await rest(reply.send)

    def _drawn_failure(self, faults: Faults, number: int) -> RequestError | None:
        if self._share(_FAILURES, number) * 100 >= faults.failure_injection_rate:
            return None
        names = faults.failure_types or tuple(FAILURES)
        failure = ALL_FAILURES[names[self._bits(_FAILURES, number) % len(names)]]
        message = failure.message.replace("%s", self._config.served_model_names[0])
        return failure_of(failure.status, message, failure.param)

    def _count_down(self) -> None:
        if self._requests_left is None:
            return
        self._requests_left -= 1
        if self._requests_left <= 0:
            logger.warning("crashing, as asked for over %s", CONFIG_PATH)
            self._die()

    def _share(self, purpose: int, number: int) -> float:
        """Return a uniform number in [0, 1) for the n-th request."""
        return (self._bits(purpose, number) >> 32) / _WHOLE

    def _bits(self, purpose: int, number: int) -> int:
        return bits(stream(self._seed, 0, purpose), number)

    # ---- metrics ----------------------------------------------------------------------------

    async def _metrics(self, exchange: Exchange, rest: Rest, send: Send) -> None:
        faults = self._faults
        if faults.metrics_delay_seconds:
            await asyncio.sleep(faults.metrics_delay_seconds)
        match faults.metrics_page:
            case "ok":
                await rest(send)
            case "garbage":
                # The same bytes on every run, so that a failing scraper test repeats.
                page = random.Random(0).randbytes(_GARBAGE_BYTES)
                await exchange.reply(page, headers=(_TEXT,))
            case "empty":
                await exchange.reply(headers=(_TEXT,))
            case "error":
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                await exchange.reply(b"Internal Server Error", status, (_TEXT,))
            case "redirect":
                location = (b"location", faults.metrics_redirect.encode("ascii"))
                await exchange.reply(b"", HTTPStatus.FOUND, (_TEXT, location))
            case "huge":
                await _send_huge_page(exchange, send, faults.metrics_bytes)
            case _:
                page = await _page_of(rest)
                half = page[: len(page) // 2].rstrip(b"\n")  # cut within a line
                await exchange.reply(half, headers=(_TEXT,))

    # ---- /admin/config ----------------------------------------------------------------------

    async def _configure(self, exchange: Exchange) -> None:
        # Changing faults is at least as powerful as any request.
        if self._keys and not self._keys.let_in(exchange):
            body = msgspec.json.encode(Unauthorized())
            await exchange.reply(body, HTTPStatus.UNAUTHORIZED)
        elif exchange.method == "GET":
            await exchange.reply(self._shown())
        elif exchange.method != "POST":
            exchange.add_header(b"allow", "GET, POST")
            await exchange.reply(error_body(failure_of(405, "Method Not Allowed")), 405)
        else:
            await self._update(exchange)

    async def _update(self, exchange: Exchange) -> None:
        try:
            body = await exchange.body(self._config.max_body_bytes)
            async with self._changing:  # each change builds on the one before
                self._check_for_restart()
                known = frozenset(sim_settings.BY_NAME) if self._sim else frozenset[str]()
                update = parse_update(self._faults, body, known)
                await self._take(update)
        except RequestError as error:
            await exchange.reply(error_body(error), error.status)
        except ConfigError as error:
            await exchange.reply(error_body(failure_of(400, str(error))), 400)
        except EngineDeadError as error:
            failure = failure_of(503, f"The engine is not running: {error}")
            await exchange.reply(error_body(failure), 503)
        else:
            await exchange.reply(self._shown())
            # After the reply: the client must learn that its crash was accepted.
            self._crash_worker(update.crash)

    def _check_for_restart(self) -> None:
        """Drop an old engine's settings: a new one starts with those of the command line."""
        num_restarts = self._engine.stats.num_restarts
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._sim = self._sim_at_start
            self._faults = replace(self._faults, slow=Faults().slow)

    async def _take(self, update: Update) -> None:
        """Apply the engine's part of an update, then the rest; all or nothing."""
        settings: dict[str, Any] = {}
        sim = self._sim
        if sim is not None and update.settings:
            changed = sim_settings.apply(sim, update.settings)
            fields = {sim_settings.BY_NAME[name].field for name in update.settings}
            settings["sim"] = {field: getattr(changed, field) for field in fields}
            sim = changed
        if update.faults.slow != self._faults.slow:
            settings["slow_factor"] = update.faults.slow
        if update.hang_seconds is not None:
            settings["hang_seconds"] = update.hang_seconds
        crash = update.crash
        ends = False
        if crash is not None and crash.target == "engine":
            settings["crash_after_requests"] = crash.after_requests
            settings["crash_after_tokens"] = crash.after_tokens
            # An engine that crashes at once cannot reply.
            ends = 0 in (crash.after_requests, crash.after_tokens)
        if settings:
            await self._set_in_engine(settings, ends=ends)
        self._sim = sim
        if update.faults.fake_metrics != self._faults.fake_metrics:
            self._fakes_since = self._clock()
        self._faults = update.faults

    async def _set_in_engine(self, settings: dict[str, Any], *, ends: bool) -> None:
        """Send settings to the engine. If it `ends` because of them, it need not answer."""
        if self._sim is None:
            raise ConfigError("the engine's own faults need --engine sim")
        try:
            answer = await self._engine.run(Configure(0, settings))
        except EngineDeadError:
            if not ends:
                raise
            return
        if not answer.ok:
            raise ConfigError(answer.error or "the engine refused")

    def _crash_worker(self, crash: Crash | None) -> None:
        if crash is None or crash.target != "worker":
            return
        self._requests_left = crash.after_requests
        if not crash.after_requests:
            logger.warning("crashing, as asked for over %s", CONFIG_PATH)
            asyncio.get_running_loop().call_later(_CRASH_DELAY_SECONDS, self._die)

    def _shown(self) -> bytes:
        self._check_for_restart()
        settings = sim_settings.show(self._sim) if self._sim else {}
        return msgspec.json.encode({**settings, **show(self._faults)})


def _asked_failure(exchange: Exchange) -> RequestError | None:
    asked = exchange.header(b"x-return-error")
    if asked is None:
        return None
    status = int(asked) if asked.isdecimal() and len(asked) == 3 else 0
    if not 400 <= status <= 599:
        message = f"X-Return-Error must be a status from 400 to 599, got {asked[:20]!r}"
        return failure_of(400, message, "X-Return-Error")
    return failure_of(status, "This error was asked for with X-Return-Error")


async def _send_huge_page(exchange: Exchange, send: Send, num_bytes: int) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [_TEXT]})
    gone = asyncio.create_task(exchange.disconnected(), name="disconnect-watcher")
    try:
        while num_bytes > 0 and not gone.done():
            chunk = _CHUNK[:num_bytes]
            num_bytes -= len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    await send({"type": "http.response.body", "body": b""})


async def _page_of(rest: Rest) -> bytes:
    parts: list[bytes] = []

    async def collect(message: Message) -> None:
        parts.append(message.get("body", b""))

    await rest(collect)
    return b"".join(parts)


class StalledReply:
    """A reply with extra headers and a stall in the middle of its stream.

    After `after_events` parts nothing leaves for `stall_seconds`. Parts written meanwhile are
    buffered, so that the writer does not abandon the client; a timer flushes them. The exit of this
    context waits for the flush, or drops the buffer if the writer failed.
    """

    def __init__(
        self, send: Send, headers: Headers, after_events: int | None, stall_seconds: float
    ) -> None:
        self._send = send
        self._headers = headers
        self._events_left = after_events
        self._stall_seconds = stall_seconds
        self._is_silent = False
        self._buffered: list[Message] = []
        self._release: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StalledReply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._release is None:
            return
        if error is None:
            await self._release
        else:
            self._release.cancel()
            await asyncio.gather(self._release, return_exceptions=True)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._headers]
        if self._is_silent:
            self._buffered.append(message)
            return
        if self._release is not None:
            await self._release  # the buffered parts go first
        await self._send(message)
        if message["type"] == "http.response.body" and message.get("more_body", False):
            self._part_sent()

    def _part_sent(self) -> None:
        if self._events_left is None:
            return
        self._events_left -= 1
        if self._events_left <= 0:
            self._events_left = None
            self._is_silent = True
            self._release = asyncio.create_task(self._flush(), name="stalled-reply")

    async def _flush(self) -> None:
        await asyncio.sleep(self._stall_seconds)
        self._is_silent = False
        for message in self._buffered:
            await self._send(message)
