"""Flags that say which pool of a cluster to follow, and how the cluster is reached."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from picker.errors import ConfigError
from picker.framework.label_selector import LabelSelector
from picker.k8s.api import LEGACY_POOLS, POOLS
from picker.k8s.objects import MAX_TARGET_PORTS

DEFAULT_NAMESPACE: Final = "default"
DEFAULT_POOL_NAME: Final = "default"
POOL_GROUPS: Final = (POOLS.group, LEGACY_POOLS.group)
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_DEPLOYMENT = re.compile(r"(.+)-[a-z0-9]+-[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class KubernetesFlags:
    """Which pool of which cluster.

    Either the InferencePool `pool_name` of `pool_group` is followed, or the Pods that
    `endpoint_selector` takes serve at `endpoint_target_ports`; then `pool_name` is only what people
    know them by. `kubeconfig` None: as `KUBECONFIG` says, or as Pods reach their cluster.
    """

    pool_name: str
    pool_namespace: str = DEFAULT_NAMESPACE
    pool_group: str = POOLS.group
    endpoint_selector: str = ""
    endpoint_target_ports: tuple[int, ...] = ()
    kubeconfig: Path | None = None
    context: str = ""


def add_kubernetes_flags(group: argparse._ArgumentGroup) -> None:
    """Add them."""
    text = "InferencePool to follow; without Kubernetes the pool's name in metric labels and as "
    group.add_argument(
        "--pool-name",
        type=_pool_name,
        metavar="NAME",
        default="",
        help=f"{text}objectives name it (default: {DEFAULT_POOL_NAME})",
    )
    text = "of the pool (default: the variable NAMESPACE, the Pod's own, or default)"
    group.add_argument(
        "--pool-namespace", type=_namespace, metavar="NAMESPACE", default="", help=text
    )
    group.add_argument(
        "--pool-group",
        type=_pool_group,
        metavar="GROUP",
        default=POOLS.group,
        help=f"API group of the pool: {' or '.join(POOL_GROUPS)}",
    )
    text = "follow the Pods with these labels instead of an InferencePool, e.g. 'app in (a,b),!old'"
    group.add_argument(
        "--endpoint-selector", type=_selector, metavar="SELECTOR", default="", help=text
    )
    text = f"where these serve: 1 to {MAX_TARGET_PORTS} ports, separated by commas"
    group.add_argument(
        "--endpoint-target-ports",
        type=_ports,
        metavar="PORTS",
        default=[],
        action="extend",
        help=text,
    )
    text = "how to reach the cluster (default: the variable KUBECONFIG, or as Pods do)"
    group.add_argument("--kubeconfig", type=_path, metavar="FILE", default=None, help=text)
    text = "context of that file (default: its current one)"
    group.add_argument("--kube-context", metavar="NAME", default="", help=text)


def kubernetes_flags_of(
    arguments: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> KubernetesFlags | None:
    """What the parsed flags ask for; None: for nothing of a cluster.

    With an endpoints file only `--pool-name` may be given, which is its label then. Raises
    `ConfigError` for flags that contradict each other.
    """
    environ = os.environ if environ is None else environ
    if arguments.endpoints_file is not None:
        _refuse_beside_file(arguments)
        return None
    if arguments.endpoint_selector:
        pool_name = _selected_name(arguments, environ)
    elif arguments.endpoint_target_ports:
        raise ConfigError(
            "--endpoint-target-ports needs --endpoint-selector; the ports of an InferencePool are "
            "its targetPorts"
        )
    elif arguments.pool_name:
        pool_name = arguments.pool_name
    elif (first := _first_of_several(arguments)) is not None:
        pool_name = first
    else:
        _refuse_without_pool(arguments)
        return None
    return KubernetesFlags(
        pool_name=pool_name,
        pool_namespace=arguments.pool_namespace or _own_namespace(environ),
        pool_group=arguments.pool_group,
        endpoint_selector=arguments.endpoint_selector,
        endpoint_target_ports=tuple(dict.fromkeys(arguments.endpoint_target_ports)),
        kubeconfig=arguments.kubeconfig,
        context=arguments.kube_context,
    )


def _selected_name(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """What the selected Pods are known by: the name of the picker's own Deployment."""
    if arguments.pool_name:
        raise ConfigError(
            "endpoints come from --pool-name or from --endpoint-selector, not both: take one away"
        )
    ports = frozenset(arguments.endpoint_target_ports)
    if not ports:
        raise ConfigError("--endpoint-selector needs --endpoint-target-ports, e.g. 8000")
    if len(ports) > MAX_TARGET_PORTS:
        raise ConfigError(
            f"--endpoint-target-ports has {len(ports)} ports; {MAX_TARGET_PORTS} at most"
        )
    pod_name = environ.get("POD_NAME", "")
    if not pod_name:
        raise ConfigError(
            "--endpoint-selector needs the variable POD_NAME, the picker's own Pod (fieldRef "
            "metadata.name): the pool is called after its Deployment"
        )
    found = _DEPLOYMENT.fullmatch(pod_name)
    if found is None:
        raise ConfigError(
            f"POD_NAME is '{pod_name}', which is no Pod of a Deployment (NAME-xxxxx-yyyyy); "
            "--endpoint-selector calls the pool after the picker's Deployment"
        )
    return found[1]


