"""The pages of one pool and of several in a real browser, over fixed scenes."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from msgspec.structs import replace

from picker.admin.views import UNKNOWN, HealthView
from picker.decisions.views import RecordSummary
from picker.flowcontrol.views import BandView, FlowView, QueuesView
from picker.types import FinishCause
from tests.support.fleet.browser import Browser, browser
from tests.support.local_ports import free_port
from tests.support.picker.admin_scene import SAMPLES, Scene, busy_scene, decision, serving, summary
from tests.support.picker.pools_port import PoolsPort, serving_pools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

LIVE = "document.querySelector('#status').dataset.state === 'live'"
GONE = "document.querySelector('#status').dataset.state === 'gone'"
EXPLAINED = "document.querySelector('#explanation .facts')"
ROWS = "document.querySelectorAll('#{}-rows > tr').length"
DESKTOP, PHONE = 1280, 375
CANARY = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\'"&amp;\x1b[31m'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window() -> AsyncIterator[Browser]:
    async with browser() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    async with serving(await busy_scene(), port=free_port()) as one:
        yield one


async def _visit(window: Browser, url: str, width: int = DESKTOP) -> None:
    await window.look(width)
    await window.open(url)
    await window.until(LIVE)


async def _open(window: Browser, scene: Scene, fragment: str = "", width: int = DESKTOP) -> None:
    await _visit(window, f"{scene.url}/{fragment}", width)
    if fragment.startswith("#/decisions/"):
        await window.until(EXPLAINED)


async def test_the_page_shows_endpoints_queues_requests_and_configuration(
    window: Browser, scene: Scene
) -> None:
    await _open(window, scene)
    assert len(await window.read_all("#endpoints-rows > tr")) == 10
    states = await window.read_all("#endpoints-rows .badge")
    badges = [" ".join(one.split()) for one in states]
    assert badges[:4] == ["✕ ejected", "? on trial", "! suspect", "✓ healthy"]
    heights = await window.read_all("#endpoints-rows .badge", "offsetHeight")
    assert max(heights) < 30  # each in a line
    curves = await window.run(
        "[...document.querySelectorAll('#endpoints-rows .line')].map((one) => "
        "[one.getAttribute('d').length, one.getBoundingClientRect().width])"
    )
    assert len(curves) == 40
    drawn = [width for length, width in curves if length > 400]
    assert len(drawn) == 36  # one endpoint has no metrics
    assert min(drawn) > 30
    text = await window.read("#overview")
    for words in (
        "9 of 10",
        "Saturation of the pool: 83% (utilization-detector), judged without fresh metrics for 1",
        "Priority 10",
        "batch-tenant",
        "9 requests (75%)",
        "refused 429, queue full",
        "server error 500",
        "/etc/pointsman/config.yaml",
        "is it 'queue-scorer'?",
        "has the weight 0",
    ):
        assert words in text, words
    assert len(await window.read_all("#requests-rows > tr")) == 15
    await window.run("document.querySelector('#requests-more').click()")
    assert len(await window.read_all("#requests-rows > tr")) == 40
    assert window.complaints == []


async def test_a_request_is_explained(window: Browser, scene: Scene) -> None:
    await _open(window, scene, "#/decisions/chosen")
    text = await window.read("#explanation")
    for words in (
        "Request chosen",
        "worker-4 tied with",
        "Picked by max-score-picker: worker-4",
        "removed 4: worker-5, worker-6, worker-8, worker-10",
        "prefix-cache-scorer",
        "weight 2",
        "320 tokens (50% of the prompt)",
        "21 ms",
        "210 µs",  # without the queue
        "the prompt is shorter than one block",
    ):
        assert words in text, words
    bars = await window.read_all(".scores .picked .bar:not(.stacked) .fill", "style.width")
    assert bars == ["95%", "80%", "40%"]
    assert await window.run("document.title") == "chosen · Pointsman"
    assert window.complaints == []


async def test_a_refusal_is_explained(window: Browser, scene: Scene) -> None:
    await _open(window, scene, f"#/decisions/{summary(34).request_id}")
    text = await window.read("#explanation")
    assert "The picker refused it: 429 ResourceExhausted" in text
    assert "Refused with 429 ResourceExhausted" in text
    assert "Reason: rejected-saturated" in text
    assert "Try again after 3.00 s" in text


async def test_an_unknown_request_has_a_notice(window: Browser, scene: Scene) -> None:
    await window.open(f"{scene.url}/#/decisions/nobody%2Fknows")
    await window.until("document.querySelector('#explanation .notice')")
    text = await window.read("#explanation")
    assert "request 'nobody/knows' is unknown" in text


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_is_accessible(
    window: Browser, scene: Scene, width: int, scheme: str
) -> None:
    await window.look(width, scheme=scheme)
    for fragment in ("", "#/decisions/chosen", "#/endpoints/default%2Fworker-1"):
        await window.open(f"{scene.url}/{fragment}")
        await window.until(f"{LIVE} && (!location.hash || {EXPLAINED})")
        await window.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert await window.faults() == []


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_curves_have_their_colours_in_both_schemes(
    window: Browser, scene: Scene, width: int, scheme: str
) -> None:
    await window.look(width, scheme=scheme)
    await window.open(scene.url)
    await window.until(LIVE)
    kinds = ["running"] if width == PHONE else ["running", "waiting", "cache", "prefix"]
    place = "#charts" if width == PHONE else "#endpoints-rows"
    await window.until("document.querySelector('#charts .line')")
    curves = await window.run(
        f"{kinds}.map((kind) => getComputedStyle(document.querySelector("
        f"`{place} .line.${{kind}}`)).stroke.match(/[0-9]+/g).map(Number))"
    )
    back = await window.run(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    )
    await window.run(f"document.querySelector('{place}').scrollIntoView()")
    colours = await window.colours()
    total = sum(colours.values())
    assert total == width * 900
    assert len(colours) > 200  # letters and curves are smooth
    assert (sum(back) > 600) == (scheme == "light")
    assert 0.02 < _near(colours, back, 25) / total < 0.95
    for curve in curves:
        assert _near(colours, curve, 60) > 150, curve


def _near(colours: Mapping[tuple[int, int, int], int], wanted: list[int], within: int) -> int:
    return sum(many for colour, many in colours.items() if _distance(colour, wanted) < within)


def _distance(one: tuple[int, int, int], other: list[int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


async def test_rows_are_cards_on_a_phone(window: Browser, scene: Scene) -> None:
    await _open(window, scene, "", PHONE)
    cards = await window.run(
        "[...document.querySelectorAll('#endpoints-rows > tr')].map((one) => {"
        "const box = one.getBoundingClientRect(); return [box.left, box.right, box.height]; })"
    )
    assert all(left >= 0 and right <= PHONE and 40 < height < 145 for left, right, height in cards)
    await _open(window, scene, "#/decisions/chosen", PHONE)
    region = await window.run(
        "(() => { const one = document.querySelector('.scrolling'); "
        "return [one.scrollWidth > one.clientWidth, one.tabIndex, one.getAttribute('role')]; })()"
    )
    assert region == [True, 0, "region"]


async def test_the_page_works_with_the_keyboard(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    await window.press("Tab")
    assert await window.run("document.activeElement.textContent") == "Skip to the content"
    await window.press("Tab")
    assert await window.run("document.activeElement.textContent") == "Endpoints"
    outline = await window.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    await window.run("document.querySelector('#requests-rows a[href$=chosen]').focus()")
    await window.press("Enter")
    await window.until(EXPLAINED)
    await window.until("document.activeElement.id === 'explanation-heading'")
    assert await window.read("#overview", "hidden")
    await window.press("Escape")
    await window.until("document.activeElement.id === 'requests'")
    assert not await window.read("#overview", "hidden")


async def test_a_click_anywhere_on_a_row_explains_it(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    await window.run("document.querySelector('#requests-rows tr td:nth-child(4)').click()")
    await window.until(EXPLAINED)
    assert await window.read("#explanation h2") == f"Request {summary(39).request_id}"


async def test_new_requests_do_not_move_the_focus(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    await window.run("document.querySelector('#requests-rows a[href$=chosen]').focus()")
    scene.source.remember(summary(41, request_id="new"))
    await window.until("document.querySelector('#requests-rows a').textContent === 'new'")
    assert await window.run("document.activeElement.textContent") == "chosen"
    await window.run("document.querySelector('#requests-paused').click()")
    scene.source.remember(summary(42, request_id="newer"))
    scene.source.health_views = {"default/worker-1": HealthView("ejected")}
    await window.until(
        "document.querySelector('#endpoints-rows .title').textContent === 'worker-1'"
    )
    assert await window.read("#requests-rows a", "textContent") == "new"


async def test_a_request_under_way_is_explained_again_when_it_is_over(
    window: Browser, scene: Scene
) -> None:
    await _open(window, scene, f"#/decisions/{summary(39).request_id}")
    assert "in progress" in await window.read(".lead")
    scene.source.remember(summary(39))
    await window.until("document.querySelector('.lead').innerText.includes('completed')")


async def test_texts_of_clients_are_not_markup(window: Browser, scene: Scene) -> None:
    scene.pool(CANARY)
    scene.source.health_views = {f"default/{CANARY}": HealthView(CANARY)}
    scene.source.remember(
        summary(
            50,
            request_id=CANARY,
            model=CANARY,
            fairness_id=CANARY,
            outcome=CANARY,
            endpoint=CANARY,
            reason=CANARY,
        )
    )
    band = BandView(0, 1, 1, 1, 1, 1.0, (FlowView(CANARY, 1, 1, 1.0),))
    outcomes = {CANARY: 1}
    scene.source.queues_view = QueuesView(True, CANARY, bands=(band,), outcomes=outcomes)
    scene.pages.sample()
    await _open(window, scene)
    await window.until("document.querySelector('#endpoints-rows .title')")
    await window.run("document.querySelector('#requests-rows tr td:nth-child(4)').click()")
    await window.until(EXPLAINED)
    shown = await window.read("#explanation h2 code", "textContent")
    assert shown == CANARY
    assert await window.run("document.querySelectorAll('img').length") == 0
    assert await window.run("window.pwned") is None
    assert window.complaints == []


async def test_the_page_survives_a_restart_of_the_picker(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    port = int(scene.url.rsplit(":", 1)[1])
    await scene.server.stop()
    await window.until(GONE)
    said = await window.read("#status", "textContent")
    assert said.startswith("The picker does not answer. Trying again. What is shown is of ")
    assert len(await window.read_all("#endpoints-rows > tr")) == 10
    assert await window.run("document.querySelector('#status').getAttribute('aria-live')")
    scene.pool("other")
    await scene.server.start("127.0.0.1", port)
    await window.until(LIVE)
    await window.until(f"{ROWS.format('endpoints')} === 1")


async def test_a_failed_section_does_not_hide_the_others(window: Browser, scene: Scene) -> None:
    def fail(limit: int) -> Sequence[RecordSummary]:
        raise RuntimeError("a bug")

    scene.source.decisions = fail  # type: ignore[method-assign]
    await window.open(scene.url)
    await window.until("document.querySelector('#status').dataset.state === 'partly'")
    assert (
        await window.read("#status", "textContent")
        == "The picker does not answer for /decisions (500). Trying again."
    )
    assert len(await window.read_all("#endpoints-rows > tr")) == 10
    assert len(await window.read_all("#requests-rows > tr")) == 0


async def test_a_hidden_page_sends_no_requests(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    await window.run(
        "(() => { window.looks = 0; window.hide = true; window.asked = 0;"
        "Object.defineProperty(document, 'hidden',"
        "{ get: () => (window.looks += 1, window.hide) });"
        "const ask = window.fetch;"
        "window.fetch = (...all) => ((window.asked += 1), ask(...all)); })()"
    )
    await window.until("window.looks > 0")  # the next time was due, and the page did not ask
    asked = await window.run("window.asked")
    await window.run("(() => { document.dispatchEvent(new Event('visibilitychange')); })()")
    assert await window.run("window.asked") == asked
    await window.run(
        "(() => { window.hide = false; document.dispatchEvent(new Event('visibilitychange')); })()"
    )
    assert await window.run("window.asked") > asked
    await window.until(LIVE)


async def test_a_thousand_endpoints_are_truncated_and_searchable(
    window: Browser, scene: Scene
) -> None:
    scene.pool(*(f"pod-{number}" for number in range(1000)))
    scene.source.health_views = {"default/pod-777": HealthView("ejected", 5)}
    await _open(window, scene)
    assert len(await window.read_all("#endpoints-rows > tr")) == 100
    assert await window.read("#endpoints-rows .title", "textContent") == "pod-777"
    note = "document.querySelector('#endpoints-note').textContent"
    assert "900 more endpoints" in await window.run(note)
    await window.run(
        "(() => { const field = document.querySelector('#endpoints-text');"
        "field.value = 'pod-12'; field.dispatchEvent(new Event('input')); })()"
    )
    assert len(await window.read_all("#endpoints-rows > tr")) == 11


async def test_an_empty_picker_says_so(window: Browser, scene: Scene) -> None:
    scene.pool()
    scene.source.records.clear()
    scene.source.queues_view = QueuesView()
    scene.pages.sample()
    await _open(window, scene)
    text = await window.read("#overview")
    for words in ("The pool is empty.", "Flow control is off", "No request came yet."):
        assert words in text
    assert window.complaints == []


async def test_reduced_motion_is_respected(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    moving = await window.run(
        "getComputedStyle(document.querySelector('.fill')).transitionDuration"
    )
    assert moving == "0s"


def _refuse(scene: Scene) -> None:
    scene.source.health_views = {}
    for number in range(10):
        one = decision("worker-1", 64, None)
        if number < 7:
            one = replace(one, result=None, cause=FinishCause.REFUSED)
            scene.source.counted.finished(one)
        else:
            scene.source.counted.decided(one)
    scene.pages.sample()


def _lose(scene: Scene) -> None:
    scene.source.health_views = {"default/worker-3": UNKNOWN}


@pytest.mark.parametrize("width", [1400, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (_refuse, "requests per second are refused, 70% of those that come"),
        (_lose, "1 of 10 endpoints cannot be used: worker-3 (unknown)"),
        (None, "The picker does not answer"),
    ],
)
async def test_trouble_is_on_the_first_screen(
    window: Browser, width: int, scheme: str, trouble: Callable[[Scene], None] | None, words: str
) -> None:
    scene = await busy_scene()
    for _ in range(10):  # drop the traffic of the scene's construction
        scene.pages.sample()
    if trouble is not None:
        trouble(scene)
    async with serving(scene):
        await window.look(width, 800, scheme)
        await window.open(scene.url)
        await window.until(LIVE)
        place = "#trouble li"
        if trouble is None:
            await window.run("scrollTo(0, document.body.scrollHeight)")
            await scene.server.stop()
            await window.until(GONE)
            place = "#status"
        # There are further troubles, of the scene's configuration.
        found = await window.run(
            f"[...document.querySelectorAll('{place}')].map((one) => {{"
            "const box = one.getBoundingClientRect(); const style = getComputedStyle(one);"
            "return [one.innerText, box.top, box.bottom, box.right, style.color,"
            "style.backgroundColor]; })"
        )
        [(_, top, bottom, right, colour, back)] = [one for one in found if words in one[0]]
        assert 0 <= top < bottom < 400
        assert right <= width
        bad = "rgb(168, 63, 6)" if scheme == "light" else "rgb(255, 168, 118)"
        assert bad in (colour, back)


async def test_a_healthy_pool_has_no_trouble(window: Browser, scene: Scene) -> None:
    scene.source.health_views = {}
    scene.source.config = replace(scene.source.config, last_error=None)
    await _open(window, scene)
    assert await window.read("#trouble", "hidden")
    assert await window.run("document.querySelectorAll('#summary [data-kind=bad]').length") == 0


async def test_charts_have_axes_and_show_the_values_at_the_pointer(
    window: Browser, scene: Scene
) -> None:
    await _open(window, scene)
    titles = await window.read_all("#charts strong")
    assert titles == ["Requests", "Time to first token", "Running and waiting", "Errors"]
    await window.until("document.querySelectorAll('#charts .line').length === 9")
    queues = "document.querySelectorAll('#charts .chart')[2]"
    texts = f"[...{queues}.querySelectorAll('text')]"
    ticks = await window.run(f"{texts}.map((one) => one.textContent)")
    assert ticks == ["0", "50", "100", "2 min ago", "1 min", "now"]
    numbers = f"[...{queues}.querySelectorAll('b')].map((one) => one.innerText).join()"
    now = await window.run(numbers)
    await window.run(
        f"(() => {{ const one = {queues}.querySelector('svg'); one.scrollIntoView();"
        "const { x, y, width } = one.querySelector('.floor').getBoundingClientRect();"
        "one.dispatchEvent(new PointerEvent('pointermove',"
        "{ clientX: x + width * 59 / 119, clientY: y + 9 })); })()"
    )
    then = await window.run(numbers)
    assert then != now
    assert await window.run(f"{queues}.querySelector('.detail').innerText") == "60 s ago"
    pool = scene.pages.history.pool(SAMPLES)
    assert then.split(",")[0] == f"{pool.running[-61]:.0f}"
    assert window.complaints == []


@pytest.mark.parametrize("width", [1400, PHONE])
@pytest.mark.parametrize("highest", [1, 3, 7, 2_600])
async def test_no_text_of_a_chart_is_cut_or_covered(
    window: Browser, width: int, highest: int
) -> None:
    scene = Scene()
    scene.pool("a", "b")
    for second in range(9):
        scene.load("a", highest * second // 8, 0, 0.5)
        scene.pages.sample()
    async with serving(scene):
        await window.look(width)
        await window.open(scene.url)
        await window.until(LIVE)
        await window.until("document.querySelectorAll('#charts .line').length === 9")
        assert await window.crowded() == []
        texts = await window.run(
            "[...document.querySelectorAll('#charts .chart')].map((one) => "
            "[...one.querySelectorAll('text')].map((text) => "
            "[text.textContent, parseFloat(getComputedStyle(text).fontSize)]))"
        )
        ticks = [text for text, _ in texts[2] if text[0].isdigit() and " " not in text]
        assert int(ticks[-1].replace(",", "")) >= highest
        assert min(size for chart in texts for _, size in chart) >= 11
        tops = await window.read_all("#charts .plot", "getBoundingClientRect().top")
        assert len(set(tops)) == 1  # the plots of a row line up


async def test_columns_without_values_are_hidden(window: Browser, scene: Scene) -> None:
    shown = (
        "[...document.querySelectorAll('#{}-table thead th')]"
        ".filter((one) => !one.hidden).map((one) => one.firstChild.textContent.trim())"
    )
    await _open(window, scene)
    every = await window.run(shown.format("requests"))
    assert every == [
        *("Time", "Outcome", "Endpoint", "Model", "Flow", "Priority", "In queue", "Deciding"),
        *("First token", "Total"),
    ]
    assert "Failed/s" not in await window.run(shown.format("endpoints"))
    scene.source.records.clear()
    plain = {"fairness_id": "", "priority": 0, "queue_seconds": 0.0, "ttft_seconds": None}
    scene.source.remember(*(summary(number, **plain) for number in range(3)))
    await _open(window, scene)
    assert await window.run(shown.format("requests")) == [
        *("Time", "Outcome", "Endpoint", "Model", "Deciding", "Total")
    ]
    cells = await window.run(
        "[...document.querySelector('#requests-rows tr').cells].filter((one) => !one.hidden).length"
    )
    assert cells == 6


@pytest.mark.parametrize(
    ("limits", "width", "words"),
    [
        ({"max_requests": 4}, "100%", "4 of the 4 that the whole queue may hold (100%)"),
        ({"max_bytes": 5_000}, "80%", "4.0 kB of the 5.0 kB that the whole queue may hold (80%)"),
        ({}, "40%", "4 of the 10 that this band may hold (40%)"),
        (
            {"max_memory_bytes": 9_000},
            "66.6667%",
            "6.0 kB of memory of the 9.0 kB of memory that the whole queue may hold (67%)",
        ),
    ],
    ids=["requests", "bytes", "band", "memory"],
)
async def test_a_bar_shows_the_limit_that_binds(
    window: Browser, scene: Scene, limits: dict[str, int], width: str, words: str
) -> None:
    band = BandView(0, 4, 4_000, 10, 200_000, 1.0, (FlowView("x", 4, 4_000, 1.0),))
    view = QueuesView(
        is_on=True,
        queued_requests=4,
        queued_bytes=4_000,
        queued_memory_bytes=6_000,
        bands=(band,),
        outcomes={"RejectedCapacity": 1_028, "Dispatched": 7},
        **limits,
    )
    scene.source.queues_view = view
    scene.pages.sample()
    await _open(window, scene)
    filled = "document.querySelector('.band .bar.wide .fill').style.width"
    assert await window.run(filled) == width
    text = await window.read("#overview")
    assert words in text
    assert [one for one in ("refused, queue full", "1,028", "sent on") if one not in text] == []


async def test_the_head_identifies_the_picker(window: Browser, scene: Scene) -> None:
    started = "Date.now() / 1000 - 7260"
    scene.source.started_unix_seconds = await window.run(started)
    await _open(window, scene)
    assert await window.read("#about") == "llama-pool · 1.2.3 · up 2 h"
    link = await window.read("nav a[href^=http]", "href")
    assert link.endswith("/docs/admin.md")


async def test_all_numbers_are_of_one_moment(window: Browser, scene: Scene) -> None:
    for name in ("worker-1", "worker-2"):
        scene.load(name, 40, 30, 0.9)
        scene.inflight.acquire(f"default/{name}")
    scene.source.queues_view = replace(scene.source.queues_view, queued_requests=77)
    await _open(window, scene)
    await window.until("document.querySelectorAll('#charts .line').length === 9")
    figures = dict(
        await window.run(
            "[...document.querySelectorAll('#summary > div')]"
            ".map((one) => [...one.children].slice(0, 2).map((part) => part.innerText))"
        )
    )
    cell = (
        "[...document.querySelectorAll('#endpoints-rows td[data-label=\"{}\"] :is(.now, .value)')]"
        ".map((one) => Number(one.textContent)).filter(Number.isFinite)"
        ".reduce((sum, one) => sum + one, 0)"
    )
    legend = await window.run(
        "[...document.querySelectorAll('#charts .chart')[2].querySelectorAll('b')]"
        ".map((one) => one.innerText)"
    )
    running, waiting = [await window.run(cell.format(name)) for name in ("Running", "Waiting")]
    assert [legend[0], legend[1]] == [str(running), str(waiting)]
    assert figures["Waiting at endpoints"] == legend[1]
    assert figures["Waiting in the picker"].split()[0] == legend[2] == "14"
    assert figures["In flight"] == str(await window.run(cell.format("In flight"))) == "15"
    assert "14 requests waiting" in await window.read("#queues-summary")


async def test_an_endpoint_has_a_page_of_its_own(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    await window.run("document.querySelector('#endpoints-rows a[href$=worker-1]').click()")
    await window.until(EXPLAINED)
    text = await window.read("#explanation")
    for words in (
        "Endpoint default/worker-1",
        "healthy",
        "10.0.0.1:8000",
        "900",
        "72 ms / 1.02 s / 1.8",
    ):
        assert words in text, words
    await window.until(
        "[...document.querySelectorAll('#explanation .line')].filter("
        "(one) => one.getAttribute('d').length > 300).length >= 5"
    )
    links = "document.querySelectorAll('#explanation .links a')"
    assert await window.run(f"{links}.length") == 4
    await window.press("Escape")
    await window.until("document.activeElement.id === 'endpoints'")
    await window.open(f"{scene.url}/#/endpoints/nobody")
    await window.until("document.querySelector('#explanation').innerText.includes('no such')")
    assert window.complaints == []


async def test_a_request_is_found_by_its_id(window: Browser, scene: Scene) -> None:
    await _open(window, scene)
    field = "document.querySelector('#requests-text')"
    await window.run(f"{field}.value = 'chos', {field}.dispatchEvent(new Event('input'))")
    assert len(await window.read_all("#requests-rows > tr")) == 1
    await window.run(f"{field}.value = 'an/other', {field}.focus()")
    await window.press("Enter")
    await window.until("document.querySelector('#explanation .notice')")
    text = await window.read("#explanation")
    assert "request 'an/other' is unknown" in text


POOL_ROWS = ROWS.format("pools")
TEXTS = (
    "[...document.querySelectorAll('#pools-rows > tr')]"
    ".map((row) => [...row.children].map((cell) => cell.innerText.replace(/\\s+/g, ' ')))"
)
LONG = "-".join(["a-team-that-likes-long-names"] * 8)[:63] + "/" + "x" * 100 + ".of-a-model"


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


async def test_every_pool_is_listed_with_its_state(window: Browser, port: PoolsPort) -> None:
    await _visit(window, port.url)
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
        await _visit(window, port.url)
        await window.run(
            "[...document.querySelectorAll('#pools-rows a')]"
            f".find((one) => one.textContent === '{key}').focus()"
        )
        await window.press("Enter")
        await window.until(f"location.pathname === '/pools/{key}/' && {LIVE}")
        await window.until(f"{ROWS.format('endpoints')} === {endpoints}")
        assert await window.read("#pool") == key
        assert await window.run("document.title") == f"{key} · Pointsman"
        await window.run("document.querySelector('nav.which a').focus()")
        await window.press("Enter")
        await window.until(f"location.pathname === '/' && {POOL_ROWS} === 3")
    assert window.complaints == []


async def test_the_page_of_a_pool_is_live(window: Browser, port: PoolsPort) -> None:
    await _visit(window, f"{port.url}/pools/llama/")
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
async def test_the_pages_of_several_pools_are_accessible(
    window: Browser, port: PoolsPort, width: int, scheme: str
) -> None:
    await window.look(width, scheme=scheme)
    for path in ("/", "/pools/llama/", f"/pools/{LONG}/"):
        await window.open(f"{port.url}{path}")
        await window.until(LIVE)
        assert await window.faults() == [], path


async def test_every_pool_is_a_card_on_a_phone(window: Browser, port: PoolsPort) -> None:
    await _visit(window, port.url, PHONE)
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
    await _visit(window, port.url)
    number = int(port.url.rsplit(":", 1)[1])
    await port.server.stop()
    await window.until(GONE)
    said = await window.read("#status", "textContent")
    assert said.startswith("The picker does not answer. Trying again. What is shown is of ")
    assert await window.run("document.body.classList.contains('is-stale')")
    assert await window.run(POOL_ROWS) == 3
    await port.server.start("127.0.0.1", number)
    await window.until(LIVE)
    assert not await window.run("document.body.classList.contains('is-stale')")


async def test_the_text_of_a_trouble_is_not_markup(window: Browser, port: PoolsPort) -> None:
    canary = '<img src=x onerror="window.pwned=1">'
    port.pools["llama"].source.said_problem = canary
    await _visit(window, port.url)
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
            await _visit(window, f"{place}/")
            await window.run("document.querySelector('#pools-rows a').click()")
            await window.until(f"location.pathname === '/some/place/pools/llama/' && {LIVE}")
            await window.run("document.querySelector('nav.which a').click()")
            await window.until(f"location.pathname === '/some/place/' && {LIVE}")
            await _visit(window, f"{place}/pools/research/mixtral")
            assert await window.run("location.pathname") == "/some/place/pools/research/mixtral/"
        finally:
            await runner.cleanup()
