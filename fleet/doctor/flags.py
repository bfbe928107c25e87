"""The command line of `pointsman doctor`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from base.flags import Dialect, Parser, add_flags
from fleet.doctor.table import CHECK_NAMES

_FLAGS: Final = """
--picker URL                  the picker's HTTP port
--envoy-config FILE           a bootstrap, or the answer of /config_dump
--envoy-admin URL             a running Envoy's admin port: http://HOST:PORT or unix:///PATH
--certificate HOST:PORT       a port with TLS, such as the picker's
--workers                     check all of the picker's endpoints, not only those on this machine
--pool NAME                   InferencePool of a cluster
--namespace NAME = default    namespace of the pool
--kubeconfig FILE             access to the cluster
--kube-context NAME           context of that file
--as USER                     account whose permissions are checked (default: the picker's Pods',
                              else yours)
--json                        findings as JSON
--only CHECK                  run this check alone; may be given several times (see --list)
--list                        list all checks
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman doctor",
        description="Check a picker, Envoys, workers and a cluster; report what is wrong and "
        "how to repair it. Without a flag that names something: the fleet that runs here. "
        "Exit status: 0 nothing wrong, 1 warnings, 2 errors.",
    )
    repeated: Mapping[str, object] = {"action": "append", "default": []}
    names = ("--envoy-config", "--envoy-admin", "--certificate", "--only")
    dialect = Dialect(
        readers={"FILE": Path, "URL": str, "CHECK": CHECK_NAMES},
        defaults={"kube_context": ""},
        fields={"--as": "user"},
        settings={**dict.fromkeys(names, repeated), "--only": {**repeated, "metavar": "CHECK"}},
    )
    add_flags(parser, _FLAGS, dialect)
    return parser
