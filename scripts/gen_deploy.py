"""Write Envoy's bootstraps, and the files under deploy/ that say what another file says; with
`--check` only name those that differ, and fail when one does.

kustomize reads nothing outside its folder and Helm nothing outside its chart, so what both need is
in both: Envoy's bootstrap and the script that drains it, alerts, admission policy, definitions. The
project's addresses and version come from pyproject.toml (scripts/project.py).
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from base.response_bodies import ResponseBodies  # noqa: E402 (wherever we start)
from fleet.envoy.bootstrap import build, to_yaml  # noqa: E402 (wherever we start)
from fleet.envoy.settings import BootstrapConfig, EndpointDiscovery, Mechanism, SocketAddress  # noqa: E402
from fleet.envoy.tenants import SYSTEM_CA, AllowedTenant, RemoteKeys, Tenants, Tokens  # noqa: E402 (wherever we start)
from scripts.project import addressed  # noqa: E402

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "pointsman"
STANDALONE = DEPLOY / "k8s" / "components" / "standalone"
ADDONS = DEPLOY / "k8s" / "addons"
XDS_PORT = 9004
LOCAL = "127.0.0.1"
POOLS = ("llama", "qwen", "mixtral")
_HEAD = "Written by scripts/gen_deploy.py; edits are lost."
_BOOTSTRAP_HEAD = f"""{_HEAD}
Envoy in the picker's pod: all that it asks the picker goes over the loopback address."""


_STATIC = """Routing mechanism: {}. The picker listens on 9002 (health on 9003), two workers on
8000 and 8001, all on this machine."""
_ORIGINAL_DST = """
Envoy connects to the one address that the picker names. So this mechanism can neither fail over (a
retry goes to the same worker) nor open: without a picker there is no address, and requests get a
503 whatever `failure_mode_allow` says. override-host does both."""
_DISCOVERY = """Routing mechanism: override-host, over endpoints that the picker reports
(--xds-port 9004). It listens on 9002 (health on 9003), on this machine, as Envoy does; its pool is
called `default`."""
_SEVERAL = """Three pools of one picker: requests below {} are for the pool of that name, which the
picker reads from the metadata `x-pointsman-pool`; others are for the one that has their model
(--route-by-model). The picker listens on 9002 (health on 9003) and reports the pools' endpoints
(--xds-port 9004), on this machine, as Envoy does."""


_TENANTS = """Two tenants, as `pointsman tenants FILE --bootstrap eds.yaml` writes them
(docs/tenants.md). The picker, with --token-limits and --response-bodies usage, listens on 9002
(health on 9003) and reports its endpoints (--xds-port 9004), on this machine, as Envoy does."""
_KEYS = RemoteKeys("https://login.example/keys", "login.example", 443, SYSTEM_CA)
_EXAMPLE_TENANTS = Tenants(
    (
        AllowedTenant("chat", ("replace-this-key-of-chat",), "chat", "chat", None, "600000"),
        AllowedTenant(
            "batch", ("replace-this-key-of-batch",), "batch", "batch", 60, "100000, llama=20000"
        ),
    ),
    Tokens("https://login.example", ("pointsman",), "team", _KEYS),
)


def bootstrap(response_bodies: ResponseBodies) -> str:
    """Envoy's configuration beside a picker that listens on the loopback address.

    With USAGE the picker's own flag decides: without ids from it, Envoy reports nothing.
    """
    config = BootstrapConfig(
        listen=SocketAddress("0.0.0.0", 8080),
        admin=SocketAddress("127.0.0.1", 9901),
        picker=SocketAddress("127.0.0.1", 9002),
        picker_health=SocketAddress("127.0.0.1", 9003),
        discovery=EndpointDiscovery(SocketAddress("127.0.0.1", XDS_PORT)),
        buffer_request_body=True,
        response_bodies=response_bodies,
    )
    return to_yaml(build(config), _BOOTSTRAP_HEAD)


