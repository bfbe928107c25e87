"""Write the files under deploy/ that say what another file says; with `--check` only name those
that differ, and fail when one does.

kustomize reads nothing outside its folder and Helm nothing outside its chart, so what both need is
in both: Envoy's bootstrap and the script that drains it, alerts, admission policy, definitions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fleet.envoy.bootstrap import build, to_yaml  # noqa: E402 (wherever we start)
from fleet.envoy.settings import (  # noqa: E402
    BootstrapConfig,
    EndpointDiscovery,
    SocketAddress,
)

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "pointsman"
STANDALONE = DEPLOY / "k8s" / "components" / "standalone"
ADDONS = DEPLOY / "k8s" / "addons"
XDS_PORT = 9004
_HEAD = "Written by scripts/gen_deploy.py; edits are lost."
_BOOTSTRAP_HEAD = f"""{_HEAD}
Envoy in the picker's pod: all that it asks the picker goes over the loopback address."""


def bootstrap() -> str:
    """Envoy's configuration beside a picker that listens on the loopback address."""
    config = BootstrapConfig(
        listen=SocketAddress("0.0.0.0", 8080),
        admin=SocketAddress("127.0.0.1", 9901),
        picker=SocketAddress("127.0.0.1", 9002),
        picker_health=SocketAddress("127.0.0.1", 9003),
        discovery=EndpointDiscovery(SocketAddress("127.0.0.1", XDS_PORT)),
        buffer_request_body=True,
    )
    return to_yaml(build(config), _BOOTSTRAP_HEAD)


def alerts() -> str:
    """The alerts as an object of the Prometheus operator."""
    groups: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pointsman", "labels": {"app.kubernetes.io/name": "pointsman"}},
        "spec": groups,
    }
    return f"# {_HEAD}\n" + yaml.safe_dump(rule, sort_keys=False, width=100)


def wanted() -> dict[Path, str]:
    """Every file that is written, and what it says."""
    envoy = bootstrap()
    drain = (STANDALONE / "drain.sh").read_text()
    texts = {
        STANDALONE / "envoy.yaml": envoy,
        CHART / "envoy" / "envoy.yaml": envoy,
        CHART / "envoy" / "drain.sh": drain,
        ADDONS / "monitoring" / "prometheusrule.yaml": alerts(),
        CHART / "alerts" / "rules.yaml": (DEPLOY / "prometheus" / "rules.yaml").read_text(),
    }
    for name in ("policy.yaml", "binding.yaml"):
        texts[CHART / "admission" / name] = (ADDONS / "admission-policy" / name).read_text()
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        texts[CHART / "crds" / path.name] = path.read_text()
    return texts


def different() -> list[Path]:
    """Files that are missing, superfluous, or not as they would be written."""
    texts = wanted()
    present = set((CHART / "crds").glob("*.yaml"))
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
