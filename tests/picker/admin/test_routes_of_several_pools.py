"""Responses of the HTTP port of a picker of several pools."""

from collections.abc import AsyncIterator, Mapping

import pytest

from picker.admin.guarding import SECURITY_HEADERS
from picker.admin.routes import page_files
from tests.support.picker.admin_scene import Scene, summary
from tests.support.picker.pools_port import PoolsPort, asked, serving_pools

KEYS = ("llama", "research/mixtral", "sales/mixtral")
PAGES = (
    *("/", "/page/page.js", "/page/style.css", "/endpoints", "/endpoints?history=5", "/queues"),
    *("/decisions", "/decisions?limit=1", "/decisions/last", "/config"),
    *("/metrics", "/healthz", "/readyz"),
)
MOVED = ("/endpoints", "/queues", "/decisions", "/decisions/last", "/decisions/a%2Fb", "/config")


def _scene(key: str) -> Scene:
    scene = Scene()
    scene.pool(f"{key}-1", f"{key}-2")
    scene.source.remember(summary(1, request_id=f"of-{key}", endpoint=f"default/{key}-1"))
    return scene


@pytest.fixture
async def port() -> AsyncIterator[PoolsPort]:
    async with serving_pools({key: _scene(key) for key in KEYS}) as one:
        yield one


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("page", PAGES)
async def test_every_pool_has_every_page(port: PoolsPort, key: str, page: str) -> None:
    path = f"/pools/{key}{page}"
    answer = await asked(port.url, path)
    assert answer.status == 200
    assert SECURITY_HEADERS.items() <= answer.headers.items()
    assert (await asked(port.url, path, "HEAD")).status == 200
    refused = await asked(port.url, path, "POST")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET,HEAD")


@pytest.mark.parametrize("key", KEYS)
async def test_every_pool_has_its_own_endpoints_decisions_and_readiness(
    port: PoolsPort, key: str
) -> None:
    base = f"{port.url}/pools/{key}"
    endpoints = (await asked(base, "/endpoints")).json["endpoints"]
    assert [one["name"] for one in endpoints] == [f"{key}-1", f"{key}-2"]
    listed = (await asked(base, "/decisions")).json["decisions"]
    assert [one["request_id"] for one in listed] == [f"of-{key}"]
    for other in KEYS:
        found = await asked(base, f"/decisions/of-{other.replace('/', '%2F')}")
        assert found.status == (200 if other == key else 404)
    port.away.add(key)
    for other in KEYS:
        ready = await asked(port.url, f"/pools/{other}/readyz")
        assert ready.status == (503 if other == key else 200)


@pytest.mark.parametrize("key", KEYS)
async def test_an_address_without_its_last_slash_is_redirected(port: PoolsPort, key: str) -> None:
    answer = await asked(port.url, f"/pools/{key}")
    name = key.rpartition("/")[2]
    assert (answer.status, answer.headers["Location"]) == (308, f"{name}/")
    assert SECURITY_HEADERS.items() <= answer.headers.items()


async def test_the_pools_are_listed_as_json(port: PoolsPort) -> None:
    port.away.add("llama")
    port.pools["llama"].source.said_problem = "the API server is silent"
    port.pools["llama"].inflight.acquire("default/llama-1")
    listed = (await asked(port.url, "/pools")).json["pools"]
    assert listed[0] == {
        "name": "llama",
        "path": "/pools/llama/",
        "ready": False,
        "endpoints": 2,
        "inflight_requests": 1,
        "problem": "the API server is silent",
    }
    assert [one["name"] for one in listed] == list(KEYS)
    assert [one["ready"] for one in listed] == [False, True, True]
    assert [one["problem"] for one in listed[1:]] == [None, None]
    for one in listed:
        assert (await asked(port.url, one["path"])).status == 200


async def test_the_page_names_its_pool_and_leads_back_to_the_list(port: PoolsPort) -> None:
    for key, up in (("llama", "../../"), ("research/mixtral", "../../../")):
        page = (await asked(port.url, f"/pools/{key}/")).body.decode()
        assert f"<title>{key} · Pointsman</title>" in page
        assert f'<a href="{up}">All pools</a>' in page
        assert f">{key}</strong>" in page
    assert '<h2 id="pools">' in (await asked(port.url, "/")).body.decode()


async def test_the_page_of_the_only_pool_is_unchanged() -> None:
    page = page_files()["index.html"]
    assert b"<title>Pointsman</title>" in page
    assert b"All pools" not in page
    scene = Scene()
    metrics = scene.source.metrics
    metrics.request_total.labels("a\x85b", "c", 'inference_pool="x', "0").inc()
    metrics.info.labels("", "1").set(1)
    url = f"http://127.0.0.1:{await scene.server.start('127.0.0.1', 0)}"
    try:
        assert (await asked(url, "/")).body == page
        assert (await asked(url, "/metrics")).body == metrics.render()
        for path in ("/pools", "/pools/default/endpoints"):
            answer = await asked(url, path)
            assert (answer.status, answer.json) == (404, {"error": "there is no such page"})
    finally:
        await scene.server.stop()


