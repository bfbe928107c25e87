"""The engine process: `python -m worker.engine.process SOCKET BEATS`, spawned by `engine.child`.

Standard input carries the `EngineConfig` (msgpack behind a 4-byte little-endian length) and then
stays open as a life line: when it ends, the parent is gone, and so is this process at once; from
the moment that it serves the system sees to that, in case it is stuck or stopped then. Signals that
reach a whole process group or service (SIGINT, SIGTERM) are left to the parent, which drains
and then says `Shutdown`.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import cast

import msgspec
import zmq

from worker.config import (
    CacheConfig,
    EngineConfig,
    KvOffloadingConfig,
    KvTransferConfig,
    SpeculativeConfig,
)
from worker.engine.adapters import AdapterSlots
from worker.engine.cache_events import CacheEvent
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.heartbeat import HeartbeatThread, Pulse, StepBudget
from worker.engine.kv_events import KvEventPublisher, publishes
from worker.engine.lengths.costs import StepCosts
from worker.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
    Vocabulary,
)
from worker.engine.pipeline import Pipeline
from worker.engine.remote_kv import RemoteKv
from worker.engine.scheduler import Scheduler
from worker.engine.speculation import JUMP_FORWARD, Speculation
from worker.engine.tiers import Tiers
from worker.errors import ConfigError, ModelError, WorkerError
from worker.executor.interface import Executor, KvMemory
from worker.executor.lifeline import die_with_parent
from worker.executor.profiling import ProfiledCache, profile
from worker.executor.sim.runner import SimExecutor, build_sim_executor
from worker.kv.access import read_key
from worker.kv.channel import listening
from worker.kv.content import KvShape, model_digest
from worker.kv.disk import BlockFiles, check_directory
from worker.kv.tcp import TcpConnector
from worker.types import EngineStats

logger = logging.getLogger(__name__)

GIB = 1 << 30
WARM_UP_SECONDS = 60.0
LAST_WORDS_SECONDS = 2.0
_COMPILING_SECONDS = 0.002  # between two looks whether a grammar is compiled


class EngineSocket:
    """The engine's end of the socket: whole messages in and out."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> ToEngine | None:
        """The next message that has arrived already, or None."""
        if not cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        return cast(ToEngine, self._decoder.decode(self._socket.recv(zmq.DONTWAIT)))

    def wait(self, timeout_seconds: float | None = None, bell: int | None = None) -> None:
        """Sleep until a message arrives, the file `bell` can be read, or the time is up; None:
        however long it takes.
        """
        poller = zmq.Poller()
        for one in (self._socket, bell):
            if one is not None:
                poller.register(one, zmq.POLLIN)
        poller.poll(None if timeout_seconds is None else int(timeout_seconds * 1000))

    def close(self) -> None:
        """Deliver what is queued, for a second at most, and close."""
        self._socket.close(linger=1000)
        self._context.term()


def build_core(
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    make_pipeline: Callable[[Executor], Pipeline] | None = None,
) -> tuple[EngineCore, EngineReady]:
    """Load the model or the simulator and size the cache. `EngineReady` has no start-up time yet.

    `make_pipeline`: what runs the steps, if not the usual. Raises WorkerError with a message for
    the user.
    """
    _check_before_loading(config)
    executor, num_blocks = _build_executor(config)
    cache = CacheConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        watermark=config.watermark,
        enable_partial_hits=config.enable_partial_hits,
        enable_fair_eviction=config.enable_fair_eviction,
        hash_algo=config.prefix_caching_hash_algo,
        hash_seed=config.prefix_caching_hash_seed,
        record_events=publishes(config.kv_events),
        record_evictions=config.kv_offloading is not None,
    )
    if config.speculative is None:
        speculation = Speculation(JUMP_FORWARD, None, False, config.vocab_size)
    else:
        speculation = _build_speculation(config, config.speculative, executor, num_blocks)
    adapters = None
    if config.lora is not None:
        lora = config.lora
        adapters = AdapterSlots(lora.max_loras, lora.max_cpu_loras, executor.read_adapter)
    remote, kv_port = None, None
    if config.kv_transfer is not None:
        remote, kv_port = _build_remote(config, config.kv_transfer, cast(KvMemory, executor))
    scheduler = Scheduler(
        cache, config.scheduler, config.eos_token_ids, speculation, adapters, remote
    )
    if config.kv_offloading is not None:
        make = partial(_build_tiers, config, config.kv_offloading, cast(KvMemory, executor))
        scheduler.add_tiers(make)
    if scheduler.max_model_len < config.scheduler.max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, fewer than max_model_len %d; sequences end there"
            " (--kv-cache-memory-bytes gives it more)",
            scheduler.max_model_len,
            config.scheduler.max_model_len,
        )
    ready = EngineReady(num_blocks, config.block_size, scheduler.max_model_len, 0.0, kv_port)
    pipeline = None if make_pipeline is None else make_pipeline(executor)
    core = EngineCore(scheduler, executor, clock, config.async_scheduling, pipeline)
    return core, ready