def _first_of_several(arguments: argparse.Namespace) -> str | None:
    """The first pool of those that `--pool` names, after which the picker's Lease is called."""
    return next((one.name for one in arguments.pools if one.endpoints_file is None), None)


def _refuse_beside_file(arguments: argparse.Namespace) -> None:
    given = {
        "--endpoint-selector": arguments.endpoint_selector,
        "--endpoint-target-ports": arguments.endpoint_target_ports,
        "--kubeconfig": arguments.kubeconfig,
        "--kube-context": arguments.kube_context,
    }
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"endpoints come from --endpoints-file or from Kubernetes, not both: take {name} "
                "away, or --endpoints-file"
            )


def _refuse_without_pool(arguments: argparse.Namespace) -> None:
    for name, value in (
        ("--kubeconfig", arguments.kubeconfig),
        ("--kube-context", arguments.kube_context),
    ):
        if value:
            raise ConfigError(f"{name} needs --pool-name, --pool or --endpoint-selector")


def _own_namespace(environ: Mapping[str, str]) -> str:
    """Where the picker itself runs, as far as that is known."""
    named = environ.get("NAMESPACE", "")
    if named:
        return _namespace(named, "the variable NAMESPACE")
    try:
        written = (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return DEFAULT_NAMESPACE
    return written or DEFAULT_NAMESPACE


def _namespace(text: str, source: str = "") -> str:
    if text and not DNS_LABEL.fullmatch(text):
        told = f"'{text}' is no name of a namespace; write a DNS label, e.g. team-a"
        if source:
            raise ConfigError(f"{source}: {told}")
        raise argparse.ArgumentTypeError(told)
    return text


def _pool_name(text: str) -> str:
    if text and not DNS_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no name of an object; write lower case letters, digits, '-' and '.'"
        )
    return text


def _pool_group(text: str) -> str:
    if text not in ("", *POOL_GROUPS):
        raise argparse.ArgumentTypeError(f"'{text}' has no pools; write {' or '.join(POOL_GROUPS)}")
    return text or POOLS.group


def _selector(text: str) -> str:
    if text and not text.strip():
        raise argparse.ArgumentTypeError("is empty and would take every Pod of the namespace")
    try:
        LabelSelector.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from error
    return text.strip()


def _ports(text: str) -> list[int]:
    """One or more of them; the flag may stand several times."""
    ports = []
    for word in text.strip("[]").split(",") if text else ():
        word = word.strip()
        if not (word.isascii() and word.isdecimal() and 1 <= int(word) <= 65535):
            raise argparse.ArgumentTypeError(
                f"'{word}' is no port; write numbers from 1 to 65535, separated by commas"
            )
        ports.append(int(word))
    return ports


def _path(text: str) -> Path | None:
    return Path(text) if text else None
