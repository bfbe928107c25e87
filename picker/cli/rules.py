"""The table of flags that exclude each other."""

import argparse
from collections.abc import Callable
from typing import Final

from base.response_bodies import ResponseBodies
from picker.admin.loopback import is_loopback
from picker.cli.pools import PLACE
from picker.cli.readers import DIALECT
from picker.errors import ConfigError
from picker.rpc.options import UNIX_SCHEME


def is_secure(flags: argparse.Namespace) -> bool:
    if flags.secure_serving is not None:
        return bool(flags.secure_serving)
    address: str = flags.bind_address
    is_local = address.startswith(("/", UNIX_SCHEME)) or is_loopback(address)
    return flags.cert_path is not None or not is_local


def has_peers(flags: argparse.Namespace) -> bool:
    return bool(flags.peers or flags.peer_service or flags.peer_slices)


def first_pool(flags: argparse.Namespace) -> str | None:
    """Return the first pool of `--pool`, which gives the picker's Lease its name."""
    return next((one.name for one in flags.pool if one.endpoints_file is None), None)


def follows_cluster(flags: argparse.Namespace) -> bool:
    named = flags.endpoint_selector or flags.pool_name or first_pool(flags)
    return flags.endpoints_file is None and bool(named)


_CLUSTER: Final = (
    "give --pool-name, --pool or --endpoint-selector without --endpoints-file, or remove {flag}"
)
# Flags, the condition under which none of them may be given, and the reason with the fix.
RULES: Final[tuple[tuple[str, Callable[[argparse.Namespace], object], str], ...]] = (
    (
        "--enable-cert-reload",
        lambda flags: flags.cert_path is None,
        "{flag} needs --cert-path, the folder to follow",
    ),
    (
        "--tls-min-version --tls-cipher-suites --enable-cert-reload",
        lambda flags: not is_secure(flags),
        "flags about TLS have no effect without --secure-serving",
    ),
    (
        "--metrics-client-ca-file",
        lambda flags: flags.metrics_cert_dir is None,
        "{flag} needs --metrics-cert-dir",
    ),
    (
        "--endpoint-selector --endpoint-target-ports --kubeconfig --kube-context",
        lambda flags: flags.endpoints_file,
        "endpoints come from --endpoints-file or from Kubernetes, not both: remove {flag} or "
        "--endpoints-file",
    ),
    (
        "--endpoint-selector",
        lambda flags: flags.pool_name,
        "endpoints come from --pool-name or from --endpoint-selector, not both: remove one",
    ),
    (
        "--endpoint-selector",
        lambda flags: not flags.endpoint_target_ports,
        "{flag} needs --endpoint-target-ports, e.g. 8000",
    ),
    (
        "--endpoint-target-ports",
        lambda flags: not flags.endpoint_selector,
        "{flag} needs --endpoint-selector; the ports of an InferencePool are its targetPorts",
    ),
    (
        "--kubeconfig --kube-context",
        lambda flags: not follows_cluster(flags),
        "{flag} needs --pool-name, --pool or --endpoint-selector",
    ),
    (
        "--pool-name --endpoints-file --endpoint-selector --xds-cluster-name",
        lambda flags: flags.pool,
        "{flag} is for a picker of one pool; --pool has all settings of a pool",
    ),
    (
        "--token-limits",
        lambda flags: flags.response_bodies is ResponseBodies.OFF,
        "{flag} needs the usage of responses: give --response-bodies usage, or all where the "
        "gateway sends bodies",
    ),
    (
        "--route-by-model",
        lambda flags: not flags.pool,
        "{flag} chooses between several pools: give each by a --pool",
    ),
    (
        "--model-header-only",
        lambda flags: not flags.route_by_model,
        "{flag} is a way of --route-by-model: give both",
    ),
    (
        "--record",
        lambda flags: flags.pool and PLACE not in flags.record.name,
        f"{{flag}} with --pool needs {{{PLACE}}} in the file's name, e.g. "
        f"decisions-{{{PLACE}}}.jsonl: each pool has a recording of its own",
    ),
    (
        "--record",
        lambda flags: has_peers(flags) and flags.hash_seed_file is None,
        "{flag} with peers needs --hash-seed-file: a recording names the seed of its hashes, "
        "which peers would change",
    ),
    (
        "--peer-bind-address --peer-cert-path --peer-server-name --peer-insecure",
        lambda flags: not has_peers(flags),
        "{flag} has no effect without --peers, --peer-service or --peer-slices",
    ),
    (
        "--peer-slices",
        lambda flags: flags.peers or flags.peer_service,
        "{flag} names all replicas; give it without other peers",
    ),
    (
        "--metrics-endpoint-auth",
        lambda flags: not follows_cluster(flags),
        f"{{flag}} needs a cluster, which can check tokens: {_CLUSTER}",
    ),
    (
        "--ha-enable-leader-election",
        lambda flags: not follows_cluster(flags),
        f"{{flag}} needs a cluster, which stores the Lease: {_CLUSTER}",
    ),
    (
        "--leader-election-lease-duration --leader-election-renew-deadline "
        "--leader-election-retry-period",
        lambda flags: not flags.ha_enable_leader_election,
        "{flag} has no effect without --ha-enable-leader-election",
    ),
)


def check(flags: argparse.Namespace) -> None:
    """Raise `ConfigError` for the first broken rule. An empty or false flag counts as absent."""
    for names, is_broken, why in RULES:
        for name in names.split():
            dest = name.removeprefix("--").replace("-", "_")
            value = getattr(flags, DIALECT.fields.get(name, dest))
            is_given = value is not False and value not in (None, "", (), [])
            if is_given and is_broken(flags):
                raise ConfigError(why.format(flag=name))
