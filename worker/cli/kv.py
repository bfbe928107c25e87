"""The flags about KV that is published, moved between workers, or offloaded from the device."""

import argparse
import ipaddress
import uuid
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from worker.cli.objects import Kind, checked, converted, decoded, integer, word
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

_EVENTS = "--kv-events-config"
_TRANSFER = "--kv-transfer-config"
_AMOUNT: Kind = (Annotated[float, Meta(gt=0, lt=1e15)], "above 0")  # bytes or seconds
_TRANSFER_FIELDS: Mapping[str, Kind] = {
    "kv_connector": word(KV_CONNECTORS),
    "kv_role": word(KV_ROLES),
    "engine_id": (Annotated[str, Meta(min_length=1, max_length=512)], "1 to 512 characters"),
    "kv_port": integer(0, 65535),
    "kv_peer_port": (integer(1, 65535)[0] | None, "an integer in [1, 65535]"),
    "backends": (Annotated[tuple[str, ...], Meta(min_length=1)], "NIXL's, such as UCX"),
    **dict.fromkeys(("kv_buffer_size", "kv_lease_duration", "kv_transfer_timeout"), _AMOUNT),
}
# ZMQ's own limits are C integers, and one of them is `buffer_steps` + 1.
_MAX_BATCHES = (1 << 31) - 2
_EVENT_FIELDS: Mapping[str, Kind] = {
    "publisher": (Literal["zmq", "null"] | None, "zmq or null"),
    "format": word(("map", "array")),
    "buffer_steps": integer(0, _MAX_BATCHES),
    "hwm": integer(0, _MAX_BATCHES),
    "max_queue_size": integer(1, _MAX_BATCHES),
}
# A flag --kv-offloading-…, the other one that it needs, and why.
_OFFLOADING_NEEDS = (
    ("path", "size", "blocks go there from host memory"),
    ("disk_size", "path", "it limits the blocks there"),
    ("policy", "size", "it chooses the blocks to discard there"),
)


def kv_transfer_config(options: argparse.Namespace) -> KvTransferConfig | None:
    """Decode `--kv-transfer-config`. Raises `ConfigError`."""
    if options.kv_transfer_config is None:
        if options.pd_proxy:
            raise ConfigError(f"--pd-proxy needs {_TRANSFER} with kv_role kv_consumer or kv_both")
        return None
    given = decoded(_TRANSFER, options.kv_transfer_config)
    extra = given.pop("kv_connector_extra_config", None) or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"{_TRANSFER}: kv_connector_extra_config must be an object")
    given = {"engine_id": str(uuid.uuid4()), **given, **extra}
    config = converted(_TRANSFER, given, KvTransferConfig)
    _check_transfers(config)
    if options.pd_proxy and not config.takes:
        raise ConfigError(f"--pd-proxy needs kv_role kv_consumer or kv_both, not {config.kv_role}")
    return config


def kv_offloading_config(
    options: argparse.Namespace, engine: EngineConfig
) -> KvOffloadingConfig | None:
    """Read the flags `--kv-offloading-…`. Raises `ConfigError`."""
    flag = "--kv-offloading-size"
    for name, needed, reason in _OFFLOADING_NEEDS:
        values = [getattr(options, f"kv_offloading_{one}") for one in (name, needed)]
        if values[0] is not None and values[1] is None:
            part = f"--kv-offloading-{name.replace('_', '-')}"
            raise ConfigError(f"{part} needs --kv-offloading-{needed}: {reason}")
    if options.kv_offloading_size is None:
        return None
    if engine.engine == "sim":
        raise ConfigError(f"{flag}: --engine sim has no KV to offload: leave one of them out")
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
    for name, kind in _TRANSFER_FIELDS.items():
        checked(_TRANSFER, name, getattr(config, name), kind)
    if not _is_reachable(config.kv_ip):
        wrong = f"kv_ip must be the IP address that others reach, got {config.kv_ip!r}"
        raise ConfigError(f"{_TRANSFER}: {wrong}")
    try:
        for network in config.kv_peer_networks or ():
            ipaddress.ip_network(network)
    except ValueError as error:
        raise ConfigError(f"{_TRANSFER}: kv_peer_networks: {error}") from error


def _is_reachable(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def kv_events_config(
    options: argparse.Namespace, model_name: str, environment: Mapping[str, str]
) -> KvEventsConfig:
    """Decode `--kv-events-config`. If it has no topic but the environment has `POD_IP`, the topic
    is the one to which endpoint pickers subscribe. Raises `ConfigError`.
    """
    text: str | None = options.kv_events_config
    given = {} if text is None else decoded(_EVENTS, text)
    if "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES" in environment:
        as_int = environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] not in ("0", "")
        given.setdefault("int_block_hashes", as_int)
    pod = environment.get("POD_IP")
    if pod:
        given.setdefault("topic", f"kv@{pod}:{options.port}@{model_name}")
    config = converted(_EVENTS, given, KvEventsConfig)
    for name, kind in _EVENT_FIELDS.items():
        checked(_EVENTS, name, getattr(config, name), kind)
    return config
