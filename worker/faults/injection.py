"""Faults on purpose: an ASGI application around the API that breaks what it gets right.

Only with the simulator or `--enable-fault-injection`. What is wrong is asked for over
`/admin/config`, changes as a whole, and is drawn from the seed and the request's number, so that
the same requests fail on every run.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec

from worker.api.generate.engine import Engine, OutputStream
from worker.api.http.exchange import status_error
from worker.config import SimConfig
from worker.engine.messages import AddRequest, Command, CommandReply, Configure, EngineStats
from worker.errors import ConfigError, EngineDeadError, RequestError
from worker.executor.sim.random import bits, stream
from worker.faults import sim_settings
from worker.faults.faulty_reply import FaultyReply, Message, Send, bad_metrics, reply
from worker.faults.settings import (
    ALL_FAILURES,
    FAILURES,
    Crash,
    Faults,
    Update,
    Wave,
    error_body,
    parse_update,
    show,
)

logger = logging.getLogger(__name__)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Any, Any, Any], Awaitable[None]]

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
MAX_CONFIG_BYTES = 1 << 20
_CRASH_DELAY_SECONDS = 0.1  # for the answer to leave
_FAILURES, _STALLS = 5, 6  # purposes of random streams
_WHOLE = 1 << 32


@dataclass(frozen=True, slots=True)
class FaultSetup:
    """What fault injection needs to know. `sim` None: the engine is a real one, whose own faults
    cannot be injected. `reply_headers` go with every generation's answer.
    """

    model_name: str
    sim: SimConfig | None = None
    seed: int = 0
    startup_seconds: float = 0.0
    api_keys: tuple[str, ...] = ()
    reply_headers: tuple[tuple[bytes, bytes], ...] = ()
    body_timeout_seconds: float = 30.0


class FaultInjection:
    """Sole owner of what is wrong at the moment. Lives on the event loop of the HTTP process.

    `clock` is monotonic; `die` ends this process at once.
    """

    def __init__(
        self, setup: FaultSetup, engine: Engine, clock: Callable[[], float], die: Callable[[], None]
    ) -> None:
        self._setup = setup
        self._engine = engine
        self._clock = clock
        self._die = die
        self._ready_at = clock() + setup.startup_seconds
        self._faults = Faults()
        self._sim = setup.sim
        self._num_restarts = 0  # of the engine, when it was last looked at
        self._changing = asyncio.Lock()
        self._known = frozenset(sim_settings.BY_NAME) if setup.sim else frozenset()
        self._lies_since = clock()
        self._num_requests = 0
        self._requests_left: int | None = None
        self._keys = tuple(key.encode() for key in setup.api_keys)

    def lying(self) -> Engine:
        """The engine, with statistics that are wrong when they are meant to be."""
        return _LyingEngine(self._engine, self._distort)

    def around(self, app: App) -> App:
        """An application that does what `app` does, and what goes wrong."""

        async def faulty(scope: Any, receive: Any, send: Any) -> None:
            path = scope.get("path")
            if scope["type"] != "http":
                await app(scope, receive, send)
            elif path == CONFIG_PATH:
                await self._config(scope, receive, send)
            elif path in GENERATION_PATHS and scope["method"] == "POST":
                await self._generate(app, scope, receive, send)
            elif path == "/metrics":
                await self._metrics(app, scope, receive, send)
            elif path == "/health/ready" and self._clock() < self._ready_at:
                await reply(send, 503, b"", b"text/plain")
            else:
                await app(scope, receive, send)

        return faulty

    # ---- requests that generate -------------------------------------------------------------

    async def _generate(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_requests += 1
        faults, number = self._faults, self._num_requests
        self._count_down()
        failure = self._asked_error(scope) or self._injected_error(faults, number)
        if failure is not None:
            status, body = failure
            await reply(send, status, body, headers=self._setup.reply_headers)
            return
        stall = 0.0
        if self._share(_STALLS, number) * 100 < faults.stall_rate:
            stall = faults.stall_stream_seconds
            if faults.stall_before_seconds:
                await asyncio.sleep(faults.stall_before_seconds)
        if not stall and not self._setup.reply_headers:
            await app(scope, receive, send)
            return
        after_events = faults.stall_after_events if stall else None
        async with FaultyReply(send, self._setup.reply_headers, after_events, stall) as answer:
            await app(scope, receive, answer.send)

    def _asked_error(self, scope: Scope) -> tuple[int, bytes] | None:
        """The error that the request itself asks for."""
        asked = _header(scope, b"x-return-error")
        if asked is None:
            return None
        status = int(asked) if asked.isdecimal() and len(asked) == 3 else 0
        if not 400 <= status <= 599:
            message = f"X-Return-Error must be a status from 400 to 599, got {asked[:20]!r}"
            return 400, error_body(400, message, "X-Return-Error")
        return status, error_body(status, "This error was asked for with X-Return-Error")

    def _injected_error(self, faults: Faults, number: int) -> tuple[int, bytes] | None:
        if self._share(_FAILURES, number) * 100 >= faults.failure_injection_rate:
            return None
        names = faults.failure_types or tuple(FAILURES)
        failure = ALL_FAILURES[names[self._bits(_FAILURES, number) % len(names)]]
        message = failure.message.replace("%s", self._setup.model_name)
        return failure.status, error_body(failure.status, message, failure.param)

    def _count_down(self) -> None:
        if self._requests_left is None:
            return
        self._requests_left -= 1
        if self._requests_left <= 0:
            logger.warning("crashing, as asked for over %s", CONFIG_PATH)
            self._die()

    def _share(self, purpose: int, number: int) -> float:
        """A number in [0, 1) for the n-th request."""
        return (self._bits(purpose, number) >> 32) / _WHOLE

    def _bits(self, purpose: int, number: int) -> int:
        return bits(stream(self._setup.seed, 0, purpose), number)

    # ---- metrics ----------------------------------------------------------------------------

    async def _metrics(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        faults = self._faults
        if faults.metrics_delay_seconds:
            await asyncio.sleep(faults.metrics_delay_seconds)
        if faults.metrics_page == "ok":
            await app(scope, receive, send)
        else:
            await bad_metrics(faults, app, scope, receive, send)

    def _distort(self, stats: EngineStats) -> EngineStats:
        lies = self._faults.fake_metrics
        if not lies:
            return stats
        elapsed = self._clock() - self._lies_since
        told: dict[str, float] = {}
        for name, lie in lies.items():
            if isinstance(lie, Wave):  # requests are whole, however they wave
                value = lie.at(elapsed)
                told[name] = value if name == "kv-cache-usage" else round(value)
            else:
                told[name] = lie
        # Whatever was asked for goes out, also what no engine would say.
        changed: dict[str, Any] = {
            field: told[name] for name, field in _STATS_FIELDS.items() if name in told
        }
        return msgspec.structs.replace(stats, **changed)

    # ---- /admin/config ----------------------------------------------------------------------

    async def _config(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and not self._is_let_in(scope):
            await reply(send, 401, b'{"error":"Unauthorized"}')
        elif scope["method"] == "GET":
            await reply(send, 200, self._shown())
        elif scope["method"] != "POST":
            allow = ((b"allow", b"GET, POST"),)
            await reply(send, 405, error_body(405, "Method Not Allowed"), headers=allow)
        else:
            await self._update(receive, send)

    async def _update(self, receive: Receive, send: Send) -> None:
        try:
            body = await _read(receive, self._setup.body_timeout_seconds)
            async with self._changing:  # each change builds on what the one before left
                self._look_for_restart()
                update = parse_update(self._faults, body, self._known)
                await self._take(update)
        except RequestError as error:
            close = ((b"connection", b"close"),)  # what may still come is no request
            await reply(send, error.status, error_body(error.status, str(error)), headers=close)
        except ConfigError as error:
            await reply(send, 400, error_body(400, str(error)))
        except EngineDeadError as error:
            await reply(send, 503, error_body(503, f"The engine is not running: {error}"))
        else:
            await reply(send, 200, self._shown())
            self._crash_worker(update.crash)

    def _look_for_restart(self) -> None:
        """A new engine begins with the settings of the command line; forget the old one's."""
        num_restarts = self._engine.stats.num_restarts
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._sim = self._setup.sim
            self._faults = replace(self._faults, slow=Faults().slow)

    async def _take(self, update: Update) -> None:
        """Have the engine do its part, then take over the rest; all or nothing."""
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
        if crash is not None and crash.target == "engine":
            settings["crash_after_requests"] = crash.after_requests
            settings["crash_after_tokens"] = crash.after_tokens
        if settings:
            await self._configure(settings, ends=0 in _counts(crash))
        self._sim = sim
        if update.faults.fake_metrics != self._faults.fake_metrics:
            self._lies_since = self._clock()
        self._faults = update.faults

    async def _configure(self, settings: dict[str, Any], *, ends: bool) -> None:
        """Tell the engine. One that is to crash now cannot answer; that is no error."""
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
        self._look_for_restart()
        settings = sim_settings.show(self._sim) if self._sim else {}
        return msgspec.json.encode({**settings, **show(self._faults)})

    def _is_let_in(self, scope: Scope) -> bool:
        scheme, _, token = (_header(scope, b"authorization") or "").partition(" ")
        given = token.encode("latin-1")
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


