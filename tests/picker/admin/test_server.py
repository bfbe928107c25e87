"""What the HTTP port answers."""

from __future__ import annotations

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
    """A scene's port."""

    scene: Scene

    async def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """`path` goes out as it is given, already escaped."""
        return await asked(self.scene.url, path, method, **headers)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    """With two endpoints and three requests."""
    scene = Scene()
    scene.pool("a", "b")
    scene.load("a", 3, 2, 0.25)
    scene.source.health_views = {"default/b": HealthView("ejected", 5, 1, 0.5)}
    scene.source.remember(*(summary(number, request_id=f"id-{number}") for number in range(3)))
    async with serving(scene):
        yield Port(scene)


async def test_endpoints_are_told_with_their_health_and_age(port: Port) -> None:
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


async def test_stale_metrics_are_told_as_what_was_known_last(port: Port) -> None:
    port.scene.datastore.mark_stale("default/a")
    one = (await port.get("/endpoints")).json["endpoints"][0]
    assert one["metrics"] is None
    assert one["last_metrics"]["running_requests"] == 3
    assert one["metrics_age_seconds"] >= 0


async def test_history_comes_where_it_is_asked_for(port: Port) -> None:
    """The last samples of every endpoint, and what was sent there lately."""
    for _ in range(3):
        port.scene.decide("a", 64, 32)
        port.scene.pages.sample()
    view = msgspec.json.decode((await port.get("/endpoints?history=2")).body, type=EndpointsView)
    assert (view.history.last, view.history.interval_seconds) == (3, 1.0)
    assert view.history.endpoints["default/a"].running == (3.0, 3.0)
    assert view.history.endpoints["default/a"].prefix_hit_share == (0.5, 0.5)
    assert view.history.endpoints["default/b"].running == (None, None)
    assert (view.endpoints[0].requests_per_second, view.endpoints[0].prefix_hit_share) == (1.0, 0.5)


async def test_queues_decisions_and_configuration_are_what_the_source_says(port: Port) -> None:
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


async def test_answers_are_bounded(port: Port) -> None:
    """Even when the source gives more than it was asked for."""
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
async def test_numbers_that_cannot_be_used_are_refused_in_words(port: Port, query: str) -> None:
    """With the name of the parameter and what it may be."""
    answer = await port.get(f"/{query}")
    assert answer.status == 400
    error = answer.json["error"]
    assert "must be a number from" in error
    assert query.split("?")[1].split("=")[0] in error
    assert len(error) < 200


@pytest.mark.parametrize("request_id", ["a/b", "ü µ", "50%", "a?b#c", "<script>", "%2F", "a\x1b[m"])
async def test_ids_may_be_anything(port: Port, request_id: str) -> None:
    """They come escaped as one part of the path."""
    port.scene.source.remember(summary(7, request_id=request_id))
    escaped = "".join(f"%{byte:02X}" for byte in request_id.encode())
    one = (await port.get(f"/decisions/{escaped}")).json
    assert one["summary"]["request_id"] == request_id


async def test_what_is_not_known_is_a_404_in_json(port: Port) -> None:
    """Requests and pages alike; a long id is not sent back whole."""
    answer = await port.get("/decisions/nobody")
    assert answer.status == 404
    assert "'nobody'" in answer.json["error"]
    assert len((await port.get("/decisions/" + "x" * 3000)).json["error"]) < 300
    for path in ("/nothing", "/page/server.py", "/page/..%2Fserver.py", "/decisions/a/b"):
        answer = await port.get(path)
        assert (answer.status, answer.json) == (404, {"error": "there is no such page"})
    port.scene.source.records.clear()
    answer = await port.get("/decisions/last")
    assert (answer.status, answer.json) == (404, {"error": "there was no request yet"})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(port: Port, method: str) -> None:
    """Only what reads is answered, and no page from elsewhere is invited."""
    answer = await port.get("/decisions", method, Origin="http://evil.example")
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET,HEAD"
    assert "error" in answer.json
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("path", [*DATA, "/metrics", "/healthz", "/nothing", "/decisions?limit=x"])
async def test_every_answer_is_guarded(port: Port, path: str) -> None:
    """Errors too: no scripts from elsewhere, no guessing of types, no other origins, no copies."""
    headers = (await port.get(path)).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


async def test_a_name_that_points_here_is_answered_only_to_monitoring(port: Port) -> None:
    """A page from elsewhere could let its own name point to 127.0.0.1, and read everything."""
    answer = await port.get("/decisions", Host="evil.example")
    assert answer.status == 403
    assert "localhost" in answer.json["error"]
    assert (await port.get("/decisions", Host="localhost:1234")).status == 200
    assert (await port.get("/metrics", Host="picker.monitoring.example")).status == 200


async def test_the_page_is_whole_and_small() -> None:
    """Everything that it loads is here, under 100 KB, and nothing is from elsewhere."""
    files = page_files()
    assert sum(map(len, files.values())) < 100_000
    text = b"".join(files.values()).decode()
    text = re.sub(r'<a href="https://github.com/[^"]+" rel="noreferrer">Docs</a>', "", text)
    places = {word.split("/")[2] for word in text.split('"') if word.startswith("http")}
    assert places <= {"www.w3.org"}  # the name of SVG
    assert {"index.html", "style.css", "page.js"} <= files.keys()


async def test_the_page_and_its_files_have_their_types(port: Port) -> None:
    """Browsers take scripts only when they are called so."""
    for path, kind in (("/", "html"), ("/page/style.css", "css"), ("/page/page.js", "javascript")):
        answer = await port.get(path)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == f"text/{kind}; charset=utf-8"


async def test_what_goes_wrong_is_a_500_in_json_counted_and_a_line_in_the_log(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is for the log alone, and so is what a client put into the path."""

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
    told = [one for one in (await port.get("/metrics")).body.splitlines() if b"admin_fail" in one]
    assert told[2:] == [b'pointsman_admin_failures_total{page="/decisions/{id}"} 1.0']
