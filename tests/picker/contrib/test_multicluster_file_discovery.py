"""multicluster-file-discovery: pools by the names of their gateways."""

from __future__ import annotations

from pathlib import Path

import pytest

from picker.app.known_pool import KnownPool
from picker.cli.options import Options
from picker.config.build import BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.config.pool_file import pool_contents
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.inflight import InflightLoad
from tests.support.picker.plugin_scenes import configured

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {{type: multicluster-file-discovery, parameters: {{path: {path}}}}}
- {{type: multicluster-metrics-data-source}}
- {{type: multicluster-metrics-extractor}}
- {{type: multicluster-queue-scorer}}
- {{type: multicluster-prefix-cache-scorer}}
dataLayer:
  injectDefaults: false
  sources:
  - pluginRef: multicluster-metrics-data-source
    extractors: [{{pluginRef: multicluster-metrics-extractor}}]
  discovery: {{pluginRef: multicluster-file-discovery}}
"""
POOLS = """\
endpoints:
- name: east
  address: Gateway.East.example
  port: "80"
  labels: {metricsAddress: picker.east.example, metricsPort: "9090"}
- {name: west, address: 10.0.0.1, port: "80"}
- {name: bad, address: 10.0.0.256, port: "80"}
"""


def test_pools_are_found_by_name(tmp_path: Path) -> None:
    """Through a whole configuration; where their numbers are is said by labels."""
    path = tmp_path / "pools.yaml"
    path.write_text(POOLS)
    loaded, metrics = load_config(CONFIG.format(path=path).encode(), "test"), PickerMetrics()
    options = BuildOptions(allow_experimental=True)
    assembly = build(loaded, builtin_plugins(), metrics, lambda: 0.0, options)
    assert "multicluster-approx-prefix-cache-producer" in assembly.instances
    known = KnownPool(Options(), assembly, metrics, InflightLoad())
    known.load()
    found = {one.endpoint.name: one.endpoint for one in known.datastore.snapshot().candidates}
    assert sorted(found) == ["east", "west"]
    assert found["east"].host_port == "gateway.east.example:80"
    location = assembly.data_layer.bindings[0].source.location
    assert location.address(found["east"]) == "picker.east.example:9090"
    assert metrics.registry.get_sample_value("pointsman_discovery_errors_total") == 1


@pytest.mark.parametrize("address", ["10.0.0.256", "a_b", "-a", "a..b", "", "a:80", "a" * 254])
def test_what_is_neither_an_address_nor_a_name_is_refused(address: str) -> None:
    """A mistyped address is no name."""
    text = f'endpoints: [{{name: a, address: "{address}", port: 80}}]'
    assert pool_contents(text.encode(), "f", "p").endpoints == ()


def test_only_names_of_pools_stay_names() -> None:
    """Those of workers are resolved: a proxy cannot route to them."""
    assert not configured("file-discovery", {"path": "f"}).routes_to_names
    assert configured("multicluster-file-discovery", {"path": "f"}).routes_to_names
