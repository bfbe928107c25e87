"""The composition root of a worker: the engine process and the HTTP server, from start to drain.

Order of life: bind the port (without listening, so that a busy one is found at once), start the
engine process, build the tokenizer beside it, listen when both are ready, serve until a signal or
the engine's death, drain, stop the engine. The port is open exactly while requests can be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Generator
from datetime import datetime
from typing import NoReturn

import uvicorn

from worker.api.admission import Admission
from worker.api.openai import RequestPreparer, TextSide
from worker.api.params import ModelLimits
from worker.api.server import WorkerApi
from worker.config import ApiConfig, EngineConfig, ServeConfig
from worker.engine.client import EngineClient
from worker.engine.messages import EngineReady, StepOutputs
from worker.errors import ConfigError, root_cause
from worker.metrics import WorkerMetrics
from worker.tokenizer import sim
from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.checkpoint import Checkpoint
from worker.tokenizer.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
# After the engine died or the drain ran out of time: for the last error events to be written.
LAST_WORDS_SECONDS = 2.0
_LIVENESS_SECONDS = 0.1
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: a signal starts our drain, not its shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def run(config: ServeConfig, checkpoint: Checkpoint | None) -> int:
    """Serve until SIGTERM or SIGINT; a second signal cuts the drain short.

    Returns 0 after a drain, 1 when the engine died. Raises `WorkerError` when the worker cannot
    start. Leaves no process behind in any case.
    """
    started = time.monotonic()
    stop = _Stop()
    stop.listen(asyncio.get_running_loop())
    with bind(config.host, config.port) as listener:
        metrics = _metrics(config.api)

        def on_step(outputs: StepOutputs) -> None:
            if outputs.num_scheduled_tokens:
                metrics.step_done(outputs.num_scheduled_tokens)

        client = EngineClient(config.engine, on_step)
        try:
            parts = await _started(client, checkpoint, stop)
            if parts is None:
                return 0
            ready, text = parts
            metrics.set_cache_info(_cache_info(config.engine, ready))
            api = dataclasses.replace(
                config.api, max_model_len=min(config.api.max_model_len, ready.max_model_len)
            )
            worker = _Worker(api, client, metrics, text)
            return await worker.serve(listener, stop, config.shutdown_timeout_seconds, started)
        finally:
            await client.shutdown()


class _StoppedError(Exception):
    """We were told to stop before we had started."""


class _Stop:
    """Counts the signals that ask us to stop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle SIGTERM and SIGINT on this loop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    async def interrupt(self) -> NoReturn:
        """Wait for the first signal, then raise `_StoppedError`."""
        await self.asked.wait()
        raise _StoppedError

    def _signalled(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises `ConfigError` when the address is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is already in use; choose another with --port"
            ) from error
        raise ConfigError(f"cannot bind {host} port {port}: {error.strerror}") from error
    return listener


def _metrics(api: ApiConfig) -> WorkerMetrics:
    return WorkerMetrics(api.served_model_names[0], api.max_model_len, time.time())


def _cache_info(engine: EngineConfig, ready: EngineReady) -> dict[str, str]:
    return {
        "block_size": str(ready.block_size),
        "num_gpu_blocks": str(ready.num_blocks),
        "num_gpu_blocks_override": str(engine.num_blocks_override),
        "enable_prefix_caching": str(engine.enable_prefix_caching),
        "cache_dtype": engine.dtype,
        "kv_cache_size_tokens": str(ready.num_blocks * ready.block_size),
    }


async def _started(
    client: EngineClient, checkpoint: Checkpoint | None, stop: _Stop
) -> tuple[EngineReady, tuple[Tokenizer, ChatTemplate | None]] | None:
    """Start the engine and build the tokenizer at once; None when we are told to stop first."""
    try:
        async with asyncio.TaskGroup() as group:
            interrupter = group.create_task(stop.interrupt(), name="stop")
            building = group.create_task(asyncio.to_thread(_build_text, checkpoint), name="text")
            ready = await client.start()
            text = await building
            interrupter.cancel()
    except BaseExceptionGroup as failures:
        cause = root_cause(failures)
        if isinstance(cause, _StoppedError):
            return None
        raise cause from None
    return ready, text


def _build_text(checkpoint: Checkpoint | None) -> tuple[Tokenizer, ChatTemplate | None]:
    if checkpoint is None:
        template = _template(sim.CHAT_TEMPLATE, "", sim.IM_END)
        return sim.SimTokenizer(), template
    source = checkpoint.chat_template
    template_or_none = (
        None if source is None else _template(source, checkpoint.bos_token, checkpoint.eos_token)
    )
    return build_tokenizer(checkpoint), template_or_none


def _template(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token, now=datetime.now)


class _Worker:
    """The serving phase: an open port until a signal or the engine's death."""

    def __init__(
        self,
        api: ApiConfig,
        client: EngineClient,
        metrics: WorkerMetrics,
        text: tuple[Tokenizer, ChatTemplate | None],
    ) -> None:
        self._client = client
        self._admission = Admission(
            client,
            metrics,
            max_num_seqs=api.max_num_seqs,
            max_num_queued_reqs=api.max_num_queued_reqs,
        )
        side = TextSide(*text, ModelLimits(api.max_model_len, api.vocab_size))
        preparer = RequestPreparer(api, side, random.Random(api.seed))
        self._server = _Server(
            uvicorn.Config(
                WorkerApi(api, client, self._admission, metrics, side, preparer),
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(LAST_WORDS_SECONDS),
            )
        )

    async def serve(
        self, listener: socket.socket, stop: _Stop, timeout_seconds: float, started: float
    ) -> int:
        """Open the port, say so, serve, drain; returns the exit status."""
        try:
            listener.listen(_BACKLOG)
        except OSError as error:  # somebody else began to listen since we bound
            raise ConfigError(f"cannot listen: {error.strerror}") from error
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._server.serve([listener]), name="http-server")
            asked = group.create_task(stop.asked.wait(), name="stop")
            died = group.create_task(self._engine_died(), name="engine-liveness")
            gc.collect()
            gc.freeze()  # what start-up allocated stays; no later collection need look at it
            _announce(listener, time.monotonic() - started)
            await asyncio.wait({serving, asked, died}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await self._drain(stop, timeout_seconds)
            status = 0 if self._client.is_alive else 1
            if status:
                logger.error("the engine is gone; exiting so that a supervisor can restart us")
                self._admission.draining = True
            await self._admission.wait_idle(LAST_WORDS_SECONDS)
            self._server.should_exit = True
            await serving
            asked.cancel()
            died.cancel()
        return status

    async def _engine_died(self) -> None:
        while True:
            await asyncio.sleep(_LIVENESS_SECONDS)
            if not self._client.is_alive:
                return

    async def _drain(self, stop: _Stop, timeout_seconds: float) -> None:
        """Let nobody in, let everybody finish; abort who is left when the time is up."""
        self._admission.draining = True
        logger.info("draining: %d sequences left", self._admission.num_inside)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._admission.wait_idle(timeout_seconds), name="idle"),
                group.create_task(stop.at_once.wait(), name="hurry"),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        if self._admission.num_inside:
            logger.warning("aborting %d sequences", self._admission.num_inside)
            self._client.abort_all()


def _announce(listener: socket.socket, seconds: float) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"worker ready on http://{shown}:{port} in {seconds:.1f} s\n")
    sys.stdout.flush()
