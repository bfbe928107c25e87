"""`pointsman doctor`: say what is wrong with an installation, and how to put it right."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.doctor.cluster_facts import ClusterFacts
from fleet.doctor.cluster_look import ClusterLook
from fleet.doctor.envoy_look import ask_envoy, read_envoy_file
from fleet.doctor.facts import EnvoyFacts, Facts, PickerFacts
from fleet.doctor.findings import Severity
from fleet.doctor.picker_look import ask_certificate, ask_picker, ask_workers
from fleet.doctor.registry import CHECKS, diagnose
from fleet.doctor.report import as_json, text_lines
from fleet.running_picker import picker_url, running_fleets
from picker.app.cluster import ClusterAccess
from picker.cli.options import KubernetesFlags
from picker.errors import ConfigError

FINE, WARNED, WRONG = 0, 1, 2
_OF_A_CLUSTER = ("kubeconfig", "kube_context", "user")

Print = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to look at, and what to look for: `only` checks of these names, empty: all of them."""

    picker: str | None
    envoy_configs: tuple[Path, ...]
    envoy_admins: tuple[str, ...]
    certificates: tuple[str, ...]
    workers: bool
    pool: str | None
    namespace: str
    kubeconfig: Path | None
    context: str
    user: str | None
    as_json: bool
    only: tuple[str, ...]


