"""Dashboards, alerts and autoscalers ask, in queries that parse, for series that there are."""

import asyncio
import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from picker.cli.options import Options
from picker.metrics.picker_metrics import PickerMetrics
from scripts.project import read_project
from tests.support.kube.manifests import DEPLOY, ROOT, kustomized, of_kind
from tests.support.picker.metrics_pages import Pod
from tests.support.picker.whole_picker import started_picker, write_endpoints
from tests.support.worker.sim_worker import sim_worker

WRITTEN = re.compile(r"`((?:llm_d_epp_|pointsman_|pointsman:|vllm:|http_)[a-z0-9_:]+)`")
TABLE = re.compile(r"^\| (?P<names>[^|]+) \| (?P<type>counter|gauge|histogram|summary) \|", re.M)
LOOPBACK = {"bind_address": "127.0.0.1", "grpc_port": 0, "grpc_health_port": 0, "metrics_port": 0}
GRAFANA = {
    "$__rate_interval": "5m",
    "$__interval": "1m",
    "$instance": ".*",
    "$inference_pool": ".*",
    "$pool": ".*",
    "$model": ".*",
}
OF_PROMETHEUS = {"up"}  # which it makes itself
RUNBOOK = f"{read_project(ROOT).repository}/blob/main/docs/troubleshooting.md#"
BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))
}
GROUPS = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {r["alert"]: r for group in GROUPS for r in group["rules"]}
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
LABEL = re.compile(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}")


def documented() -> set[str]:
    found = set(OF_PROMETHEUS)
    for row in TABLE.finditer((ROOT / "docs" / "metrics.md").read_text()):
        for name in WRITTEN.findall(row["names"]):
            found.add(name)
            if row["type"] == "histogram":
                found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    return found


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        assert node.name
        yield node
    for part in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        inner = getattr(node, part, None)
        if inner is not None and not isinstance(inner, str | float | int):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def parsed(query: str) -> list[promql_parser.VectorSelector]:
    for name, value in GRAFANA.items():
        query = query.replace(name, value)
    return list(selectors(promql_parser.parse(query)))


def asked(query: str) -> set[str]:
    return {str(one.name) for one in parsed(query)}


def of_process() -> set[str]:
    metrics = PickerMetrics()
    lines = metrics.render(metrics.of_process).decode().splitlines()
    return {line.split()[2] for line in lines if line.startswith("# TYPE")}


