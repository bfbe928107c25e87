"""The pages of several pools in a real browser."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web

from tests.support.fleet.browser import Browser, browser
from tests.support.picker.admin_scene import Scene, busy_scene, summary
from tests.support.picker.pools_port import PoolsPort, serving_pools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

LIVE = "document.querySelector('#status').dataset.state === 'live'"
GONE = "document.querySelector('#status').dataset.state === 'gone'"
EXPLAINED = "document.querySelector('#explanation .facts')"
ROWS = "document.querySelectorAll('#pools-rows > tr').length"
TEXTS = (
    "[...document.querySelectorAll('#pools-rows > tr')]"
    ".map((row) => [...row.children].map((cell) => cell.innerText.replace(/\\s+/g, ' ')))"
)
DESKTOP, PHONE = 1280, 375
LONG = "-".join(["a-team-that-likes-long-names"] * 8)[:63] + "/" + "x" * 100 + ".of-a-model"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window() -> AsyncIterator[Browser]:
    async with browser() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def port() -> AsyncIterator[PoolsPort]:
    empty, long = Scene(), Scene()
    empty.source.said_problem = (
        "the API server at https://10.0.0.1:443 is silent for 31 s: timed out"
    )
    long.pool("only")
    pools = {"llama": await busy_scene(), "research/mixtral": empty, LONG: long}
    async with serving_pools(pools, away={"research/mixtral"}) as one:
        yield one


async def _open(window: Browser, url: str, width: int = DESKTOP) -> None:
    await window.look(width)
    await window.open(url)
    await window.until(LIVE)


async def test_every_pool_is_listed_with_its_state(window: Browser, port: PoolsPort) -> None:
    await _open(window, port.url)
    assert await window.run(TEXTS) == [
        ["llama", "✓ ready", "10", "15", "none"],
        [
            "research/mixtral",
            "✕ not ready",
            "0",
            "0",
            port.pools["research/mixtral"].source.said_problem,
        ],
        [LONG, "✓ ready", "1", "0", "none"],
    ]
    hint = "document.querySelector('#pools-hint').innerText"
    assert (await window.run(hint)).startswith("2 of 3 ready.")
    port.away.clear()
    port.pools["research/mixtral"].pool("new")
    port.pools["research/mixtral"].source.said_problem = None
    await window.until(f"{hint}.startsWith('3 of 3 ready.')")
    assert (await window.run(TEXTS))[1] == ["research/mixtral", "✓ ready", "1", "0", "none"]
    assert window.complaints == []


async def test_the_list_leads_to_each_pool_and_back(window: Browser, port: PoolsPort) -> None:
    for key, endpoints in (("llama", 10), (LONG, 1)):
        await _open(window, port.url)
        await window.run(
            "[...document.querySelectorAll('#pools-rows a')]"
            f".find((one) => one.textContent === '{key}').focus()"
        )
        await window.press("Enter")
        await window.until(f"location.pathname === '/pools/{key}/' && {LIVE}")
        await window.until(
            f"document.querySelectorAll('#endpoints-rows > tr').length === {endpoints}"
        )
        assert await window.read("#pool") == key
        assert await window.run("document.title") == f"{key} · Pointsman"
        await window.run("document.querySelector('nav.which a').focus()")
        await window.press("Enter")
        await window.until(f"location.pathname === '/' && {ROWS} === 3")
    assert window.complaints == []


async def test_the_page_of_a_pool_is_live(window: Browser, port: PoolsPort) -> None:
    await _open(window, f"{port.url}/pools/llama/")
    port.pools["llama"].source.remember(summary(41, request_id="new"))
    port.pools[LONG].source.remember(summary(42, request_id="of another"))
    await window.until("document.querySelector('#requests-rows a').textContent === 'new'")
    await window.run("document.querySelector('#requests-rows a').click()")
    await window.until(EXPLAINED)
    assert await window.run("document.title") == "new · llama · Pointsman"
    assert await window.run("location.pathname + location.hash") == "/pools/llama/#/decisions/new"
    await window.press("Escape")
    await window.until("document.title === 'llama · Pointsman'")
    assert window.complaints == []


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_pages_are_accessible(
    window: Browser, port: PoolsPort, width: int, scheme: str
) -> None:
    await window.look(width, scheme=scheme)
    for path in ("/", "/pools/llama/", f"/pools/{LONG}/"):
        await window.open(f"{port.url}{path}")
        await window.until(LIVE)
        assert await window.faults() == [], path


async def test_every_pool_is_a_card_on_a_phone(window: Browser, port: PoolsPort) -> None:
    await _open(window, port.url, PHONE)
    cards = await window.run(
        "[...document.querySelectorAll('#pools-rows > tr')].map((one) => {"
        "const box = one.getBoundingClientRect(); return [box.left, box.right, box.height]; })"
    )
    assert all(left >= 0 and right <= PHONE and height > 80 for left, right, height in cards)
    cut = await window.run(
        "[...document.querySelectorAll('#pools-rows a')]"
        ".map((one) => one.scrollWidth - one.clientWidth)"
    )
    assert max(cut) <= 0  # two names may differ only at their ends
    labels = await window.run(
        "[...document.querySelectorAll('#pools-rows > tr:first-child > *')]"
        ".map((one) => getComputedStyle(one, '::before').content)"
    )
    assert labels == ["none", "none", '"Endpoints"', '"In flight"', '"Trouble"']


async def test_the_list_survives_a_restart_of_the_picker(window: Browser, port: PoolsPort) -> None:
    await _open(window, port.url)
    number = int(port.url.rsplit(":", 1)[1])
    await port.server.stop()
    await window.until(GONE)
    said = await window.read("#status", "textContent")
    assert said.startswith("The picker does not answer. Trying again. What is shown is of ")
    assert await window.run("document.body.classList.contains('is-stale')")
    assert await window.run(ROWS) == 3
    await port.server.start("127.0.0.1", number)
    await window.until(LIVE)
    assert not await window.run("document.body.classList.contains('is-stale')")


async def test_the_text_of_a_trouble_is_not_markup(window: Browser, port: PoolsPort) -> None:
    canary = '<img src=x onerror="window.pwned=1">'
    port.pools["llama"].source.said_problem = canary
    await _open(window, port.url)
    assert (await window.run(TEXTS))[0][4] == canary
    assert await window.run("document.querySelectorAll('img').length") == 0
    assert await window.run("window.pwned") is None
    assert window.complaints == []


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def test_the_pages_work_behind_a_proxy_that_adds_to_the_path(
    window: Browser, port: PoolsPort
) -> None:
    async with ClientSession() as http:

        async def forward(request: web.Request) -> web.Response:
            path = request.path_qs.removeprefix("/some/place")
            async with http.get(port.url + path, allow_redirects=False) as answer:
                headers: Mapping[str, str] = {
                    name: answer.headers[name]
                    for name in ("Content-Type", "Content-Security-Policy", "Location")
                    if name in answer.headers
                }
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)

        app = web.Application()
        app.router.add_get("/some/place/{rest:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            place = f"http://127.0.0.1:{runner.addresses[0][1]}/some/place"
            await _open(window, f"{place}/")
            await window.run("document.querySelector('#pools-rows a').click()")
            await window.until(f"location.pathname === '/some/place/pools/llama/' && {LIVE}")
            await window.run("document.querySelector('nav.which a').click()")
            await window.until(f"location.pathname === '/some/place/' && {LIVE}")
            await _open(window, f"{place}/pools/research/mixtral")
            assert await window.run("location.pathname") == "/some/place/pools/research/mixtral/"
        finally:
            await runner.cleanup()
