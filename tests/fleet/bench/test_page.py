"""The report in a real browser, for runs with awkward numbers."""

from array import array
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio

from fleet.bench.client import Record
from fleet.bench.driver import ClientPulse
from fleet.bench.page import ReportPart, RunFacts, page
from fleet.bench.slo import Slo, read_bounds
from fleet.bench.summary import Stage, summary
from tests.support.fleet.browser import Browser, browser

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

DRAWN = "document.querySelectorAll('svg.plot .line').length > 3"
SLO = Slo(read_bounds("ttft<1s,ttft_p95<900ms,itl<60ms,e2e_p95<8s"))
ARGV = ("bench", "--rate", "7..93", "--header", "authorization: Bearer s3cret", "--slo", "ttft<1s")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window() -> AsyncIterator[Browser]:
    async with browser() as one:
        yield one


def stage(name: str, first: float, requests: int = 232) -> Stage:
    records = []
    for number in range(requests):
        at = number / 4
        ttft = first * (1 + 6 * (number / requests) ** 4)
        gaps = array("d", [0.0131 + 0.002 * (number % 3)] * 7)
        record = Record(at, at, at + ttft, at + ttft + 0.1, at + ttft + 0.1, gaps, 200)
        record.prompt_tokens, record.cached_tokens, record.output_tokens = 1_320, 660, 8
        records.append(record)
    pulses = [ClientPulse(number / 4, 0.0, number % 29) for number in range(requests)]
    return Stage(name, 0.0, requests / 4 + 9, 0.0, records, pulses, None)


def written(path: Path, *parts: Sequence[Stage], slo: Slo | None = SLO) -> str:
    run = RunFacts(
        ARGV, datetime(2026, 3, 9, tzinfo=UTC), {"Model": "</script>x"}, slo, ["Bearer s3cret"]
    )
    every = [ReportPart("text", some, [summary(one, slo) for one in some]) for some in parts]
    path.write_text(page(run, every), encoding="utf-8")
    return path.as_uri()


async def show(window: Browser, path: Path, *parts: Sequence[Stage], slo: Slo | None = SLO) -> None:
    await window.look(1400)
    await window.open(written(path / "page.html", *parts, slo=slo))
    await window.until(DRAWN)


