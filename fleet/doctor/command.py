"""`pointsman doctor`: report faults of an installation, and how to repair them."""

import argparse
import asyncio
import ipaddress
import json
import shutil
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fleet.doctor import cluster_checks, envoy_checks, picker_checks
from fleet.doctor.cluster_look import ClusterFacts, ClusterLook
from fleet.doctor.diagnosis import Diagnosis, Facts, read_checks
from fleet.doctor.envoy_look import EnvoyFacts, ask_envoy, read_envoy_file
from fleet.doctor.flags import build_parser
from fleet.doctor.picker_look import PickerFacts, ask_certificate, ask_picker, ask_workers
from fleet.run.running_picker import picker_url, running_fleets
from picker.cli.options import KubernetesFlags
from picker.config.findings import Severity
from picker.errors import ConfigError

FINE, WARNED, WRONG = 0, 1, 2
_OF_A_CLUSTER = ("kubeconfig", "kube_context", "user")

Print = Callable[[str], None]


CHECKS = tuple(
    read_checks({**picker_checks.JUDGES, **envoy_checks.JUDGES, **cluster_checks.JUDGES})
)


def doctor_command(
    arguments: argparse.Namespace, environment: Mapping[str, str], out: Print
) -> int:
    """Return the exit status: 0 if nothing is wrong, 1 for warnings only, 2 for errors."""
    if arguments.pool is None and any(getattr(arguments, name) for name in _OF_A_CLUSTER):
        build_parser().error("--kubeconfig, --kube-context and --as need --pool NAME")
    if arguments.list:
        for check in CHECKS:
            out(f"{check.name:<28}{check.about}")
        return FINE
    _complete(arguments, environment)
    facts = asyncio.run(_gather(arguments))
    found = diagnose(facts, arguments.only)
    looked_at = _looked_at(facts)
    if arguments.json:
        out(as_json(found, looked_at))
    else:
        for line in text_lines(found, looked_at, shutil.get_terminal_size((100, 24)).columns):
            out(line)
    if any(one.severity is Severity.ERROR for one in found):
        return WRONG
    return WARNED if found else FINE


def diagnose(facts: Facts, only: Collection[str] = ()) -> tuple[Diagnosis, ...]:
    """Run the checks (those in `only`, or all) and return their findings without repetitions."""
    checks = [check for check in CHECKS if not only or check.name in only]
    return tuple(dict.fromkeys(one for check in checks for one in check.diagnose(facts)))


def _complete(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Without a flag, choose the fleet started last, or a picker at its default address."""
    ways = ("picker", "envoy_config", "envoy_admin", "certificate", "pool")
    if not any(getattr(options, name) for name in ways):
        running = running_fleets(environment)
        control = running[0].control if running else None
        sockets = [] if control is None else sorted(Path(control).parent.glob("envoy*.sock"))
        options.envoy_admin = [f"unix://{one}" for one in sockets]
        options.picker = picker_url(None, environment)
    elif options.picker is not None:
        options.picker = picker_url(options.picker, environment)


async def _gather(options: argparse.Namespace) -> Facts:
    ports = list(options.certificate)
    if options.picker and options.picker.startswith("https"):
        ports.append(options.picker)
    async with asyncio.TaskGroup() as group:
        picker = group.create_task(_picker(options.picker), name="picker")
        envoys = [group.create_task(ask_envoy(one), name=one) for one in options.envoy_admin]
        certificates = [group.create_task(ask_certificate(one), name=one) for one in ports]
        cluster = group.create_task(_cluster(options), name="cluster")
    found = picker.result()
    named = tuple(map(read_envoy_file, options.envoy_config))
    return Facts(
        picker=found,
        envoys=(*named, *_running([one.result() for one in envoys], options.envoy_admin)),
        workers=() if found is None else await ask_workers(_asked(found, options.workers)),
        certificates=tuple(one.result() for one in certificates),
        cluster=cluster.result(),
    )


async def _picker(url: str | None) -> PickerFacts | None:
    return None if url is None else await ask_picker(url)


def _running(envoys: list[EnvoyFacts], asked: Sequence[str]) -> list[EnvoyFacts]:
    """Leave out a fleet's Envoys that do not answer: the socket of a replaced one may remain."""
    answering = [one for one in envoys if one.problem is None]
    by_itself = all(one.startswith("unix://") for one in asked)
    return answering if answering and by_itself else envoys


def _asked(picker: PickerFacts, all_workers: bool) -> PickerFacts:
    """Select the endpoints whose addresses mean the same here as at the picker."""
    if all_workers:
        return picker
    here = tuple(one for one in picker.endpoints if _is_loopback(one.address))
    return replace(picker, endpoints=here)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _cluster(options: argparse.Namespace) -> ClusterFacts | None:
    if options.pool is None:
        return None
    flags = KubernetesFlags(
        pool_name=options.pool,
        pool_namespace=options.namespace,
        kubeconfig=options.kubeconfig,
        context=options.kube_context,
    )
    # Only this needs the picker's client of API servers, which is half of all imports.
    from picker.app.cluster import ClusterAccess  # noqa: PLC0415

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
        found.append(_counted(len(facts.workers), "worker"))
    found += [f"TLS at {one.address}" for one in facts.certificates]
    if facts.cluster is not None:
        found.append(f"pool {facts.cluster.namespace}/{facts.cluster.pool_name}")
    return found


def text_lines(found: Sequence[Diagnosis], looked_at: Sequence[str], width: int) -> Iterator[str]:
    """Render findings, worst first, in lines of at most `width` characters where words allow."""
    for severity in Severity:
        group = [one for one in found if one.severity is severity]
        if group:
            yield f"{severity.value.title()}s ({len(group)})"
            for one in group:
                yield from _entry(one, width)
            yield ""
    where = ", ".join(looked_at) or "nothing"
    if not found:
        yield f"nothing wrong ({where})"
        return
    errors = sum(one.severity is Severity.ERROR for one in found)
    yield f"{_counted(errors, 'error')}, {_counted(len(found) - errors, 'warning')} ({where})"


def _entry(one: Diagnosis, width: int) -> Iterator[str]:
    yield f"  {one.check}"
    for label, text in (("seen", one.seen), ("why", one.why), ("fix", one.fix)):
        head = f"    {label:<6}"
        # Not broken inside words or at hyphens, so that commands can be pasted.
        yield from textwrap.wrap(
            _printable(text),
            max(width, 40),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )


def as_json(found: Sequence[Diagnosis], looked_at: Sequence[str]) -> str:
    document = {
        "looked_at": list(looked_at),
        "findings": [
            {
                "check": one.check,
                "severity": one.severity.value,
                "seen": one.seen,
                "why": one.why,
                "fix": one.fix,
            }
            for one in found
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