def targets(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


@each_board
def test_dashboards_ask_for_series_that_exist_and_legends_name_labels_that_queries_keep(
    board: dict[str, Any],
) -> None:
    queries = list(targets(board))
    assert len(queries) > 20
    for query, legend in queries:
        names = asked(query)
        assert names, query
        assert names - documented() == set(), query
        for label in LABEL.findall(legend) if "(" in query else ():
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", query), (query, legend)


def test_the_dashboard_of_pickers_is_of_the_pools_that_are_chosen() -> None:
    variables = {one["name"]: one for one in BOARDS["picker"]["templating"]["list"]}
    chosen = variables["inference_pool"]
    assert (chosen["includeAll"], chosen["multi"], chosen["allValue"]) == (True, True, ".*")
    assert chosen["current"]["value"] == "$__all"
    assert chosen["query"].endswith(", inference_pool)")
    assert set(parsed_names(chosen["query"])) <= documented() - of_process()
    filtered = 'inference_pool=~"$inference_pool"'
    for query, _ in targets(BOARDS["picker"]):
        for one in parsed(query):
            if str(one.name).startswith("vllm:"):
                continue  # workers know of no pool
            name = re.sub(r"_(bucket|sum|count)$", "", str(one.name))
            is_pools = not {name, str(one.name)} & of_process()
            patterns = [m.value for m in one.matchers.matchers if m.name == "inference_pool"]
            assert (filtered in query) == is_pools == (".*" in patterns), query


def parsed_names(variable: str) -> list[str]:
    return re.findall(r"label_values\(([a-z_]+)", variable)


def test_the_dashboard_of_pickers_shows_all_series_of_replicas() -> None:
    shown = {name for query, _ in targets(BOARDS["picker"]) for name in asked(query)}
    about = re.compile(r"pointsman_(peers?|leader|lease|unknown_pool)(_|$)")
    names = {name for name in documented() if about.match(name)}
    assert len(names) > 10
    assert names - shown == {"pointsman_peer_messages_total"}


@each_board
def test_panels_have_room(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_alerts_of_several_pickers_use_their_series() -> None:
    queries = {name: rule["expr"] for name, rule in RULES.items()}
    assert asked(queries["PointsmanLeaderMissing"]) == {"pointsman_leader"}
    assert asked(queries["PointsmanUnknownPool"]) == {"pointsman_unknown_pool_total"}
    # A picker without peers also reports that it hears none, but calls no peer.
    silent = PickerMetrics().render().decode().splitlines()
    assert "pointsman_peers_heard 0.0" in silent
    assert not [line for line in silent if line.startswith("pointsman_peer_calls_total")]
    assert not [line for line in silent if line.startswith("pointsman_leader")]
    missing = promql_parser.parse(queries["PointsmanPeersMissing"])
    assert str(missing.op) == "and"
    assert {one.name for one in selectors(missing.lhs)} == {"pointsman_peers_heard"}
    assert {one.name for one in selectors(missing.rhs)} == {"pointsman_peer_calls_total"}


def test_alerts_ask_for_series_that_exist() -> None:
    assert len(RULES) == sum(len(group["rules"]) for group in GROUPS) > 10
    for rule in RULES.values():
        assert asked(rule["expr"]) <= documented(), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        if "by (" in rule["expr"]:
            for label in LABEL.findall(str(rule["annotations"])):
                assert re.search(rf"by \([^)]*\b{label}\b", rule["expr"]), rule["alert"]


def test_every_alert_opens_a_section_of_the_runbook() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=\n##|\Z)", text, re.M | re.S))
    assert sections.keys() == RULES.keys()
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"] == RUNBOOK + name.lower()
        assert rule["annotations"]["description"]
        assert len(sections[name]) > 20


@each_board
def test_panels_are_described_and_the_first_row_is_of_numbers(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert [panel["title"] for panel in panels if panel["type"] != "row"][:6] == [
        panel["title"] for panel in panels if panel["type"] == "stat"
    ]
    assert sum(panel["type"] == "heatmap" for panel in panels) == 2
    for panel in panels:
        assert panel["type"] == "row" or panel["description"].endswith((".", "error."))
    limits = [panel["fieldConfig"]["defaults"].get("thresholds") for panel in panels[1:7]]
    assert sum(len(one["steps"]) > 1 for one in limits) >= 3


@pytest.fixture
async def pages(tmp_path: Path) -> dict[str, str]:
    with sim_worker() as worker:
        pod = Pod("w", "127.0.0.1", None, port=worker.port)
        with contextlib.suppress(urllib.error.HTTPError):
            body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
            asking = urllib.request.Request(f"{worker.url}/v1/completions", body)
            await asyncio.to_thread(lambda: urllib.request.urlopen(asking, timeout=30).read())
        path = tmp_path / "endpoints.yaml"
        write_endpoints(path, [pod])
        options = Options(endpoints_file=path, **LOOPBACK)
        async with started_picker(options) as (_, ports):
            urls = {"picker": f"http://127.0.0.1:{ports.metrics}", "worker": worker.url}
            return {
                job: await asyncio.to_thread(
                    lambda url=url: urllib.request.urlopen(f"{url}/metrics").read().decode()
                )
                for job, url in urls.items()
            }


async def test_every_query_asks_for_what_running_programs_have(pages: dict[str, str]) -> None:
    there = set(OF_PROMETHEUS)
    for page in pages.values():
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)", page, re.M):
            there.add(name)
            there |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
            there |= {f"{name}_total"} if kind == "counter" else set()
    queries = [rule["expr"] for rule in RULES.values()]
    for dashboard in BOARDS.values():
        queries += [query for query, _ in targets(dashboard)]
        queries += [one["expr"] for one in dashboard["annotations"]["list"]]
    missing = {name for query in queries for name in asked(query)} - there
    assert missing == {"vllm:spec_decode_num_accepted_tokens_per_pos_total"}


@pytest.mark.usefixtures("kubectl")
def test_autoscalers_ask_for_series_that_exist() -> None:
    [hpa] = of_kind(kustomized("deploy/k8s/addons/autoscaling-hpa"), "HorizontalPodAutoscaler")
    metrics = [metric["external"]["metric"] for metric in hpa["spec"]["metrics"]]
    assert {metric["name"] for metric in metrics} <= documented()
    [scaled] = of_kind(kustomized("deploy/k8s/addons/autoscaling-keda"), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    [pool] = of_kind(kustomized("deploy/k8s/overlays/gateway"), "InferencePool")
    for query in queries:
        assert asked(query)
        assert asked(query) <= documented()
        assert f'"{pool["metadata"]["name"]}"' in query
    for metric in metrics:
        assert metric["selector"]["matchLabels"] == {"name": pool["metadata"]["name"]}


def test_a_series_that_does_not_exist_is_found() -> None:
    for query in (
        "llm_d_epp_nothing",
        "sum(rate(llm_d_epp_nothing[5m]))",
        "1 - llm_d_epp_nothing",
        "histogram_quantile(0.9, sum by (le) (rate(llm_d_epp_nothing_bucket[5m])))",
        "topk(5, -llm_d_epp_nothing)",
        "(llm_d_epp_request_total or llm_d_epp_nothing)",
        "max_over_time(llm_d_epp_nothing[5m:1m])",
    ):
        assert asked(query) - documented()
    assert asked("llm_d_epp_request_total") <= documented()