def _check_before_loading(config: EngineConfig) -> None:
    """What would prevent a start once the model is loaded, in vain then. Raises `ConfigError`."""
    if config.kv_transfer is not None:
        read_key(config.kv_transfer, os.environ)
        listening(config.kv_transfer).close()
    if config.kv_offloading is not None and config.kv_offloading.kv_offloading_path is not None:
        check_directory(Path(config.kv_offloading.kv_offloading_path))


def _build_executor(config: EngineConfig) -> tuple[Executor, int]:
    if config.engine == "sim":
        return build_sim_executor(config)
    if config.engine == "torch":
        # Imported here and by name, so that the simulator never loads torch.
        if config.speculative is not None:
            _keep_more_products()
        start = importlib.import_module("worker.executor.start")
        return cast("tuple[Executor, int]", start.build_executor(config))
    raise ConfigError(f"unknown engine {config.engine!r}; known are 'torch' and 'sim'")


def _keep_more_products() -> None:
    """Before torch loads: steps with drafts have many more numbers of rows than plain ones, and
    compiling a product anew costs a step several milliseconds. Some 200 MB instead of 50.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")


def _build_speculation(
    config: EngineConfig, speculative: SpeculativeConfig, executor: Executor, num_blocks: int
) -> Speculation:
    """Drafts come from tokens alone, or else from the executor. Step times are profiled where a
    model runs: a simulator's faults count steps.
    """
    drafter = build_drafter(speculative)
    profiled = None
    if config.engine == "torch" and speculative.enable_adaptive_verification:
        cache = ProfiledCache(num_blocks, config.block_size, config.scheduler.max_model_len)
        most = (config.scheduler.max_num_seqs, speculative.num_speculative_tokens)
        profiled = profile(executor, cache, most, time.monotonic, drafter is None)
    costs = None if profiled is None else StepCosts(profiled)
    return Speculation(speculative, drafter, drafter is None, config.vocab_size, costs)


def _build_remote(
    config: EngineConfig, transfer: KvTransferConfig, executor: KvMemory
) -> tuple[RemoteKv, int]:
    """Other engines reach this one from now on, at the port, and find nothing here yet."""
    shape = _kv_shape(config, executor)
    token_bytes = executor.read_kv((0,), 1).nbytes
    key = read_key(transfer, os.environ)
    pace = executor.transfer_seconds if isinstance(executor, SimExecutor) else None
    nixl = None
    if transfer.kv_connector == "NixlConnector":
        # By name: it takes numpy, which a simulator never loads.
        nixl = importlib.import_module("worker.kv.nixl").NixlTransport.load(transfer)
    connector = TcpConnector(transfer, key, shape, token_bytes, pace, nixl)
    logger.info("KV transfers: engine %s on port %d", connector.engine_id, connector.port)
    return RemoteKv(connector, executor.read_kv, config.block_size), connector.port


def _kv_shape(config: EngineConfig, executor: KvMemory) -> KvShape:
    facts = (config.quantization, config.cpu_activations, *executor.kv_facts)
    is_model = config.engine == "torch"
    model = model_digest(Path(config.model_path or "") if is_model else None, *facts)
    return KvShape(model, *executor.kv_shape)


def _build_tiers(
    config: EngineConfig,
    offloading: KvOffloadingConfig,
    executor: KvMemory,
    root: bytes,
    record: Callable[[CacheEvent], None],
) -> Tiers:
    """What is on disk is found while the engine begins to serve."""
    block_bytes = config.block_size * executor.read_kv((0,), 1).nbytes
    num_slots = int(offloading.kv_offloading_size * GIB) // block_bytes
    num_on_disk = int(offloading.kv_offloading_disk_size * GIB) // block_bytes
    for flag, number in (("size", num_slots), ("disk-size", num_on_disk)):
        if not number:
            raise ConfigError(f"--kv-offloading-{flag} is less than a block of {block_bytes} bytes")
    memory = executor.host_memory(num_slots * block_bytes)
    disk = None
    if offloading.kv_offloading_path is not None:
        facts = (_kv_shape(config, executor), config.prefix_caching_hash_algo, config.block_size)
        identity = sha256(msgspec.msgpack.encode(facts) + root).hexdigest()[:32]
        disk = BlockFiles(Path(offloading.kv_offloading_path), identity, block_bytes)
        logger.info("evicted KV goes to %s", disk.directory)
    policy = offloading.kv_offloading_policy
    return Tiers(memory, block_bytes, root, policy, record, disk, num_on_disk)


def _has_gpu(config: EngineConfig) -> bool:
    """Called when torch is loaded, if it is to be."""
    return config.engine == "torch" and bool(importlib.import_module("torch").cuda.is_available())


class Server:
    """The serving loop: messages in, steps, outputs out. Owns nothing but what it is at."""

    def __init__(
        self,
        core: EngineCore,
        channel: EngineSocket,
        pulse: Pulse,
        publisher: KvEventPublisher | None,
        speculation_log: SpeculationLog,
    ) -> None:
        self._core = core
        self._channel = channel
        self._pulse = pulse
        self._publisher = publisher
        self._speculation_log = speculation_log
        self._num_commands = 0  # that were not answered yet
        pulse.follow(lambda: core.running_step, lambda: core.modelled_seconds)

    def serve(self) -> None:
        """Step while there is work, sleep on the socket while there is none, until `Shutdown`."""
        while True:
            if not self._core.has_work:
                self._pulse.idle()
                self._channel.wait(self._core.idle_seconds, self._core.bell)
                self._speculation_log.resume(time.monotonic())
            elif self._core.is_compiling:
                self._channel.wait(_COMPILING_SECONDS)
            self._pulse.working(commanded=self._num_commands > 0)
            if not self._receive():
                return
            outputs = self._core.step()
            self._pulse.stepped(0 if outputs is None else outputs.num_scheduled_tokens)
            if outputs is not None:
                self._channel.send(self._with_drops(outputs))
                self._tell(outputs.stats)
            self._publish()
            self._reply()

    def _receive(self) -> bool:
        """Take every message that is there; False when the engine is to end."""
        while (message := self._channel.receive()) is not None:
            if isinstance(message, AddRequest):
                self._core.add(message)
            elif isinstance(message, AbortRequests):
                self._core.abort(message.request_ids, message.hands_over)
            elif isinstance(message, Vocabulary):
                self._core.take_vocabulary(message)
            elif isinstance(message, Shutdown):
                return False
            else:
                self._num_commands += 1
                self._pulse.working(commanded=True)
                self._core.command(message)
        return True

    def _tell(self, stats: EngineStats) -> None:
        line = self._speculation_log.line(stats, time.monotonic())
        if line is not None:
            logger.info("%s", line)

    def _with_drops(self, outputs: StepOutputs) -> StepOutputs:
        if self._publisher is None or not self._publisher.num_dropped:
            return outputs
        stats = msgspec.structs.replace(
            outputs.stats, num_event_batches_dropped=self._publisher.num_dropped
        )
        return msgspec.structs.replace(outputs, stats=stats)

    def _publish(self) -> None:
        """Publish what changed in the prefix cache, one batch per step, before any reply: a client
        that gets the answer to a reset or a dump has the events that led there.
        """
        if self._publisher is not None:
            events = self._core.take_events()
            if events:
                self._publisher.publish(events)

    def _reply(self) -> None:
        for reply in self._core.take_replies():
            self._num_commands -= 1
            if self._publisher is not None:
                reply = msgspec.structs.replace(reply, event_sequence=self._publisher.last_sequence)
            self._channel.send(reply)


def run(config: EngineConfig, channel: EngineSocket, budget: StepBudget, pulse: Pulse) -> int:
    """The life of the process after its config is read; returns the exit status."""
    started = time.monotonic()
    core: EngineCore | None = None
    publisher: KvEventPublisher | None = None
    try:
        core, ready = build_core(config)
        budget.compiles_kernels = _has_gpu(config)
        if publishes(config.kv_events):
            publisher = KvEventPublisher(
                config.kv_events, config.block_size, core.announce, time.time
            )
        gc.collect()
        gc.freeze()  # what start-up allocated stays; no later collection need look at it
        die_with_parent()
        elapsed = time.monotonic() - started
        channel.send(msgspec.structs.replace(ready, startup_seconds=elapsed))
        Server(core, channel, pulse, publisher, SpeculationLog()).serve()
    except (ConfigError, ModelError) as error:  # the user's to mend: where it was found is no help
        logger.error("the engine failed: %s", error)
        _tell_failure(channel, str(error))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        known = isinstance(error, WorkerError)
        _tell_failure(channel, str(error) if known else f"{type(error).__name__}: {error}")
        return 1
    finally:
        if publisher is not None:
            publisher.close()
        if core is not None:
            core.shutdown()
        channel.close()
    return 0


def _tell_failure(channel: EngineSocket, reason: str) -> None:
    channel.send(EngineFailed(reason))
    channel.wait(LAST_WORDS_SECONDS)  # our parent answers with `Shutdown` once it has them


def main() -> int:
    """Read the config, tie our life to the parent's, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s [engine] %(name)s: %(message)s"
    )
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    encoded = sys.stdin.buffer.read(size)
    if not encoded or len(encoded) < size:  # our parent is gone already
        _exit_with_parent(*sys.argv[1:3])
    config = msgspec.msgpack.decode(encoded, type=EngineConfig)
    threading.Thread(
        target=_exit_with_parent, args=sys.argv[1:3], name="parent-watch", daemon=True
    ).start()
    warm_up = WARM_UP_SECONDS if config.engine == "torch" else 0.0
    budget = StepBudget(config.step_budget_seconds, config.step_budget_factor, warm_up)
    pulse = Pulse(budget)
    heartbeat = HeartbeatThread(sys.argv[2], pulse)
    heartbeat.start()
    try:
        return run(config, EngineSocket(sys.argv[1]), budget, pulse)
    finally:
        heartbeat.stop()