def examples() -> dict[Path, str]:
    """Bootstraps: one for each routing mechanism, one without endpoints of its own, and one for
    several pools, and one for tenants.
    """
    config = BootstrapConfig(
        listen=SocketAddress(LOCAL, 8080),
        admin=SocketAddress(LOCAL, 9901),
        picker=SocketAddress(LOCAL, 9002),
        picker_health=SocketAddress(LOCAL, 9003),
        endpoints=(SocketAddress(LOCAL, 8000), SocketAddress(LOCAL, 8001)),
        response_bodies=ResponseBodies.USAGE,
    )
    asking = replace(
        config, endpoints=(), discovery=EndpointDiscovery(SocketAddress(LOCAL, XDS_PORT))
    )
    prefixes = ", ".join(f"/{name}/" for name in POOLS)
    made = {
        mechanism.value: (replace(config, mechanism=mechanism), _STATIC.format(mechanism.value))
        for mechanism in Mechanism
    }
    original = Mechanism.ORIGINAL_DST.value
    made[original] = made[original][0], made[original][1] + _ORIGINAL_DST
    made["eds"] = asking, _DISCOVERY
    made["tenants"] = replace(asking, tenants=_EXAMPLE_TENANTS), _TENANTS
    made["several-pools"] = (
        replace(asking, pools=POOLS, route_by_model=True),
        _SEVERAL.format(prefixes),
    )
    text = "Envoy of compose.yaml, whose services share one network."
    shared = build(replace(config, listen=SocketAddress("0.0.0.0", 8080), buffer_request_body=True))
    return {DEPLOY / "compose" / "envoy.yaml": to_yaml(shared, f"{_HEAD}\n{text}")} | {
        DEPLOY / "envoy" / f"{name}.yaml": to_yaml(build(one), f"{_HEAD}\n{text}")
        for name, (one, text) in made.items()
    }


def alerts(rules: str) -> str:
    """The alerts as an object of the Prometheus operator."""
    groups: dict[str, Any] = yaml.safe_load(rules)
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pointsman", "labels": {"app.kubernetes.io/name": "pointsman"}},
        "spec": groups,
    }
    return f"# {_HEAD}\n" + yaml.safe_dump(rule, sort_keys=False, width=100)


def wanted() -> dict[Path, str]:
    """Every file that is written, and what it says."""
    envoy, envoy_all = bootstrap(ResponseBodies.USAGE), bootstrap(ResponseBodies.ALL)
    drain = (STANDALONE / "drain.sh").read_text()
    own = addressed(ROOT)
    rules = own[DEPLOY / "prometheus" / "rules.yaml"]
    texts = {
        STANDALONE / "envoy.yaml": envoy,
        STANDALONE / "envoy-all.yaml": envoy_all,
        CHART / "envoy" / "envoy.yaml": envoy,
        CHART / "envoy" / "envoy-all.yaml": envoy_all,
        CHART / "envoy" / "drain.sh": drain,
        ADDONS / "monitoring" / "prometheusrule.yaml": alerts(rules),
        CHART / "alerts" / "rules.yaml": rules,
    }
    for name in ("policy.yaml", "binding.yaml"):
        texts[CHART / "admission" / name] = (ADDONS / "admission-policy" / name).read_text()
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        texts[CHART / "crds" / path.name] = path.read_text()
    return texts | own | examples()


def different() -> list[Path]:
    """Files that are missing, superfluous, or not as they would be written."""
    texts = wanted()
    present = {*(CHART / "crds").glob("*.yaml"), *(DEPLOY / "envoy").glob("*.yaml")}
    stale = {path for path, text in texts.items() if not path.exists() or path.read_text() != text}
    return sorted(stale | (present - texts.keys()))


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 when a check finds differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files differ")
    changed = different()
    if parser.parse_args(arguments).check:
        for path in changed:
            print(f"{path.relative_to(ROOT)} is not what {__file__} writes", file=sys.stderr)
        return 1 if changed else 0
    texts = wanted()
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in texts:
            path.write_text(texts[path])
        else:
            path.unlink()
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
