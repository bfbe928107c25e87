"""The flags about KV that is told of, moved, or kept below the device; strictly decoded."""

from __future__ import annotations

import argparse
import ipaddress
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from worker.config import (
    KV_CONNECTORS,
    KV_ROLES,
    EngineConfig,
    KvEventsConfig,
    KvOffloadingConfig,
    KvTransferConfig,
)
from worker.engine.cache.block_hash import RANDOM_SEED
from worker.errors import ConfigError

_MOST_OF_A_TRANSFER = 1e15  # bytes or seconds
_MOST_BATCHES = (1 << 31) - 1
# Of the flags --kv-offloading-…: which means nothing without which other, and why.
_OFFLOADING_NEEDS = (
    ("path", "size", "blocks go there from host memory"),
    ("disk_size", "path", "it says how much may be there"),
    ("policy", "size", "it says what gives way there"),
)


def kv_transfer_config(
    options: argparse.Namespace, engine: EngineConfig
) -> KvTransferConfig | None:
    """`--kv-transfer-config`, strictly decoded, with an engine id. Raises `ConfigError`, also where
    KV cannot move.
    """
    flag = "--kv-transfer-config"
    if options.kv_transfer_config is None:
        if options.pd_proxy:
            raise ConfigError(f"--pd-proxy needs {flag} with kv_role kv_consumer or kv_both")
        return None
    try:
        given = msgspec.json.decode(options.kv_transfer_config, type=dict[str, Any])
        extra = given.pop("kv_connector_extra_config", None) or {}
        given = {"engine_id": str(uuid.uuid4()), **given, **extra}
        known = KvTransferConfig.__dataclass_fields__
        for name in given:
            if name not in known:
                raise ConfigError(f"{flag}: unknown {name!r}; known are {', '.join(known)}")
        config = msgspec.convert(given, KvTransferConfig)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(f"{flag}: {error}") from error
    _check_transfers(config)
    _check_kv_moves(flag, engine)
    if options.pd_proxy and not config.takes:
        raise ConfigError(f"--pd-proxy needs kv_role kv_consumer or kv_both, not {config.kv_role}")
    return config


def kv_offloading_config(
    options: argparse.Namespace, engine: EngineConfig
) -> KvOffloadingConfig | None:
    """The flags of `--kv-offloading-size`. Raises `ConfigError` where they cannot hold."""
    flag = "--kv-offloading-size"
    for name, needed, reason in _OFFLOADING_NEEDS:
        values = [getattr(options, f"kv_offloading_{one}") for one in (name, needed)]
        if values[0] is not None and values[1] is None:
            part = f"--kv-offloading-{name.replace('_', '-')}"
            raise ConfigError(f"{part} needs --kv-offloading-{needed}: {reason}")
    if options.kv_offloading_size is None:
        return None
    _check_kv_moves(flag, engine)
    if engine.engine == "sim":
        raise ConfigError(f"{flag}: --engine sim has no KV to keep: leave one of them out")
    if engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"{flag}: KV of several ranks stays there: leave --tensor-parallel-size out"
        )
    if not engine.enable_prefix_caching:
        raise ConfigError(f"{flag} needs the prefix cache: leave --no-enable-prefix-caching out")
    given = {name: getattr(options, name) for name in KvOffloadingConfig.__dataclass_fields__}
    config = KvOffloadingConfig(**{n: value for n, value in given.items() if value is not None})
    if config.kv_offloading_policy == "tenant" and not engine.enable_fair_eviction:
        raise ConfigError(
            "--kv-offloading-policy tenant needs to know whose blocks are evicted: leave"
            " --no-enable-fair-eviction out"
        )
    seed = engine.prefix_caching_hash_seed
    is_random = seed == RANDOM_SEED or (
        seed is None and engine.prefix_caching_hash_algo.startswith("xxhash")
    )
    if config.kv_offloading_path == "":
        raise ConfigError("--kv-offloading-path is empty: give a directory, or leave it out")
    if config.kv_offloading_path is not None and is_random:
        raise ConfigError(
            "--kv-offloading-path: no later start knows a random hash seed: give"
            " --prefix-caching-hash-seed"
        )
    return config