def doctor_command(argv: Sequence[str], environment: Mapping[str, str], out: Print) -> int:
    """Run it; returns the exit status: 0 nothing wrong, 1 warnings only, 2 errors, which is also
    that of a command line that cannot be understood (`SystemExit`).
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.pool is None and any(getattr(arguments, name) for name in _OF_A_CLUSTER):
        parser.error("--kubeconfig, --kube-context and --as need --pool NAME")
    if arguments.list:
        for check in CHECKS:
            out(f"{check.name:<28}{check.about}")
        return FINE
    options = _options(arguments, environment)
    facts = asyncio.run(gather(options))
    found = diagnose(facts, options.only)
    looked_at = _looked_at(facts)
    if options.as_json:
        out(as_json(found, looked_at))
    else:
        for line in text_lines(found, looked_at, shutil.get_terminal_size((100, 24)).columns):
            out(line)
    if any(one.finding.severity is Severity.ERROR for one in found):
        return WRONG
    return WARNED if found else FINE


def build_parser() -> argparse.ArgumentParser:
    """The flags of `pointsman doctor`."""
    parser = argparse.ArgumentParser(
        prog="pointsman doctor",
        description="Look at a picker, Envoys, workers and a cluster, and say what is wrong and "
        "how to put it right. Without a flag that names something: the fleet that runs here. "
        "Exit status: 0 nothing wrong, 1 warnings, 2 errors.",
        allow_abbrev=False,
    )
    parser.add_argument("--picker", metavar="URL", help="the picker's HTTP port")
    parser.add_argument(
        "--envoy-config",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a bootstrap, or what /config_dump answered",
    )
    parser.add_argument(
        "--envoy-admin",
        metavar="URL",
        action="append",
        default=[],
        help="a running Envoy's admin port: http://HOST:PORT or unix:///PATH",
    )
    parser.add_argument(
        "--certificate",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="a port that speaks TLS, the picker's for instance",
    )
    text = "ask the picker's endpoints, too (those on this machine are asked anyway)"
    parser.add_argument("--workers", action="store_true", help=text)
    parser.add_argument("--pool", metavar="NAME", help="InferencePool of a cluster")
    parser.add_argument("--namespace", metavar="NAME", default="default", help="of the pool")
    parser.add_argument("--kubeconfig", metavar="FILE", type=Path, help="how it is reached")
    parser.add_argument("--kube-context", metavar="NAME", default="", help="of that file")
    text = "whose rights are asked for (default: the picker's Pods', else yours)"
    parser.add_argument("--as", dest="user", metavar="USER", help=text)
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument(
        "--only",
        metavar="CHECK",
        action="append",
        default=[],
        choices=[one.name for one in CHECKS],
        help="run this check alone (several times: these); see --list",
    )
    parser.add_argument("--list", action="store_true", help="name all checks and end")
    return parser


def _options(given: argparse.Namespace, environment: Mapping[str, str]) -> Options:
    named = given.picker, given.envoy_config, given.envoy_admin, given.certificate, given.pool
    options = Options(
        picker=None if given.picker is None else picker_url(given.picker, environment),
        envoy_configs=tuple(given.envoy_config),
        envoy_admins=tuple(given.envoy_admin),
        certificates=tuple(given.certificate),
        workers=given.workers,
        pool=given.pool,
        namespace=given.namespace,
        kubeconfig=given.kubeconfig,
        context=given.kube_context,
        user=given.user,
        as_json=given.json,
        only=tuple(given.only),
    )
    return options if any(named) else _fleet_here(options, environment)


def _fleet_here(options: Options, environment: Mapping[str, str]) -> Options:
    """The fleet that was started last, with its Envoys; without one, a picker at its default."""
    running = running_fleets(environment)
    control = running[0].control if running else None
    sockets = [] if control is None else sorted(Path(control).parent.glob("envoy*.sock"))
    admins = tuple(f"unix://{one}" for one in sockets)
    return replace(options, picker=picker_url(None, environment), envoy_admins=admins)


async def gather(options: Options) -> Facts:
    """Look at all of it, at the same time."""
    async with asyncio.TaskGroup() as group:
        picker = group.create_task(_picker(options), name="picker")
        envoys = [group.create_task(ask_envoy(one), name=one) for one in options.envoy_admins]
        ports = [group.create_task(ask_certificate(one), name=one) for one in _tls_ports(options)]
        cluster = group.create_task(_cluster(options), name="cluster")
    found = picker.result()
    named = tuple(map(read_envoy_file, options.envoy_configs))
    return Facts(
        picker=found,
        envoys=(*named, *_living([one.result() for one in envoys], options)),
        workers=await ask_workers(_asked(found, options)) if found is not None else (),
        certificates=tuple(one.result() for one in ports),
        cluster=cluster.result(),
    )


async def _picker(options: Options) -> PickerFacts | None:
    return None if options.picker is None else await ask_picker(options.picker)


def _living(envoys: list[EnvoyFacts], options: Options) -> list[EnvoyFacts]:
    """Of a fleet's own Envoys those that answer: the socket of one that was replaced may still be
    there. One that was named, or the only one, is told of all the same.
    """
    answering = [one for one in envoys if one.problem is None]
    by_itself = all(one.startswith("unix://") for one in options.envoy_admins)
    return answering if answering and by_itself else envoys


def _asked(picker: PickerFacts, options: Options) -> PickerFacts:
    """With the endpoints whose addresses mean the same here as where the picker runs."""
    if options.workers:
        return picker
    here = tuple(one for one in picker.endpoints if _is_loopback(one.address))
    return replace(picker, endpoints=here)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls_ports(options: Options) -> tuple[str, ...]:
    own = options.picker
    return (*options.certificates, own) if own and own.startswith("https") else options.certificates


async def _cluster(options: Options) -> ClusterFacts | None:
    if options.pool is None:
        return None
    flags = KubernetesFlags(
        pool_name=options.pool,
        pool_namespace=options.namespace,
        kubeconfig=options.kubeconfig,
        context=options.context,
    )
    access = ClusterAccess(flags)
    try:
        await asyncio.to_thread(access.load)
    except ConfigError as error:
        return ClusterFacts(options.namespace, options.pool, problem=str(error))
    async with access.open() as api:
        look = ClusterLook(api, options.namespace, options.pool, options.user, time.time)
        return await look.look()


def _looked_at(facts: Facts) -> list[str]:
    found = [] if facts.picker is None else [f"picker {facts.picker.url}"]
    found += [f"Envoy {one.source}" for one in facts.envoys]
    if facts.workers:
        found.append(f"{len(facts.workers)} workers")
    found += [f"TLS at {one.address}" for one in facts.certificates]
    if facts.cluster is not None:
        found.append(f"pool {facts.cluster.namespace}/{facts.cluster.pool_name}")
    return found