def _exit_with_parent(*addresses: str) -> None:
    """Block until standard input ends, then leave at once: no client is left to serve, nor to
    remove the directory of the sockets.
    """
    while os.read(0, 1024):
        pass
    try:
        sockets = [Path(address.removeprefix("ipc://")) for address in addresses]
        for path in sockets:
            path.unlink(missing_ok=True)
        sockets[0].parent.rmdir()
    finally:  # come what may: our parent may be at it itself
        os._exit(1)


INTERVAL_SECONDS = 10.0


class SpeculationLog:
    """Owns what was last told, and how long the engine has worked since. One line for
    `interval_seconds` of work in which anything was drafted; none otherwise. The words and numbers
    are those of vLLM's line.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._told = EngineStats()
        self._seen_seconds: float | None = None
        self._worked_seconds = 0.0  # since then

    def resume(self, now_seconds: float) -> None:
        """There was nothing to do until now: the time since the last step counts for nothing."""
        self._seen_seconds = now_seconds

    def line(self, stats: EngineStats, now_seconds: float) -> str | None:
        """What to log after a step, whose counters since the engine's start are given; mostly
        None. Rates are over the time worked since the last line, or since an interval of work in
        which nothing was drafted.
        """
        if self._seen_seconds is not None:
            self._worked_seconds += now_seconds - self._seen_seconds
        self._seen_seconds = now_seconds
        if self._worked_seconds < self._interval_seconds:
            return None
        seconds, self._worked_seconds = self._worked_seconds, 0.0
        if stats.num_drafts == self._told.num_drafts:
            return None
        text = _line(self._told, stats, seconds)
        self._told = stats
        return text


def _line(before: EngineStats, after: EngineStats, seconds: float) -> str:
    num_drafts = after.num_drafts - before.num_drafts
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    earlier = before.num_accepted_by_position or (0,) * len(after.num_accepted_by_position)
    by_position = ", ".join(
        f"{(new - old) / num_drafts:.3f}"
        for old, new in zip(earlier, after.num_accepted_by_position, strict=True)
    )
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / num_drafts:.2f},"
        f" Accepted throughput: {accepted / seconds:.2f} tokens/s,"
        f" Drafted throughput: {drafted / seconds:.2f} tokens/s,"
        f" Accepted: {accepted} tokens, Drafted: {drafted} tokens,"
        f" Per-position acceptance rate: {by_position},"
        f" Avg Draft acceptance rate: {accepted / max(1, drafted):.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