@pytest.mark.parametrize("path", MOVED)
async def test_a_page_of_one_pool_is_a_404_with_the_pages_of_all_pools(
    port: PoolsPort, path: str
) -> None:
    answer = await asked(port.url, path)
    assert answer.status == 404
    words, _, places = answer.json["error"].partition(": ")
    assert words == "this picker serves several pools; ask one of them"
    assert places.split(", ") == [f"/pools/{key}{path}" for key in KEYS]


@pytest.mark.parametrize(
    "path",
    [
        "/pools/",
        "/pools/qwen",
        "/pools/qwen/",
        "/pools/qwen/metrics",
        "/pools/mixtral/metrics",
        "/pools/research/metrics",
        "/pools/llam/metrics",
        "/pools/llamas/",
        "/pools/research%2Fmixtral/metrics",
        "/pools/%3Cscript%3E",
    ],
)
async def test_an_unknown_pool_is_a_404_with_the_known_pools(port: PoolsPort, path: str) -> None:
    answer = await asked(port.url, path)
    assert answer.status == 404
    words, _, places = answer.json["error"].partition("; this picker has ")
    assert words.startswith("there is no pool at /pools/")
    assert places == "/pools/llama/, /pools/research/mixtral/, /pools/sales/mixtral/"
    assert SECURITY_HEADERS.items() <= answer.headers.items()


@pytest.mark.parametrize(
    "path",
    [
        *("/nothing", "/pools/llama/nothing", "/pools/research/mixtral/nothing"),
        *("/pools/llama/page/server.py", "/pools/llama/pools", "/pools/llama//metrics"),
    ],
)
async def test_an_unknown_page_is_a_404(port: PoolsPort, path: str) -> None:
    answer = await asked(port.url, path)
    assert (answer.status, answer.json) == (404, {"error": "there is no such page"})


async def test_a_long_path_is_truncated_in_the_response(port: PoolsPort) -> None:
    for path in ("/decisions/" + "x" * 5000, "/pools/" + "x" * 5000):
        assert len((await asked(port.url, path)).body) < 1000


class _Cluster:
    def __init__(self, *readable: str) -> None:
        self.asked: list[str] = []
        self._readable = readable

    async def authorize(self, token: str, path: str) -> tuple[int, str] | None:
        self.asked.append(path)
        return None if path in self._readable else (403, "no")


async def _statuses(
    keys: tuple[str, ...], cluster: _Cluster, *paths: str, token: str = "Bearer good"
) -> dict[str, int]:
    port = PoolsPort({key: _scene(key) for key in keys})
    port.server.protect(cluster.authorize)
    url = f"http://127.0.0.1:{await port.server.start('127.0.0.1', 0)}"
    try:
        headers = {"Authorization": token} if token else {}
        return {path: (await asked(url, path, **headers)).status for path in paths}
    finally:
        await port.server.stop()


async def test_a_right_to_a_page_is_valid_for_all_pools() -> None:
    metrics = ["/metrics", *(f"/pools/{key}/metrics" for key in KEYS)]
    cluster = _Cluster("/metrics")
    assert set((await _statuses(KEYS, cluster, *metrics)).values()) == {200}
    assert set(cluster.asked) == {"/metrics"}
    others = {
        "/pools/llama/endpoints": "/endpoints",
        "/pools/research/mixtral/decisions/x": "/decisions/",
        "/pools/llama/page/page.js": "/page/",
        "/pools/llama/": "/",
        "/pools/llama": "/",
        "/": "/",
        "/pools": "/pools",
        "/pools/unknown/metrics": "/pools",
        "/endpoints": "/endpoints",
    }
    for path, checked in others.items():
        cluster = _Cluster("/metrics")
        assert await _statuses(KEYS, cluster, path) == {path: 403}
        assert cluster.asked == [checked]


async def test_probes_of_pools_need_no_token() -> None:
    expected = {
        f"/pools/{key}/{page}": status
        for key in KEYS
        for page, status in (("readyz", 200), ("healthz", 200), ("metrics", 401))
    }
    assert await _statuses(KEYS, _Cluster(), *expected, token="") == expected


@pytest.mark.parametrize("keys", [("a", "a/metrics", "b/metrics"), ("a/metrics", "b/metrics", "a")])
async def test_a_pool_named_like_a_page_hides_nothing(keys: tuple[str, ...]) -> None:
    cluster = _Cluster("/metrics")
    paths = "/pools/a/metrics", "/pools/a/metrics/metrics"
    assert set((await _statuses(keys, cluster, *paths)).values()) == {200}
    decisions = _Cluster("/", "/metrics")
    odd = ("a/decisions", "b/decisions", "a")
    path = "/pools/a/decisions/of-a"
    assert await _statuses(odd, decisions, path) == {path: 403}
    assert decisions.asked == ["/decisions/"]


async def test_unexpected_errors_are_counted_by_pool_and_page(port: PoolsPort) -> None:
    def fail() -> Mapping[str, object]:
        raise RuntimeError("a secret")

    port.pools["llama"].source.health = fail  # type: ignore[method-assign,assignment]
    assert (await asked(port.url, "/pools/llama/endpoints")).status == 500
    assert (await asked(port.url, "/pools/sales/mixtral/endpoints")).status == 200
    page = (await asked(port.url, "/metrics")).body.decode()
    assert 'pointsman_admin_failures_total{page="/pools/llama/endpoints"} 1.0' in page