_STATS_FIELDS = {
    "running-requests": "num_running",
    "waiting-requests": "num_waiting",
    "kv-cache-usage": "kv_cache_usage",
}


def _counts(crash: Crash | None) -> tuple[int | None, ...]:
    return (crash.after_requests, crash.after_tokens) if crash else ()


class _LyingEngine:
    """An `Engine` whose `stats` pass through somebody's hands."""

    def __init__(self, engine: Engine, distort: Callable[[EngineStats], EngineStats]) -> None:
        self._engine = engine
        self._distort = distort

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def is_progressing(self) -> bool:
        return self._engine.is_progressing

    @property
    def stats(self) -> EngineStats:
        return self._distort(self._engine.stats)

    @property
    def num_waiting_reported(self) -> int:
        return self._engine.num_waiting_reported

    def open(self, request: AddRequest) -> tuple[OutputStream, ...]:
        return self._engine.open(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def run(self, command: Command) -> CommandReply:
        return await self._engine.run(command)


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1").strip()
    return None


async def _read(receive: Receive, timeout_seconds: float) -> bytes:
    """The body of a request. Raises 413 when it is too long, 408 when it takes too long, and
    `ConfigError` when the client leaves.
    """
    body: bytes = b""
    try:
        async with asyncio.timeout(timeout_seconds):
            while (message := await receive())["type"] != "http.disconnect":
                body += message.get("body", b"")
                if len(body) > MAX_CONFIG_BYTES:
                    problem = f"The body is longer than {MAX_CONFIG_BYTES} bytes"
                    raise status_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem)
                if not message.get("more_body", False):
                    return body
    except TimeoutError as error:
        problem = f"The body did not arrive within {timeout_seconds:g} seconds"
        raise status_error(HTTPStatus.REQUEST_TIMEOUT, problem) from error
    raise ConfigError("the client is gone")
