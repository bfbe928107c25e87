"""Flags about one replica of several that leads while the others stand by."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from picker.cli.kubernetes_flags import KubernetesFlags
from picker.config.units import duration_seconds
from picker.errors import ConfigError
from picker.k8s.elector import Timings
from picker.k8s.lease import LeaseName

MAX_NAME: Final = 253
MAX_LEASE_SECONDS: Final = 120.0
MIN_RETRY_SECONDS: Final = 0.1
_DEFAULTS: Final = Timings()
_TIMINGS: Final = ("lease-duration", "renew-deadline", "retry-period")


@dataclass(frozen=True, slots=True)
class ElectionFlags:
    """Which Lease is kept, as whom, and how fast."""

    lease: LeaseName
    identity: str
    timings: Timings = _DEFAULTS


def add_election_flags(group: argparse._ArgumentGroup) -> None:
    """Add them."""
    text = "of several replicas in Kubernetes only one is ready at a time, which holds a Lease"
    group.add_argument(
        "--ha-enable-leader-election",
        type=_truth,
        nargs="?",
        const=True,
        default=False,
        metavar="true|false",
        help=text,
    )
    texts = (
        f"a standby leads after the leader was silent for so long, in whole seconds up to "
        f"{MAX_LEASE_SECONDS:.0f}",
        "a leader that cannot renew for so long leads no more; less than the lease's",
        "between two renewals; standbys look four times as often",
    )
    for name, text in zip(_TIMINGS, texts, strict=True):
        group.add_argument(
            f"--leader-election-{name}",
            type=_duration,
            metavar="DURATION",
            default=None,
            help=f"{text} (default: {_default(name):.0f}s)",
        )


def election_flags_of(
    arguments: argparse.Namespace,
    kubernetes: KubernetesFlags | None,
    environ: Mapping[str, str] | None = None,
) -> ElectionFlags | None:
    """What the parsed flags ask for; None: every replica is ready.

    Raises `ConfigError` for flags that contradict each other.
    """
    given = {name: getattr(arguments, _attribute(name)) for name in _TIMINGS}
    if not arguments.ha_enable_leader_election:
        for name, value in given.items():
            if value is not None:
                text = "has no effect without --ha-enable-leader-election"
                raise ConfigError(f"--leader-election-{name} {text}")
        return None
    if kubernetes is None:
        raise ConfigError(
            "--ha-enable-leader-election needs a cluster, which keeps the Lease: give --pool-name, "
            "--pool or --endpoint-selector without --endpoints-file, or take it away"
        )
    lease = lease_name(kubernetes)
    if len(lease.name) > MAX_NAME:
        raise ConfigError(
            f"the lease of --ha-enable-leader-election would be called {lease.name}, which has "
            f"more than {MAX_NAME} letters: use a shorter name of the pool"
        )
    environ = os.environ if environ is None else environ
    name = environ.get("POD_NAME") or socket.gethostname()
    return ElectionFlags(lease, f"{name}_{uuid.uuid4()}", _timings(given))


def lease_name(kubernetes: KubernetesFlags) -> LeaseName:
    """As the reference picker calls it, in the pool's namespace."""
    namespace = kubernetes.pool_namespace
    return LeaseName(namespace, f"epp-{namespace}-{kubernetes.pool_name}.llm-d.ai")


def _timings(given: Mapping[str, float | None]) -> Timings:
    lease, renew, retry = (
        _default(name) if value is None else value for name, value in given.items()
    )
    if not 1 <= lease <= MAX_LEASE_SECONDS or lease != int(lease):
        raise ConfigError(
            f"--leader-election-lease-duration is {lease:g}s; a Lease holds for whole seconds, 1 "
            f"to {MAX_LEASE_SECONDS:.0f}"
        )
    if renew >= lease:
        raise ConfigError(
            f"--leader-election-renew-deadline is {renew:g}s, which is not less than the "
            f"{lease:g}s of --leader-election-lease-duration: two replicas would lead at a time"
        )
    if retry < MIN_RETRY_SECONDS or retry * 1.2 >= renew:
        raise ConfigError(
            f"--leader-election-retry-period is {retry:g}s; at least {MIN_RETRY_SECONDS:g}s, and "
            f"well below the {renew:g}s of --leader-election-renew-deadline, or none renews in time"
        )
    return Timings(lease, renew, retry)


def _default(name: str) -> float:
    values = (_DEFAULTS.lease_seconds, _DEFAULTS.renew_seconds, _DEFAULTS.retry_seconds)
    return dict(zip(_TIMINGS, values, strict=True))[name]


def _attribute(name: str) -> str:
    return "leader_election_" + name.replace("-", "_")


def _duration(text: str) -> float:
    try:
        return duration_seconds(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _truth(text: str) -> bool:
    if text.lower() in ("true", "t", "1"):
        return True
    if text.lower() in ("false", "f", "0"):
        return False
    raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
