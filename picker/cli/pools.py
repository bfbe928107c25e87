"""The flag `--pool`, with which one picker serves several pools, and the options of each pool."""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from picker.cli.options import (
    DEFAULT_NAMESPACE,
    POOL_GROUPS,
    KubernetesFlags,
    Options,
    PeerFlags,
    PoolFlags,
)
from picker.errors import ConfigError
from picker.rpc.options import UNIX_SCHEME

PLACE: Final = "{pool}"  # in the path of a recording
MAX_POOLS: Final = 64  # each has tasks of its own
DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_KEYS: Final = ("name", "namespace", "group", "grpc-port", "endpoints-file", "config-file")
_SHORT = re.compile(r"(?:(?P<namespace>[^/:]*)/)?(?P<name>[^/:]*)(?::(?P<port>[^/:]*))?")
FORMS: Final = "[NAMESPACE/]NAME[:PORT], or name=NAME and more of " + ", ".join(_KEYS[1:])


@dataclass(frozen=True, slots=True)
class OnePool:
    """One of the pools with its options. `key` is its name in metrics and URLs."""

    key: str
    names: tuple[str, ...]  # that proxies may use for it
    options: Options


def pools_of(
    arguments: argparse.Namespace, cluster: KubernetesFlags | None
) -> tuple[PoolFlags, ...]:
    """Return the pools that the flags name; none for a picker of one pool. Raises `ConfigError`."""
    asked: Sequence[PoolFlags] = arguments.pool
    if not asked:
        return ()
    namespace = arguments.pool_namespace or DEFAULT_NAMESPACE
    if cluster is not None:
        namespace = cluster.pool_namespace
    pools = tuple(
        replace(one, namespace=one.namespace or namespace, group=one.group or arguments.pool_group)
        for one in asked
    )
    if len(pools) > MAX_POOLS:
        raise ConfigError(f"--pool: {len(pools)} pools; {MAX_POOLS} at most for one picker")
    for (namespace, name), count in Counter((one.namespace, one.name) for one in pools).items():
        if count > 1:
            text = f"--pool names {namespace}/{name} {count} times; each pool is served once"
            raise ConfigError(text)
    _refuse_shared_ports(pools, arguments)
    return pools


def split(options: Options) -> tuple[OnePool, ...]:
    """Return the options of each pool; without `options.pools` there is one, with an empty key."""
    if not options.pools:
        return (OnePool("", (options.pool_name,), options),)
    same = Counter(one.name for one in options.pools)
    found = [_one_of(options, one, same[one.name] == 1) for one in options.pools]
    keys = tuple(one.key for one in found)
    return tuple(replace(one, options=replace(one.options, pool_keys=keys)) for one in found)


def _one_of(options: Options, pool: PoolFlags, is_alone: bool) -> OnePool:
    qualified = f"{pool.namespace}/{pool.name}"
    key = pool.name if is_alone else qualified
    cluster = options.kubernetes
    if cluster is not None:  # also for a pool of a file, whose replicas may be in the cluster
        cluster = replace(
            cluster, pool_name=pool.name, pool_namespace=pool.namespace, pool_group=pool.group
        )
    record = options.record
    if record is not None:
        name = record.path.name.replace(PLACE, key.replace("/", "_"))
        record = replace(record, path=record.path.with_name(name))
    own = replace(
        options,
        pools=(),
        pool_name=pool.name,
        pool_key=key,
        kubernetes=cluster,
        endpoints_file=pool.endpoints_file,
        config_file=pool.config_file or options.config_file,
        # A file and a text exclude each other, and the pool's own file precedes.
        config_text=None if pool.config_file is not None else options.config_text,
        record=record,
        xds=None if options.xds is None else replace(options.xds, cluster_name=key),
        peers=_peers_of(options, qualified),
    )
    return OnePool(key, (key, qualified) if is_alone else (qualified,), own)


def _peers_of(options: Options, pool: str) -> PeerFlags | None:
    """Return the replicas, the same for all pools; `pool` does not depend on other pools."""
    peers, cluster = options.peers, options.kubernetes
    if peers is None:
        return None
    return replace(peers, pool=pool, namespace="" if cluster is None else cluster.pool_namespace)


def pool_flags(text: str) -> PoolFlags:
    # No name of an object contains `=`, which therefore distinguishes the two forms.
    given = _pairs(text) if "=" in text else _short(text)
    name, namespace = given.get("name", ""), given.get("namespace", "")
    if not DNS_NAME.fullmatch(name):
        raise ConfigError(f"'{text}': '{name}' is no name of a pool; write {FORMS}")
    if namespace and not DNS_LABEL.fullmatch(namespace):
        raise ConfigError(f"'{text}': '{namespace}' is no name of a namespace")
    group = given.get("group", "")
    if group and group not in POOL_GROUPS:
        raise ConfigError(
            f"'{text}': group '{group}' has no pools; write {' or '.join(POOL_GROUPS)}"
        )
    if "endpoints-file" in given and "group" in given:
        raise ConfigError(f"'{text}': a pool is of a group or of an endpoints-file")
    return PoolFlags(
        name=name,
        namespace=namespace,
        group=group,
        grpc_port=_port(text, given["grpc-port"]) if "grpc-port" in given else None,
        endpoints_file=_path(given, "endpoints-file"),
        config_file=_path(given, "config-file"),
    )


def _pairs(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in text.split(","):
        key, sign, value = word.partition("=")
        if not sign or key not in _KEYS:
            raise ConfigError(f"'{text}': '{key}' is none of {', '.join(_KEYS)}")
        if key in given:
            raise ConfigError(f"'{text}': {key} is given twice")
        if not value:
            raise ConfigError(f"'{text}': {key} has no value")
        given[key] = value
    return given


def _short(text: str) -> dict[str, str]:
    found = _SHORT.fullmatch(text)
    if found is None:
        raise ConfigError(f"'{text}' is no pool; write {FORMS}")
    parts = {"name": found["name"], "namespace": found["namespace"], "grpc-port": found["port"]}
    if "" in parts.values():
        raise ConfigError(f"'{text}' is no pool; write {FORMS}")
    return {key: value for key, value in parts.items() if value is not None}


def _port(text: str, port: str) -> int:
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"'{text}': '{port}' is no port; write 0 to 65535")
    return int(port)


def _path(given: dict[str, str], key: str) -> Path | None:
    return Path(given[key]) if key in given else None


def _refuse_shared_ports(pools: Iterable[PoolFlags], arguments: argparse.Namespace) -> None:
    others = {
        arguments.grpc_port: "--grpc-port",
        arguments.grpc_health_port: "--grpc-health-port",
        arguments.metrics_port: "--metrics-port",
    }
    if arguments.xds_port is not None:
        others[arguments.xds_port] = "--xds-port"
    if arguments.peers or arguments.peer_service or arguments.peer_slices:
        others[arguments.peer_port] = "--peer-port"
    for one in pools:
        port = one.grpc_port
        if port is not None and arguments.bind_address.startswith(("/", UNIX_SCHEME)):
            raise ConfigError(
                f"--pool {one.name}: there are no ports at --bind-address {arguments.bind_address};"
                f" remove {port}, and let the proxy name the pool"
            )
        if not port:
            continue
        if port in others:
            raise ConfigError(
                f"--pool {one.name}: port {port} is also that of {others[port]}; each needs its own"
            )
        others[port] = f"--pool {one.name}"
