"""Documentation and dashboards name the series of the page, and no others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

ROOT = Path(__file__).parents[3]
SERIES = re.compile(r"\b(?:vllm:|pointsman:|http_)[a-z0-9_]+")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "worker.json").read_text())


@pytest.fixture
def names(families: dict[str, Metric]) -> set[str]:
    samples = {sample.name for family in families.values() for sample in family.samples}
    return samples | {name for name, family in families.items() if family.type != "counter"}


def test_exactly_the_series_are_documented(families: dict[str, Metric], names: set[str]) -> None:
    written = set(SERIES.findall((ROOT / "docs" / "metrics.md").read_text()))
    ours = {
        name + ("_total" if family.type == "counter" else "")
        for name, family in families.items()
        if SERIES.match(name)
    }
    assert ours - written == set()
    assert written - names == set()


def test_the_dashboard_asks_for_series_that_exist(names: set[str]) -> None:
    queries = [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
    ]
    assert len(queries) > 20
    for query in queries:
        asked = set(SERIES.findall(query))
        assert asked, query
        assert asked - names == set(), query


def test_the_dashboard_has_room_for_every_panel() -> None:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
