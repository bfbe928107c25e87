"""The composition root of a worker: the engine process and the HTTP server, from start to drain.

The port is bound first, so that a busy one is found at once, and opens when requests can be
answered. While an engine that died restarts behind the open port, the port answers 503.
"""

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import logging
import os
import random
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Generator
from functools import partial
from typing import NoReturn, Protocol, cast

import msgspec
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from base.shelves import load_shelf
from base.tracing import Tracing, TracingError, build_tracing
from worker.api.generate.adapters import ServedAdapters, load_adapters
from worker.api.generate.admission import Admission, MemoryGuard, resident_bytes
from worker.api.generate.stages import TRACED
from worker.api.generate.text import TextParts, build_text
from worker.api.http.connection import protocol_of
from worker.api.openai.checks import RequestChecks
from worker.api.schema.openapi import package_version
from worker.api.server import WorkerApi
from worker.config import ApiConfig, EngineConfig, KvAddress, ServeConfig
from worker.engine.cache.block_hash import RANDOM_SEED
from worker.engine.messages import EngineReady, Pause, StepOutputs
from worker.engine.process.client import EngineClient
from worker.engine.process.supervision import Supervision
from worker.errors import CRASH_STATUS, ConfigError, EngineDeadError, root_cause
from worker.listener import bound, is_exposed, shown
from worker.metrics.page import WorkerMetrics
from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.checkpoint import Checkpoint
from worker.types import EngineStats

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
# Time to write the last error events after the engine died or the drain timed out. An engine that
# has not answered by its end is killed, and the wait starts once more.
LAST_WORDS_SECONDS = 2.0
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers: a signal starts our drain instead of its shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def run(config: ServeConfig, checkpoint: Checkpoint | None) -> int:
    """Serve until SIGTERM or SIGINT; a second signal cuts the drain short.

    Return 0 after a drain, 1 when the engine is lost for good. Raise `WorkerError` when the worker
    cannot start. No process outlives this call.
    """
    started = time.monotonic()
    stop = _Stop()
    stop.listen(asyncio.get_running_loop())
    with bound(config) as listener:
        _warn_if_open(config, listener)
        _log_default_sampling(config.api)
        metrics = _metrics(config)
        tracing = _tracing(config)

        def on_step(outputs: StepOutputs) -> None:
            if outputs.num_scheduled_tokens:
                metrics.step_done(outputs.num_scheduled_tokens)

        client = EngineClient(
            _with_hash_seed(config.engine), on_step, _supervision(config), metrics.sleep_done
        )
        try:
            parts = await _started(client, config, checkpoint, stop)
            if parts is None:
                return 0
            ready, text = parts
            if text.vocabulary is not None:
                client.describe(text.vocabulary)
            _warn_if_tools_are_unseen(config.api, text.template)
            metrics.set_cache_info(cache_info(config.engine, ready))
            api = dataclasses.replace(
                config.api,
                max_model_len=min(config.api.max_model_len, ready.max_model_len),
                system_fingerprint=system_fingerprint(config.engine),
                kv_address=_kv_address(config.engine, ready, listener),
            )
            config = dataclasses.replace(config, api=api)
            adapters = await load_adapters(config, client)
            worker = _Worker(config, client, metrics, text, adapters, tracing)
            try:
                return await worker.serve(listener, stop, started)
            finally:
                await asyncio.to_thread(tracing.close)  # it sends the last spans
        finally:
            await client.shutdown()


class _StoppedError(Exception): ...


