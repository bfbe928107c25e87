"""Responses of the HTTP port."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from picker.admin.routes import page_files
from picker.admin.views import ConfigView, EndpointsView, HealthView
from picker.decisions.views import RecordView
from picker.flowcontrol.views import QueuesView
from tests.support.picker.admin_scene import CONFIG, QUEUES, Scene, explained, serving, summary
from tests.support.picker.pools_port import Answer, asked

DATA = ("/", "/page/page.js", "/endpoints", "/queues", "/decisions", "/decisions/last", "/config")


@dataclass
class Port:
    scene: Scene

    async def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return await asked(self.scene.url, path, method, **headers)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    scene = Scene()
    scene.pool("a", "b")
    scene.load("a", 3, 2, 0.25)
    scene.source.health_views = {"default/b": HealthView("ejected", 5, 1, 0.5)}
    scene.source.remember(*(summary(number, request_id=f"id-{number}") for number in range(3)))
    async with serving(scene):
        yield Port(scene)


async def test_endpoints_have_health_and_the_age_of_their_metrics(port: Port) -> None:
    port.scene.inflight.acquire("default/a")
    view = msgspec.json.decode((await port.get("/endpoints")).body, type=EndpointsView)
    a, b = view.endpoints
    assert (a.key, a.name, a.address, a.inflight_requests) == ("default/a", "a", "10.0.0.1:8000", 1)
    assert (a.metrics.running_requests, a.metrics.waiting_requests) == (3, 2)
    assert a.metrics_age_seconds >= 0
    assert a.health == HealthView("healthy")
    assert b.health == HealthView("ejected", 5, 1, 0.5)
    assert (b.metrics, b.last_metrics, b.metrics_age_seconds) == (None, None, None)
    assert view.history is None


async def test_stale_metrics_are_shown_as_the_last_known_ones(port: Port) -> None:
    port.scene.datastore.mark_stale("default/a")
    one = (await port.get("/endpoints")).json["endpoints"][0]
    assert one["metrics"] is None
    assert one["last_metrics"]["running_requests"] == 3
    assert one["metrics_age_seconds"] >= 0


async def test_history_is_shown_on_request(port: Port) -> None:
    for _ in range(3):
        port.scene.decide("a", 64, 32)
        port.scene.pages.sample()
    view = msgspec.json.decode((await port.get("/endpoints?history=2")).body, type=EndpointsView)
    assert (view.history.last, view.history.interval_seconds) == (3, 1.0)
    assert view.history.endpoints["default/a"].running == (3.0, 3.0)
    assert view.history.endpoints["default/a"].prefix_hit_share == (0.5, 0.5)
    assert view.history.endpoints["default/b"].running == (None, None)
    assert (view.endpoints[0].requests_per_second, view.endpoints[0].prefix_hit_share) == (1.0, 0.5)


async def test_queues_decisions_and_configuration_are_those_of_the_source(port: Port) -> None:
    source = port.scene.source
    assert msgspec.json.decode((await port.get("/queues")).body, type=QueuesView) == QUEUES
    assert msgspec.json.decode((await port.get("/config")).body, type=ConfigView) == CONFIG
    listed = (await port.get("/decisions")).json["decisions"]
    assert [one["request_id"] for one in listed] == ["id-2", "id-1", "id-0"]
    assert source.asked == [50]
    one = msgspec.json.decode((await port.get("/decisions/id-1")).body, type=RecordView)
    assert one == explained(summary(1, request_id="id-1"))
    last = msgspec.json.decode((await port.get("/decisions/last")).body, type=RecordView)
    assert last.summary.request_id == "id-2"
    assert source.asked == [50, "id-1", None]


async def test_lists_are_bounded(port: Port) -> None:
    assert len((await port.get("/decisions?limit=2")).json["decisions"]) == 2
    assert port.scene.source.asked == [2]


@pytest.mark.parametrize(
    "query",
    [
        "decisions?limit=0",
        "decisions?limit=1001",
        "decisions?limit=ten",
        "decisions?limit=",
        "decisions?limit=-1",
        "decisions?limit=1_0",
        "decisions?limit=%D9%A1",
        "decisions?limit=%2B5",
        "decisions?limit=" + "9" * 5000,
        "endpoints?history=121",
        "endpoints?history=x",
    ],
)
async def test_an_invalid_number_is_refused_with_its_range(port: Port, query: str) -> None:
    answer = await port.get(f"/{query}")
    assert answer.status == 400
    error = answer.json["error"]
    assert "must be a number from" in error
    assert query.split("?")[1].split("=")[0] in error
    assert len(error) < 200


@pytest.mark.parametrize("request_id", ["a/b", "ü µ", "50%", "a?b#c", "<script>", "%2F", "a\x1b[m"])
async def test_an_id_may_be_any_text(port: Port, request_id: str) -> None:
    port.scene.source.remember(summary(7, request_id=request_id))
    escaped = "".join(f"%{byte:02X}" for byte in request_id.encode())
    one = (await port.get(f"/decisions/{escaped}")).json
    assert one["summary"]["request_id"] == request_id


async def test_an_unknown_request_or_page_is_a_404_in_json(port: Port) -> None:
    answer = await port.get("/decisions/unknown")
    assert answer.status == 404
    assert "'unknown'" in answer.json["error"]
    assert len((await port.get("/decisions/" + "x" * 3000)).json["error"]) < 300
    for path in ("/nothing", "/page/server.py", "/page/..%2Fserver.py", "/decisions/a/b"):
        answer = await port.get(path)
        assert (answer.status, answer.json) == (404, {"error": "there is no such page"})
    port.scene.source.records.clear()
    answer = await port.get("/decisions/last")
    assert (answer.status, answer.json) == (404, {"error": "there was no request yet"})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_the_port_is_read_only(port: Port, method: str) -> None:
    answer = await port.get("/decisions", method, Origin="http://evil.example")
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET,HEAD"
    assert "error" in answer.json
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("path", [*DATA, "/metrics", "/healthz", "/nothing", "/decisions?limit=x"])
async def test_every_response_has_security_headers(port: Port, path: str) -> None:
    headers = (await port.get(path)).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


async def test_only_monitoring_may_use_a_foreign_host_name(port: Port) -> None:
    """A foreign page could let its own name resolve to 127.0.0.1 and then read everything."""
    answer = await port.get("/decisions", Host="evil.example")
    assert answer.status == 403
    assert "localhost" in answer.json["error"]
    assert (await port.get("/decisions", Host="localhost:1234")).status == 200
    assert (await port.get("/metrics", Host="picker.monitoring.example")).status == 200


async def test_the_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    files = page_files()
    assert sum(map(len, files.values())) < 100_000
    text = b"".join(files.values()).decode()
    text = re.sub(r'<a href="https://github.com/[^"]+" rel="noreferrer">Docs</a>', "", text)
    places = {word.split("/")[2] for word in text.split('"') if word.startswith("http")}
    assert places <= {"www.w3.org"}  # the name of SVG
    assert {"index.html", "style.css", "page.js"} <= files.keys()


async def test_the_page_and_its_files_have_their_types(port: Port) -> None:
    for path, kind in (("/", "html"), ("/page/style.css", "css"), ("/page/page.js", "javascript")):
        answer = await port.get(path)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == f"text/{kind}; charset=utf-8"


async def test_an_unexpected_error_is_a_500_counted_and_logged(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a secret")

    port.scene.source.decision = fail  # type: ignore[method-assign,assignment]
    answer = await port.get("/decisions/%0aforged")
    assert (answer.status, list(answer.json)) == (500, ["error"])
    assert b"secret" not in answer.body
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    (line,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert line.getMessage() == "/decisions/{id} cannot be answered"
    assert line.exc_info is not None
    assert (await port.get("/queues")).status == 200
    page = (await port.get("/metrics")).body.splitlines()
    assert [one for one in page if b"admin_fail" in one][2:] == [
        b'pointsman_admin_failures_total{page="/decisions/{id}"} 1.0'
    ]
