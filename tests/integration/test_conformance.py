"""This picker passes its own black-box suites, every case of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 280


def report_of(suite: str, path: Path, *arguments: str) -> dict:
    result = subprocess.run(
        [sys.executable, "-m", suite, "--report", str(path), *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "KUBECONFIG"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return yaml.safe_load(path.read_text())


@pytest.mark.envoy
def test_the_endpoint_picker_protocol(tmp_path: Path) -> None:
    report = report_of("conformance.epp", tmp_path / "report.yaml")
    assert report["summary"] | {"passed": 0} == {
        "result": "passed",
        "passed": 0,
        "failed": 0,
        "warned": 0,
        "skipped": 0,
    }
    assert report["implementation"]["name"] == "pointsman"


@pytest.mark.soak
@pytest.mark.envoy
def test_the_same_through_a_kubernetes_api(tmp_path: Path) -> None:
    report = report_of("conformance.k8s", tmp_path / "report.yaml")
    assert report["summary"]["result"] == "passed"
    assert not [one for one in report["cases"] if one["result"] != "passed"]
    assert report["environment"]["kubernetes"].startswith("test API server")