class _Stop:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    async def interrupt(self) -> NoReturn:
        await self.asked.wait()
        raise _StoppedError

    def _signalled(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()


def _warn_if_open(config: ServeConfig, listener: socket.socket) -> None:
    if not is_exposed(listener):
        return
    if not config.api.api_keys:
        # No error, as containers need it.
        logger.warning("%s can be reached from other machines without a key", config.host)
    if config.api.enable_admin_routes:
        logger.warning("admin routes are on, and can be reached from other machines")


def _log_default_sampling(api: ApiConfig) -> None:
    if api.default_sampling:
        shown = ", ".join(f"{name} {value:g}" for name, value in api.default_sampling)
        logger.info("requests are sampled with %s unless they say otherwise", shown)


def _warn_if_tools_are_unseen(api: ApiConfig, template: ChatTemplate | None) -> None:
    if api.tool_call_parser is not None and (template is None or not template.shows_tools):
        logger.warning("--tool-call-parser: the chat template does not show tools to the model")


def _with_hash_seed(engine: EngineConfig) -> EngineConfig:
    # Draw a random seed here: a restarted engine must give blocks the same hashes.
    seed = engine.prefix_caching_hash_seed
    if seed is None and engine.prefix_caching_hash_algo.startswith("xxhash"):
        seed = RANDOM_SEED
    if seed != RANDOM_SEED:
        return engine
    return dataclasses.replace(engine, prefix_caching_hash_seed=secrets.token_hex(32))


def _supervision(config: ServeConfig) -> Supervision:
    return Supervision(
        restart=config.engine_failure_policy == "restart",
        max_restarts=config.max_engine_restarts,
        heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
    )


def _kv_address(
    engine: EngineConfig, ready: EngineReady, listener: socket.socket
) -> KvAddress | None:
    transfer = engine.kv_transfer
    if transfer is None or ready.kv_port is None:
        return None
    is_tcp = listener.family != socket.AF_UNIX
    http_port = listener.getsockname()[1] if is_tcp else 0
    return KvAddress(transfer.kv_ip, ready.kv_port, http_port, transfer.kv_peer_port)


def _tracing(config: ServeConfig) -> Tracing:
    try:
        return build_tracing(config.tracing, os.environ, TRACED, config.otlp_traces_endpoint)
    except TracingError as error:
        raise ConfigError(str(error)) from error


def _metrics(config: ServeConfig) -> WorkerMetrics:
    api, lora = config.api, config.engine.lora
    name, max_drafts = api.served_model_names[0], api.num_speculative_tokens
    max_loras = 0 if lora is None else lora.max_loras
    return WorkerMetrics(name, api.max_model_len, time.time(), max_drafts, max_loras)


async def _started(
    client: EngineClient, config: ServeConfig, checkpoint: Checkpoint | None, stop: _Stop
) -> tuple[EngineReady, TextParts] | None:
    """Return the started engine and the text's parts; None if a stop signal comes first."""
    try:
        async with asyncio.TaskGroup() as group:
            interrupter = group.create_task(stop.interrupt(), name="stop")
            built = asyncio.to_thread(build_text, config, checkpoint)
            building = group.create_task(built, name="text")
            ready = await client.start()
            text = await building
            # Its task would keep the group open.
            interrupter.cancel()
    except BaseExceptionGroup as failures:
        cause = root_cause(failures)
        if isinstance(cause, _StoppedError):
            return None
        # The group's own traceback would only hide the cause from the user.
        raise cause from None
    return ready, text


class _Faults(Protocol):
    def stats(self) -> EngineStats: ...

    def around(self, app: ASGIApp) -> ASGIApp: ...


def _fault_injection(config: ServeConfig, client: EngineClient) -> _Faults:
    shelf = load_shelf("worker.sim.injection")
    if shelf is None:
        raise ConfigError("fault injection needs worker.sim, which is not installed")
    # A crash has no clean-up and no exit handlers.
    crash = partial(os._exit, CRASH_STATUS)
    return cast("_Faults", shelf.FaultInjection(config, client, time.monotonic, crash))


class _Worker:
    def __init__(
        self,
        config: ServeConfig,
        client: EngineClient,
        metrics: WorkerMetrics,
        text: TextParts,
        adapters: ServedAdapters,
        tracing: Tracing,
    ) -> None:
        api, tls = config.api, config.tls
        self._config = config
        self._client = client
        self._admission = Admission(
            client,
            metrics,
            max_num_seqs=api.max_num_seqs,
            max_num_queued_reqs=api.max_num_queued_reqs,
            max_num_queued_tokens=api.max_num_queued_tokens,
            memory=MemoryGuard(api.max_rss_bytes, resident_bytes, time.monotonic),
        )
        checks = RequestChecks(api, text.of_model(config), random.Random(api.seed), adapters)
        faults = None if config.faults is None else _fault_injection(config, client)
        stats = None if faults is None else faults.stats
        application: ASGIApp = WorkerApi(
            api, client, self._admission, metrics, checks, config.engine, stats, tracing
        )
        if faults is not None:
            application = faults.around(application)
        if api.allowed_origins:  # outermost: pages read errors, too, and preflights need no key
            application = CORSMiddleware(
                application,
                allow_origins=api.allowed_origins,
                allow_credentials=api.allow_credentials,
                allow_methods=api.allowed_methods,
                allow_headers=api.allowed_headers,
            )
        self._server = _Server(
            uvicorn.Config(
                application,
                http=protocol_of(api, metrics.http.refused),
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
                ssl_certfile=None if tls is None else tls.certfile,
                ssl_keyfile=None if tls is None else tls.keyfile,
                ssl_ca_certs=None if tls is None else tls.ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.ca_certs else ssl.CERT_NONE,
            )
        )

    async def serve(self, listener: socket.socket, stop: _Stop, started: float) -> int:
        """Open the port, announce it, serve and drain; return the exit status."""
        try:
            listener.listen(_BACKLOG)
        except OSError as error:  # another process began to listen since we bound
            raise ConfigError(f"cannot listen: {error.strerror}") from error
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._server.serve([listener]), name="http-server")
            asked = group.create_task(stop.asked.wait(), name="stop")
            gone = group.create_task(self._client.gone(), name="engine-gone")
            gc.collect()
            gc.freeze()  # start-up objects live on; collections need not scan them
            self._announce(listener, time.monotonic() - started)
            await asyncio.wait({serving, asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await self._drain(stop, self._config.shutdown_timeout_seconds)
            status = 1 if gone.done() else 0
            if status:
                logger.error("the engine is gone; exiting so that a supervisor can restart us")
                # Without an engine nothing can be drained; this only refuses new requests.
                self._admission.drains.set()
            if not await self._admission.wait_idle(LAST_WORDS_SECONDS):
                await self._client.shutdown(0.0)  # the aborts may not have reached it
                await self._admission.wait_idle(LAST_WORDS_SECONDS)
            self._server.should_exit = True
            await serving
            asked.cancel()
            gone.cancel()
        return status

    async def _drain(self, stop: _Stop, timeout_seconds: float) -> None:
        """Refuse new requests and wait for open ones, except streams that can continue on another
        worker (`OpenSequences.leave`). Abort the rest at the timeout.
        """
        self._admission.drains.set()
        logger.info("draining: %d sequences left", self._admission.num_inside)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._finish(timeout_seconds), name="idle"),
                group.create_task(stop.at_once.wait(), name="hurry"),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        if self._admission.num_inside:
            logger.warning("aborting %d sequences", self._admission.num_inside)
            self._client.abort_all("The request was aborted because the server stops")

    async def _finish(self, timeout_seconds: float) -> None:
        """Wait for all requests, and for the KV of moved streams until its lease expires."""
        with contextlib.suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(timeout_seconds):
                await self._admission.wait_idle(timeout_seconds)
                if self._config.engine.kv_transfer is not None:
                    # The command ends when no other worker is still to fetch KV of a moved stream.
                    await self._client.run(Pause(0, "wait"))

    def _announce(self, listener: socket.socket, seconds: float) -> None:
        where = shown(listener, tls=self._config.tls is not None)
        # One line on standard output, which scripts wait for; logs go to standard error.
        sys.stdout.write(f"worker ready on {where} in {seconds:.1f} s\n")
        sys.stdout.flush()


# Fields of the engine's configuration that do not change answers.
_WITHOUT_EFFECT_ON_ANSWERS = frozenset(
    ("kv_events", "kv_transfer", "kv_offloading", "num_threads", "lora", "logits_processors")
)


def system_fingerprint(config: EngineConfig) -> str:
    """Return `pointsman-<version>-<8 hex digits>`, a digest of all configuration that changes
    answers.

    Speculation is part of it only if drafts are drawn at random.
    """
    public = dataclasses.replace(config, prefix_caching_hash_seed=None)  # a secret
    speculative = config.speculative
    if speculative is not None and speculative.draft_sample_method != "probabilistic":
        public = dataclasses.replace(public, speculative=None)
    shape = {
        name: value
        for name, value in msgspec.to_builtins(public).items()
        if name not in _WITHOUT_EFFECT_ON_ANSWERS
    }
    digest = hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()
    return f"pointsman-{package_version()}-{digest[:8]}"


def cache_info(engine: EngineConfig, ready: EngineReady) -> dict[str, str]:
    """Return vLLM's cache configuration as labels; features that are absent count as unused."""
    num_tokens = ready.num_blocks * ready.block_size
    values = {
        "block_size": ready.block_size,
        "user_specified_block_size": True,
        "kv_cache_layout": "auto",
        "prefix_match_unit": 1 if engine.enable_partial_hits else ready.block_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "cache_dtype": engine.kv_cache_dtype,
        "is_attention_free": False,
        "num_gpu_blocks_override": engine.num_blocks_override,
        "sliding_window": None,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "prefix_caching_hash_algo": engine.prefix_caching_hash_algo,
        "prefix_cache_retention_interval": None,
        "num_gpu_blocks": ready.num_blocks,
        "num_cpu_blocks": None,
        "effective_attention_block_size": ready.block_size,
        "kv_cache_size_tokens": num_tokens,
        "kv_cache_max_concurrency": num_tokens / ready.max_model_len,
        "hash_block_size": ready.block_size,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "kv_offloading_size": engine.kv_offloading and engine.kv_offloading.kv_offloading_size,
        "kv_offloading_backend": "native",
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "auto",
    }
    return {name: str(value) for name, value in values.items()}