@pytest.mark.parametrize("width", [1400, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "firsts", [(0.0579,), (0.0027, 0.249, 1.32), (0.0263, 47.3)], ids=["one", "three", "apart"]
)
async def test_no_text_is_cut_or_covered(
    window: Browser, tmp_path: Path, firsts: Sequence[float], width: int, scheme: str
) -> None:
    stages = [stage(f"{index + 1}/s", first) for index, first in enumerate(firsts)]
    await window.look(width, scheme=scheme)
    await window.open(written(tmp_path / "page.html", stages))
    await window.until(f"document.querySelectorAll('svg.plot .line').length >= {len(firsts)}")
    assert await window.crowded() == []
    assert await window.faults() == []
    assert window.complaints == []
    sizes = await window.run(
        "[...document.querySelectorAll('svg.plot text')].map((one) => "
        "one.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 11
    back = await window.run("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(245, 247, 248)", "dark": "rgb(17, 22, 26)"}[scheme]


async def test_ticks_are_round_and_counts_are_whole(window: Browser, tmp_path: Path) -> None:
    await show(window, tmp_path, [stage("4/s", 0.0579)], slo=None)
    ticks = await window.run(
        "[...document.querySelectorAll('svg.plot')].map((drawing) => "
        "[...drawing.querySelectorAll('text')].map((one) => one.textContent))"
    )
    shares = ["0%", "25%", "50%", "75%", "100%"]
    assert ticks[0] == [*shares, "0", "100 ms", "200 ms", "300 ms", "p50", "p95"]
    assert ticks[3] == [
        *("0", "100 ms", "200 ms", "300 ms", "400 ms"),
        *("0", "10 s", "20 s", "30 s", "40 s", "50 s"),
    ]
    assert ticks[4][:4] == ["0", "10", "20", "30"]


async def test_objectives_and_percentiles_are_marked(window: Browser, tmp_path: Path) -> None:
    await show(window, tmp_path, [stage("4/s", 0.249)])
    labels = await window.run(
        "[...document.querySelectorAll('svg.plot')].map((drawing) => "
        "[...drawing.querySelectorAll('.mark-label')].map((one) => one.textContent))"
    )
    assert labels == [
        ["p50", "p95", "SLO 1 s", "SLO p95 900 ms"],
        ["p50", "p95", "SLO p95 8 s →"],
        ["p50", "p95", "SLO 60 ms →"],
        ["SLO 1 s", "SLO p95 900 ms"],
        [],
    ]
    knots = await window.run(
        "[...document.querySelectorAll('svg.plot')[0].querySelectorAll('.knot title')]"
        ".map((one) => one.textContent)"
    )
    assert [one.split(":")[0] for one in knots] == ["p50", "p95", "p99"]
    text = await window.run("document.body.innerText")
    assert "✕ Objectives missed" in text
    assert "4/s: ttft_p95<900ms: " in text


async def test_a_run_without_an_answer_says_why(window: Browser, tmp_path: Path) -> None:
    failed = stage("9/s", 0.1, 7)
    for record in failed.outcomes:
        record.first_token = None
        record.status, record.error = 502, "status 502: <no worker>"
    await window.look(1400)
    await window.open(written(tmp_path / "page.html", [failed], slo=None))
    await window.until("document.querySelectorAll('svg.plot .line').length > 0")
    titles = await window.run(
        "[...document.querySelectorAll('figcaption strong')].map((one) => one.textContent)"
    )
    assert titles == ["Requests in flight"]
    text = await window.run("document.body.innerText")
    assert "7 × status 502: <no worker>" in text
    assert "Goodput" not in text


async def test_one_request_has_an_axis_of_a_second(window: Browser, tmp_path: Path) -> None:
    await show(window, tmp_path, [stage("1 session", 0.1, 1)], slo=None)
    last = await window.run(
        "[...document.querySelectorAll('svg.plot')[3].querySelectorAll('text')].at(-1).textContent"
    )
    assert last == "1 s"


async def test_a_plot_of_a_sample_names_the_percentiles_of_all(
    window: Browser, tmp_path: Path
) -> None:
    """A simulation samples gaps for the plot; its table counts all of them."""
    one = stage("4/s", 0.249)
    for record in one.outcomes:
        record.gaps = array("d", [0.4, *[0.02] * 39])
    whole = summary(one, None)
    for record in one.outcomes:
        del record.gaps[2:]
    run = RunFacts(ARGV, datetime(2026, 3, 9, tzinfo=UTC), {})
    path = tmp_path / "page.html"
    path.write_text(page(run, [ReportPart("text", [one], [whole])]), encoding="utf-8")
    await window.open(path.as_uri())
    await window.until(DRAWN)
    legend = "document.querySelectorAll('.legend')[2].innerText"
    assert "p50 20 ms, p95 20 ms" in await window.run(legend)


async def test_the_head_has_the_command_line(window: Browser, tmp_path: Path) -> None:
    await show(window, tmp_path, [stage("<b>4/s", 0.249)])
    text = await window.run("document.querySelector('.report').innerText")
    assert "2026-03-09 00:00:00 +0000" in text
    assert "pointsman bench --rate 7..93 --header 'authorization: …' --slo 'ttft<1s'" in text
    assert "</script>x" in text
    assert "s3cret" not in await window.run("document.documentElement.outerHTML")
    assert "<b>4/s" in await window.run("document.querySelector('.legend').innerText")


async def test_a_curve_is_read_beneath_the_pointer(window: Browser, tmp_path: Path) -> None:
    await show(window, tmp_path, [stage("4/s", 0.249)])
    value = "document.querySelector('.legend b').innerText"
    rest = await window.run(value)
    assert rest.startswith("p50 ")
    await window.run(
        "(() => { const one = document.querySelector('svg.plot');"
        "const { x, y, width } = one.getBoundingClientRect();"
        "one.dispatchEvent(new PointerEvent('pointermove',"
        "{ clientX: x + width * 0.8, clientY: y + 50 })); })()"
    )
    assert (await window.run(value)).endswith("%")
    said = await window.run("document.querySelector('figcaption .detail').innerText")
    assert said.startswith("within 1.")
