"""Build the engine from its config: executor, features, scheduler and core."""

import importlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import cast

import msgspec

from base.shelves import load_shelf
from worker.config import (
    CacheConfig,
    EngineConfig,
    KvOffloadingConfig,
    KvTransferConfig,
    SpeculativeConfig,
)
from worker.engine.cache.cache_events import CacheEvent
from worker.engine.cache.tiers import Tiers
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.adapters import Adapters, AdapterSlots
from worker.engine.features.remote_kv import RemoteKv
from worker.engine.features.speculation import JUMP_FORWARD, Speculation
from worker.engine.features.tiered_cache import TieredCache
from worker.engine.lengths.costs import StepCosts
from worker.engine.messages import EngineReady
from worker.engine.pipeline import Pipeline
from worker.engine.process.kv_events import publishes
from worker.engine.scheduling.scheduler import Scheduler
from worker.errors import ConfigError
from worker.executor.interface import Executor, KvMemory
from worker.executor.profiling import ProfiledCache, profile
from worker.kv.access import read_key
from worker.kv.channel import listening
from worker.kv.content import KvShape, model_digest
from worker.kv.disk import BlockFiles, check_directory
from worker.kv.tcp import TcpConnector

logger = logging.getLogger(__name__)

GIB = 1 << 30


def build_core(
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    make_pipeline: Callable[[Executor], Pipeline] | None = None,
) -> tuple[EngineCore, EngineReady]:
    """Load the model or the simulator and size the cache. `EngineReady` has no start-up time yet.
    `make_pipeline` replaces the usual pipeline. Raises WorkerError with a message for the user.
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
    slots = None
    if config.lora is not None:
        lora = config.lora
        slots = AdapterSlots(lora.max_loras, lora.max_cpu_loras, executor.read_adapter)
    adapters = None if slots is None else Adapters(slots)
    tiers = None
    if config.kv_offloading is not None:
        make = partial(_build_tiers, config, config.kv_offloading, cast(KvMemory, executor))
        tiers = TieredCache(make)
    remote, kv_port = None, None
    if config.kv_transfer is not None:
        remote, kv_port = _build_remote(config, config.kv_transfer, cast(KvMemory, executor), slots)
    features = (adapters, remote, tiers, speculation)
    scheduler = Scheduler(cache, config.scheduler, config.eos_token_ids, features)
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
    """Check what would fail only after the model has been loaded. Raises `ConfigError`."""
    if config.kv_transfer is not None:
        read_key(config.kv_transfer, os.environ)
        listening(config.kv_transfer).close()
    if config.kv_offloading is not None and config.kv_offloading.kv_offloading_path is not None:
        check_directory(Path(config.kv_offloading.kv_offloading_path))


def _build_executor(config: EngineConfig) -> tuple[Executor, int]:
    if config.engine == "sim":
        shelf = load_shelf("worker.sim.runner")
        if shelf is None:
            raise ConfigError("--engine sim needs worker.sim, which is not installed")
        return cast("tuple[Executor, int]", shelf.build_sim_executor(config))
    if config.engine == "torch":
        if config.speculative is not None:
            # Steps with drafts have many more numbers of rows than plain ones, and compiling a
            # product anew costs milliseconds. Before torch loads; some 200 MB instead of 50.
            for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
                os.environ.setdefault(name, "256")
        # Imported here and by name, so that the simulator never loads torch.
        start = importlib.import_module("worker.executor.start")
        return cast("tuple[Executor, int]", start.build_executor(config))
    raise ConfigError(f"unknown engine {config.engine!r}; known are 'torch' and 'sim'")


def _build_speculation(
    config: EngineConfig, speculative: SpeculativeConfig, executor: Executor, num_blocks: int
) -> Speculation:
    drafter = build_drafter(speculative)
    profiled = None
    if config.engine == "torch" and speculative.enable_adaptive_verification:
        cache = ProfiledCache(num_blocks, config.block_size, config.scheduler.max_model_len)
        most = (config.scheduler.max_num_seqs, speculative.num_speculative_tokens)
        profiled = profile(executor, cache, most, time.monotonic, drafter is None)
    costs = None if profiled is None else StepCosts(profiled)
    return Speculation(speculative, drafter, drafter is None, config.vocab_size, costs)


def _build_remote(
    config: EngineConfig,
    transfer: KvTransferConfig,
    executor: KvMemory,
    adapters: AdapterSlots | None,
) -> tuple[RemoteKv, int]:
    shape = _kv_shape(config, executor)
    token_bytes = executor.read_kv((0,), 1).nbytes
    key = read_key(transfer, os.environ)
    # The simulator takes the time that a transfer would take.
    pace: Callable[[int], float] | None = getattr(executor, "transfer_seconds", None)
    nixl = None
    if transfer.kv_connector == "NixlConnector":
        # By name: it takes numpy, which a simulator never loads.
        nixl = importlib.import_module("worker.kv.nixl").NixlTransport.load(transfer)
    open_pool = getattr(executor, "kv_pool", None)  # of one GPU
    pool = None if open_pool is None else open_pool(transfer)
    connector = TcpConnector(transfer, key, shape, token_bytes, pace, nixl, pool)
    logger.info("KV transfers: engine %s on port %d", connector.engine_id, connector.port)
    remote = RemoteKv(connector, executor.read_kv, config.block_size, adapters, pool)
    return remote, connector.port


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
