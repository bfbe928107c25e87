"""Pools of other clusters: their addresses, their load, and their scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from picker.app.known_pool import KnownPool
from picker.cli.options import Options
from picker.config.build import BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.config.pool_file import pool_contents
from picker.framework.attributes import Attributes
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.session_affinity import SessionAffinityFilter
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.scrape.sources import ExtractError, Extraction, Scrape
from picker.telemetry.pool_metrics import PoolCollector
from picker.types import Candidate, Endpoint, EndpointMetrics
from tests.support.picker.plugin_scenes import candidate, configured, placed, request_for, scores

QUEUE = "llm-d.ai/multicluster-queue-size/multicluster-metrics-extractor"
USAGE = "llm-d.ai/multicluster-kv-cache-utilization/multicluster-metrics-extractor"


def findings(plugin: Any, page: str) -> Extraction:
    return plugin.extract(Scrape(page.encode(), Endpoint("p", "10.0.0.1", 80), 0.0))


def page_of(waiting: int, usage: float) -> str:
    store, metrics = Datastore(), PickerMetrics()
    store.set_endpoints([Endpoint("w", "10.0.0.9", 8000)])
    store.update_metrics("default/w", EndpointMetrics(waiting, 0, usage))
    metrics.register(PoolCollector("p", store))
    return metrics.render().decode()


def test_a_picker_scores_by_the_averages_of_another_one() -> None:
    extractor = configured("multicluster-metrics-extractor")
    pools = [
        Candidate(Endpoint(name, "10.0.0.1", 80), attributes=findings(extractor, page).attributes)
        for name, page in (("busy", page_of(6, 0.75)), ("idle", page_of(2, 0.25)))
    ]
    assert dict(pools[0].attributes) == {QUEUE: 6.0, USAGE: 0.75}
    scores = [
        configured(scorer).score(request_for(), pools, Attributes())
        for scorer in ("multicluster-queue-scorer", "multicluster-kv-cache-utilization-scorer")
    ]
    assert [list(one) for one in scores] == [[0.0, 1.0], [0.25, 0.75]]


def test_the_series_are_configurable() -> None:
    extractor = configured(
        "multicluster-metrics-extractor",
        {"queueSizeMetric": "q{pool=a}", "kvCacheUtilizationMetric": "u"},
    )
    page = 'q{pool="a",x="1"} 1\nq{pool="a",x="2"} 3\nq{pool="b"} 9\nu 0.5\n'
    assert findings(extractor, page).attributes == {QUEUE: 3.0, USAGE: 0.5}


@pytest.mark.parametrize("bad", ["NaN", "-1", "+Inf", "1.5"])
def test_an_unusable_number_is_a_problem(bad: str) -> None:
    page = f"llm_d_epp_average_kv_cache_utilization {bad}\nllm_d_epp_average_queue_size 1\n"
    found = findings(configured("multicluster-metrics-extractor"), page)
    assert found.attributes == {QUEUE: 1.0}
    assert len(found.problems) == 1


def test_a_page_without_both_numbers_is_an_error() -> None:
    with pytest.raises(ExtractError, match=r"average_queue_size.*average_kv_cache_utilization"):
        findings(configured("multicluster-metrics-extractor"), "up 1\n")


def test_pages_of_other_clusters_use_https() -> None:
    location = configured("multicluster-metrics-data-source").location
    assert (location.scheme, location.path, location.tls.verify) == ("https", "/metrics", True)
    plain = configured(
        "multicluster-metrics-data-source", {"scheme": "http", "port": 9090}
    ).location
    assert (plain.scheme, plain.port) == ("http", 9090)


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
def test_an_invalid_host_is_refused(address: str) -> None:
    """A mistyped address is not a name."""
    text = f'endpoints: [{{name: a, address: "{address}", port: 80}}]'
    assert pool_contents(text.encode(), "f", "p").endpoints == ()


def test_only_the_names_of_pools_stay_unresolved() -> None:
    """A proxy cannot route to the name of a worker."""
    assert not configured("file-discovery", {"path": "f"}).routes_to_names
    assert configured("multicluster-file-discovery", {"path": "f"}).routes_to_names


def pool_with(known: Mapping[str, float]) -> Candidate:
    return placed(metrics=EndpointMetrics(99), attributes=known)


@pytest.mark.parametrize(
    ("name", "key", "values", "expected"),
    [
        ("multicluster-queue-scorer", QUEUE, [2, 6, 10], [1.0, 0.5, 0.0]),
        ("multicluster-queue-scorer", QUEUE, [2, None, 10], [1.0, 0.0, 0.0]),
        ("multicluster-queue-scorer", QUEUE, [None], [0.0]),
        (
            "multicluster-kv-cache-utilization-scorer",
            USAGE,
            [0.0, 0.75, 1.5, -1.0, None],
            [1.0, 0.25, 0.0, 1.0, 0.0],
        ),
    ],
)
def test_pools_are_scored_by_the_reports_of_their_pickers(
    name: str, key: str, values: list[float | None], expected: list[float]
) -> None:
    pools = [pool_with({} if one is None else {key: one}) for one in values]
    assert scores(name, pools) == expected


def test_a_pool_that_lacks_one_of_two_numbers_has_the_mean_of_the_others() -> None:
    known = [{QUEUE: 2, USAGE: 0.75}, {QUEUE: 6, USAGE: 0.25}, {QUEUE: 2}, {USAGE: 0.25}, {}]
    pools = [pool_with(one) for one in known]
    queue = scores("multicluster-queue-scorer", pools)
    assert queue == pytest.approx([1.0, 0.0, 1.0, 2 / 3, 0.0])
    cache = scores("multicluster-kv-cache-utilization-scorer", pools)
    assert cache == pytest.approx([0.25, 0.75, 1 - 1.25 / 3, 0.75, 0.0])


def test_prefixes_of_pools_have_a_producer_of_their_own() -> None:
    key = match_info_key("multicluster-approx-prefix-cache-producer")
    attributes = Attributes({key: PrefixCacheMatchInfo(10, 64, {"default/a": 5})})
    assert scores(
        "multicluster-prefix-cache-scorer", [candidate("a"), candidate("b")], attributes
    ) == [0.5, 0.0]


def test_sessions_stay_in_their_clusters() -> None:
    assert type(configured("multicluster-session-affinity-filter")) is SessionAffinityFilter