def _check_transfers(config: KvTransferConfig) -> None:
    wrong = _wrong_peers(config)
    if config.kv_connector not in KV_CONNECTORS:
        wrong = f"kv_connector is {' or '.join(KV_CONNECTORS)}, not {config.kv_connector!r}"
    elif config.kv_role not in KV_ROLES:
        wrong = f"kv_role is one of {', '.join(KV_ROLES)}, not {config.kv_role!r}"
    elif not _is_reachable(config.kv_ip):
        wrong = f"kv_ip must be the IP address that others reach, got {config.kv_ip!r}"
    elif not 0 < len(config.engine_id) <= 512:
        wrong = f"engine_id must have 1 to 512 characters, got {len(config.engine_id)}"
    elif not 0 <= config.kv_port < 1 << 16:
        wrong = f"kv_port must be in [0, 65535], got {config.kv_port}"
    elif not config.backends:
        wrong = "backends must name one of NIXL's, such as UCX"
    for name in ("kv_buffer_size", "kv_lease_duration", "kv_transfer_timeout"):
        if not 0 < getattr(config, name) < _MOST_OF_A_TRANSFER:
            wrong = f"{name} must be above 0, got {getattr(config, name):g}"
    if wrong is not None:
        raise ConfigError(f"--kv-transfer-config: {wrong}")


def _wrong_peers(config: KvTransferConfig) -> str | None:
    """What is wrong with where peers are asked."""
    if config.kv_peer_port is not None and not 0 < config.kv_peer_port < 1 << 16:
        return f"kv_peer_port must be in [1, 65535], got {config.kv_peer_port}"
    try:
        for network in config.kv_peer_networks or ():
            ipaddress.ip_network(network)
    except ValueError as error:
        return f"kv_peer_networks: {error}"
    return None


def _is_reachable(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _check_kv_moves(flag: str, engine: EngineConfig) -> None:
    """Raise `ConfigError` for an engine whose KV cannot leave its device."""
    method = None if engine.speculative is None else engine.speculative.method
    obstacles = (
        (f"--kv-cache-dtype {engine.kv_cache_dtype}", engine.kv_cache_dtype.startswith("fp8")),
        (f"a drafter of method {method}", method in ("draft_model", "eagle")),
    )
    for what, is_there in obstacles:
        if is_there:
            raise ConfigError(f"{flag}: KV does not move with {what}: leave one of them out")


def kv_events_config(
    options: argparse.Namespace, model_name: str, environment: Mapping[str, str]
) -> KvEventsConfig:
    """`--kv-events-config`, strictly decoded. Without a topic but with `POD_IP` in the environment
    the topic is the one that endpoint pickers look for. Raises `ConfigError`.
    """
    given: dict[str, Any] = {}
    if options.kv_events_config is not None:
        try:
            given = msgspec.json.decode(options.kv_events_config, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config: not a JSON object: {error}") from error
    known = KvEventsConfig.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ConfigError(f"--kv-events-config: unknown {name!r}; known are {', '.join(known)}")
    if "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES" in environment:
        as_int = environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] not in ("0", "")
        given.setdefault("int_block_hashes", as_int)
    pod = environment.get("POD_IP")
    if pod:
        given.setdefault("topic", f"kv@{pod}:{options.port}@{model_name}")
    try:
        config = msgspec.convert(given, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-events-config: {error}") from error
    if config.publisher not in (None, "zmq", "null"):
        raise ConfigError(f"--kv-events-config: unknown publisher {config.publisher!r}; use zmq")
    if config.format not in ("map", "array"):
        raise ConfigError(f"--kv-events-config: format is map or array, not {config.format!r}")
    _check_sizes(config)
    return config


def _check_sizes(config: KvEventsConfig) -> None:
    # ZMQ's own limits are C integers, and one of them is `buffer_steps` + 1.
    for name, least in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
        value = getattr(config, name)
        if not least <= value < _MOST_BATCHES:
            bounds = f"[{least}, {_MOST_BATCHES - 1}]"
            raise ConfigError(f"--kv-events-config: {name} must be in {bounds}, got {value}")
