"""One self-contained HTML page about a run, with the charts of the picker's page."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any, Final

import msgspec
import numpy as np

from fleet.bench.slo import Slo
from fleet.bench.summary import Spread, Stage, Summary

_MAX_POINTS: Final = 600
_SHARES: Final = np.linspace(0, 0.999, 160)
_KNOTS: Final = (0.5, 0.95, 0.99)
# Ratio of the slowest line's p99 to the fastest one's median that needs a logarithmic axis.
_WIDE_RANGE: Final = 40
_COLOURS: Final = 7  # as many as the picker's page has
_MAX_ERRORS: Final = 5
_SHORTEST: Final = 1.0  # seconds of an axis
_MODULES: Final = ("dom.js", "format.js", "chart.js")  # files of the picker's page, in their order
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_BRAND: Final = (
    '<svg viewBox="0 0 32 32" width="30" height="30" aria-hidden="true"><path d="M3 24h26"/>'
    '<path d="M7 24c9 0 11-15 21-15"/><circle cx="7" cy="24" r="2.4"/></svg>'
)
Point = tuple[float, float]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFacts:
    argv: Sequence[str]
    begun: datetime
    facts: Mapping[str, str]
    slo: Slo | None = None
    secrets: Sequence[str] = ()  # values of the command line that appear nowhere else

    @property
    def title(self) -> str:
        return f"pointsman {self.argv[0]}"

    @property
    def command(self) -> list[str]:
        """The command line, quoted for a shell, without the secrets."""
        words = ["pointsman", *self.argv]
        for secret in filter(None, self.secrets):
            words = [word.replace(secret, "…") for word in words]
        return list(map(shlex.quote, words))

    def public(self) -> Json:
        began = self.begun.isoformat(timespec="seconds")
        return {"command": " ".join(self.command), "version": version("pointsman"), "begun": began}


@dataclass(frozen=True, slots=True)
class ReportPart:
    text: str
    stages: Sequence[Stage] = ()
    summaries: Sequence[Summary] = ()
    title: str = ""


def page(run: RunFacts, parts: Sequence[ReportPart]) -> str:
    plots: list[Json] = []
    body = []
    for number, part in enumerate(parts):
        place = f"plots-{number}"
        plots += ({"place": place, **plot} for plot in _plots(part, run.slo))
        body.append(_section(part, place))
    # A script must not contain its own end tag.
    data = msgspec.json.encode(plots).decode().replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.title)}</title><style>{_file('style.css')}</style></head><body>"
        f'<header class="report"><div class="brand">{_BRAND}<h1>{escape(run.title)}</h1></div>'
        f"{_head(run)}</header><main>{_verdict(run.slo, parts)}{''.join(body)}"
        "<noscript><p class=notice>The plots need JavaScript.</p></noscript></main>"
        f'<script type="application/json" id="data">{data}</script>'
        f'<script type="module">{_script()}</script></body></html>\n'
    )


def _file(name: str) -> str:
    return files("picker.admin").joinpath("page", name).read_text("utf-8")


def _script() -> str:
    """Wrap a module whose names differ from those of the others, so that no import is needed."""
    texts = [*map(_file, _MODULES), files("fleet.bench").joinpath("plots.js").read_text("utf-8")]
    return "".join(_IMPORT.sub("", text) for text in texts)


# Text and tables


def _head(run: RunFacts) -> str:
    facts = {
        **run.facts,
        "Started": f"{run.begun:%Y-%m-%d %H:%M:%S %z}",
        "Version": f"pointsman {version('pointsman')}",
    }
    words = " ".join(f"<span>{escape(word)}</span>" for word in run.command)
    return f'{_facts(facts, "facts")}<p class="command"><code>{words}</code></p>'


def _facts(facts: Mapping[str, str], kind: str) -> str:
    cells = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="{kind}">{"".join(cells)}</dl>'


def _verdict(slo: Slo | None, parts: Sequence[ReportPart]) -> str:
    if slo is None:
        return ""
    missed = [
        f"{stage.name}: {text}"
        for part in parts
        for stage, one in zip(part.stages, part.summaries, strict=True)
        for text in one.missed
    ]
    if not missed:
        bounds = ", ".join(map(str, slo.bounds))
        return f'<p class="notice good"><strong>✓ Objectives met:</strong> {escape(bounds)}</p>'
    lines = "".join(f"<li>{escape(text)}</li>" for text in missed)
    return f'<div class="notice bad"><strong>✕ Objectives missed</strong><ul>{lines}</ul></div>'


def _section(part: ReportPart, place: str) -> str:
    title = f"<h2>{escape(part.title)}</h2>" if part.title else ""
    text = f'<pre tabindex="0">{escape(part.text)}</pre>'
    if not part.stages:
        return f"<section>{title}{text}</section>"
    rows = [(one.name, each) for one, each in zip(part.stages, part.summaries, strict=True)]
    numbers = _of_one(rows[0][1]) if len(rows) == 1 else _of_several(rows)
    table = _spreads(rows[0][1]) if len(rows) == 1 else _stages(rows)
    return (
        f'<section class="summary">{title}{_facts(numbers, "tiles")}{_errors(rows)}{table}'
        f'<div class="charts reports" id="{place}"></div>'
        f"<details><summary>Report as text</summary>{text}</details></section>"
    )


def _errors(rows: Iterable[tuple[str, Summary]]) -> str:
    times = Counter[str]()
    for _, one in rows:
        times.update(one.errors)
    lines = "".join(
        f"<li>{many:,} × {escape(text)}</li>" for text, many in times.most_common(_MAX_ERRORS)
    )
    title = "<strong>✕ Requests failed</strong>"
    return f'<div class="notice bad">{title}<ul>{lines}</ul></div>' if lines else ""


def _of_one(one: Summary) -> dict[str, str]:
    numbers = {
        "Completed/s": f"{one.completed_rate:,.2f}",
        "TTFT p95": _time(one.ttft, "p95"),
        "ITL p95": _time(one.itl, "p95"),
        "E2E p95": _time(one.e2e, "p95"),
        "Tokens/s": f"{one.output_tokens_per_second:,.0f}",
        "Cached": _share(one.cached_share),
        "Failed": f"{sum(one.errors.values()):,} of {one.requests:,}",
    }
    return numbers if one.goodput is None else {**numbers, "Goodput": _share(one.goodput)}


def _of_several(rows: Sequence[tuple[str, Summary]]) -> dict[str, str]:
    every = [one for _, one in rows]
    failed = sum(sum(one.errors.values()) for one in every)
    swift = [(one.ttft.p95, name) for name, one in rows if one.ttft is not None]
    tokens, productive = max((one.output_tokens_per_second, name) for name, one in rows)
    numbers = {"Failed": f"{failed:,} of {sum(one.requests for one in every):,}"}
    numbers[f"Most tokens/s: {productive}"] = f"{tokens:,.0f}"
    if swift:
        seconds, name = min(swift)
        numbers[f"Least TTFT p95: {name}"] = _words(seconds)
        seconds, name = max(swift)
        numbers[f"Longest TTFT p95: {name}"] = _words(seconds)
    return numbers


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _spreads(one: Summary) -> str:
    names = ("mean", "p50", "p95", "p99", "max")
    rows = [
        (name, [_time(spread, each) for each in names])
        for name, spread in (
            ("Time to first token (TTFT)", one.ttft),
            ("Between tokens (ITL)", one.itl),
            ("Whole answer (E2E)", one.e2e),
        )
    ]
    return _table("Latencies", ("Latency", *names), rows)


def _stages(rows: Sequence[tuple[str, Summary]]) -> str:
    has_goodput = any(one.goodput is not None for _, one in rows)
    head = (
        *("Stage", "Offered/s", "Completed/s", "Failed", "Tokens/s", "Cached", "TTFT p50"),
        *("TTFT p95", "ITL p95", "E2E p95", *(["Goodput"] if has_goodput else [])),
    )
    body = [
        (
            name,
            [
                f"{one.offered_rate:,.2f}",
                f"{one.completed_rate:,.2f}",
                f"{sum(one.errors.values()):,}",
                f"{one.output_tokens_per_second:,.0f}",
                _share(one.cached_share),
                _time(one.ttft, "p50"),
                *(_time(spread, "p95") for spread in (one.ttft, one.itl, one.e2e)),
                *([_share(one.goodput)] if has_goodput else []),
            ],
        )
        for name, one in rows
    ]
    return _table("Stages", head, body)


def _table(label: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    columns = "".join(f'<th scope="col" class="number">{escape(one)}</th>' for one in head[1:])
    first = f'<th scope="col">{escape(head[0])}</th>'
    lines = (
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="scrolling" role="region" tabindex="0" aria-label="{label}"><table '
        f'class="scores numbers"><thead><tr>{first}{columns}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _time(spread: Spread | None, quantile: str) -> str:
    return "–" if spread is None else _words(getattr(spread, quantile))


def _words(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


# Plots


def _plots(part: ReportPart, slo: Slo | None) -> Iterator[Json]:
    stages = part.stages
    if not stages:
        return
    lines = [_line(number, stage.name) for number, stage in enumerate(stages)]
    gaps = [[gap for one in stage.counted() if one.is_good for gap in one.gaps] for stage in stages]
    for metric, name, values, what in (
        ("ttft", "Time to first token", [_times(one, "ttft") for one in stages], "requests"),
        ("e2e", "Whole answer", [_times(one, "e2e") for one in stages], "requests"),
        ("itl", "Time between tokens", gaps, "gaps"),
    ):
        if any(values):
            spreads = [getattr(one, metric) for one in part.summaries]
            plot = _distribution(values, spreads, _marks(slo, metric, "x"), what)
            yield {"title": name, "lines": lines, **plot}
    first = [
        [
            (one.intended - stage.begun, time)
            for one in stage.counted()
            if (time := one.times["ttft"]) is not None and one.is_good
        ]
        for stage in stages
    ]
    if any(first):
        last = max(at for points in first for at, _ in points)
        yield {
            "title": "First token over time",
            "lines": [line | {"form": "dots"} for line in lines],
            "x": {"unit": "seconds", "isTight": True, "to": max(last, _SHORTEST)},
            "y": {"unit": "seconds", "label": "by due time"},
            "isOverTime": True,
            "series": [_thin(points) for points in first],
            "marks": _marks(slo, "ttft", "y"),
            "rest": [f"{len(points):,}" for points in first],
            "words": "requests by the time they were due",
        }
    flights = [[(one.at, float(one.in_flight)) for one in stage.pulses] for stage in stages]
    most = [max((many for _, many in points), default=0) for points in flights]
    yield {
        "title": "Requests in flight",
        "lines": [line | {"form": "steps"} for line in lines],
        "x": {"unit": "seconds", "isTight": True},
        "y": {"unit": "count", "label": "over time"},
        "isOverTime": True,
        "series": [_thin(points) for points in flights],
        "rest": [f"at most {many:,.0f}" for many in most],
        "words": f"at most {max(most):,.0f}",
    }


def _line(number: int, name: str) -> Json:
    again = " again" if number >= _COLOURS else ""
    return {"label": name, "kind": f"series-{number % _COLOURS}{again}", "form": "line"}


def _times(stage: Stage, metric: str) -> list[float]:
    times = (one.times[metric] for one in stage.counted() if one.is_good)
    return [time for time in times if time is not None]


def _distribution(
    times: Sequence[Sequence[float]],
    spreads: Sequence[Spread | None],
    limits: Sequence[Json],
    what: str,
) -> Json:
    """Return the shares up to p99.9. `times` may be samples of the times behind `spreads`."""
    curves, knots, rest = list[list[Point]](), list[list[tuple[float, float, str]]](), list[str]()
    medians, tails = [], []
    for values, known in zip(times, spreads, strict=True):
        if known is None or not values:
            curves.append([])
            knots.append([])
            rest.append("none")
            continue
        at = np.quantile(values, _SHARES)
        curves.append([_rounded(x, y) for x, y in zip(at, _SHARES, strict=True)])
        marked = (known.p50, known.p95, known.p99)
        knots.append(
            [
                (*_rounded(x, y), f"p{100 * y:.0f}: {_words(x)}")
                for x, y in zip(marked, _KNOTS, strict=True)
            ]
        )
        rest.append(f"p50 {_words(marked[0])}, p95 {_words(marked[1])}")
        medians.append(marked[0])
        tails.append(marked[2])
    is_wide = bool(medians) and max(tails) > _WIDE_RANGE * max(min(medians), 1e-6)
    percent = [(0.25 * quarter, f"{25 * quarter}%") for quarter in range(5)]
    levels = [
        {"axis": "y", "at": at, "label": name, "kind": "level"}
        for at, name in ((0.5, "p50"), (0.95, "p95"))
    ]
    return {
        "x": {"unit": "seconds", "isTight": True, "log": is_wide},
        "y": {"unit": "percent", "to": 1, "ticks": percent, "label": f"share of {what}"},
        "series": curves,
        "knots": knots,
        "marks": [*levels, *limits],
        "rest": rest,
        "words": "; ".join(rest),
    }


def _marks(slo: Slo | None, metric: str, axis: str) -> list[Json]:
    return [
        {
            "axis": axis,
            "at": bound.seconds,
            "label": " ".join(filter(None, ("SLO", bound.quantile, _limit(bound.seconds)))),
            "kind": "limit",
        }
        for bound in (() if slo is None else slo.bounds)
        if bound.metric == metric
    ]


def _limit(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _thin(points: list[Point]) -> list[Point]:
    return [_rounded(x, y) for x, y in points[:: max(1, -(-len(points) // _MAX_POINTS))]]


def _rounded(x: float, y: float) -> Point:
    # The resolution of a picture, so that the file stays small.
    return float(f"{x:.5g}"), float(f"{y:.5g}")
