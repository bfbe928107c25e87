"""`python -m conformance.k8s`: pickers that follow an InferencePool, through a Kubernetes API.

Without KUBECONFIG the API server of this repository's tests is started; with it objects are made
in a namespace of their own on that server, and removed after. Exit status: 0 when no MUST is
broken, 1 when one is, 2 when the suite cannot run.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conformance.case import Provision
from conformance.command_line import (
    CannotRun,
    add_choices,
    conclude,
    implementation_of,
    provisions_of,
    say,
    show_cases,
    words_of,
)
from conformance.epp.cases.sources import SPEC_VERSION
from conformance.k8s.cases import ALL
from conformance.k8s.plans import SEVERAL
from conformance.k8s.suite import Asked, run
from conformance.report import row
from conformance.running import chosen

OWN_COMMAND = (
    "{python} -m picker --bind-address 127.0.0.1 --secure-serving --grpc-port {grpc_port}"
    " --grpc-health-port {health_port} --metrics-port {metrics_port} --pool-name {pool_name}"
    " --pool-namespace {namespace} --kubeconfig {kubeconfig} --config-file {config_file}"
    " --endpoint-ejection-failures 0 --drain-timeout 20s --allow-experimental-plugins"
)
OWN_SEVERAL_COMMAND = OWN_COMMAND.replace(
    "--pool-name {pool_name}",
    "--pool {pool_1}:{port_1} --pool {pool_2}:{port_2} --pool {pool_3}:{port_3}",
)
_COMMON_PLACES = (
    "python",
    "grpc_port",
    "health_port",
    "metrics_port",
    "namespace",
    "kubeconfig",
    "config_file",
)
PLACES = (*_COMMON_PLACES, "pool_name")
SEVERAL_PLACES = (
    *_COMMON_PLACES,
    *(f"{what}_{at}" for at in range(1, len(SEVERAL) + 1) for what in ("pool", "port")),
)
_OWN_PROVISIONS = "selection-header,served-header,fallback-list,tls"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; gives the exit status."""
    arguments = parser().parse_args(argv)
    cases = chosen(ALL, arguments.only)
    if arguments.list or not cases:
        return show_cases(cases, arguments.only)
    try:
        asked = asked_of(arguments)
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            report = asyncio.run(run(cases, asked, Path(folder), lambda one: say(row(one, 52))))
    except CannotRun as error:
        say(f"cannot run: {error}")
        return 2
    return conclude(report, arguments.report)


def parser() -> argparse.ArgumentParser:
    """The parser of the suite's flags."""
    made = argparse.ArgumentParser(
        prog="python -m conformance.k8s",
        description="Black-box cases for pickers that follow an InferencePool "
        f"(Endpoint Picker Protocol {SPEC_VERSION}).",
        allow_abbrev=False,
    )
    places = " ".join("{" + place + "}" for place in PLACES[1:])
    text = f"start pickers so, one for each pool; {places} are filled in, and the variables "
    text += "KUBECONFIG and NAMESPACE set (default: the picker of this repository)"
    made.add_argument("--command", metavar="LINE", help=text)
    text = f"start one picker for {len(SEVERAL)} pools so, which serves each at a port of its own; "
    text += " ".join("{" + place + "}" for place in SEVERAL_PLACES[1:])
    text += " are filled in (default: the picker of this repository, or with --command none)"
    made.add_argument("--several-pools-command", metavar="LINE", help=text)
    text = "the API server to use (default: the variable KUBECONFIG, or that of the tests)"
    made.add_argument("--kubeconfig", type=Path, metavar="FILE", help=text)
    add_choices(made)
    return made


def asked_of(arguments: argparse.Namespace) -> Asked:
    """Convert the arguments. Raises `CannotRun` for arguments that do not go together."""
    is_own = arguments.command is None
    provided = arguments.provides
    if provided is None:
        provided = _OWN_PROVISIONS if is_own else Provision.SELECTION.value
    several = arguments.several_pools_command or (OWN_SEVERAL_COMMAND if is_own else None)
    return Asked(
        command=words_of(OWN_COMMAND if is_own else arguments.command, PLACES),
        several_command=None
        if several is None
        else words_of(several, SEVERAL_PLACES, "--several-pools-command"),
        provides=provisions_of(provided),
        config=arguments.config_file,
        implementation=implementation_of(arguments, is_own),
        kubeconfig=arguments.kubeconfig or _from_environment(),
        patience_seconds=arguments.patience,
    )


def _from_environment() -> Path | None:
    first = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    return Path(first) if first else None


if __name__ == "__main__":
    sys.exit(main())
