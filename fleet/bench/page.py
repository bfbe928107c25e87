# Apart: markup, of which the rest of the bench knows nothing.
"""One page about a run that needs nothing else: tables and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from fleet.bench.summary import Stage

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 260, 56, 34
_MOST_POINTS = 600
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem;
  color: #111827; background: #fff }
pre { overflow-x: auto; background: #f3f4f6; padding: 1rem; border-radius: .4rem }
figure { display: inline-block; margin: 0 1rem 1.5rem 0 } figcaption { font-weight: 600 }
svg { max-width: 100%; height: auto } text { font-size: 11px; fill: #374151 }
"""

Series = tuple[str, Sequence[tuple[float, float]]]


def page(title: str, parts: Iterable[tuple[str, Sequence[Stage]]]) -> str:
    """A whole HTML document: each part's report as text, and plots of its stages' requests."""
    body = "".join(f"<pre>{escape(text)}</pre>{''.join(_plots(some))}" for text, some in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _plots(stages: Sequence[Stage]) -> Iterable[str]:
    if not stages:
        return
    for metric, name in (("ttft", "Time to first token"), ("e2e", "End-to-end latency")):
        curves = [(s.name, _distribution(_times(s, metric))) for s in stages]
        yield _figure(f"{name}, share of requests", curves, "ms", "share")
    gaps = [(s.name, _distribution([g for o in s.counted() for g in o.gaps])) for s in stages]
    yield _figure("Inter-token latency, share of gaps", gaps, "ms", "share")
    over_time = [
        (s.name, _thin([(o.intended - s.begun, 1e3 * t) for o in s.counted()
                        if (t := o.times["ttft"]) is not None and o.is_good]))
        for s in stages
    ]  # fmt: skip
    yield _figure("Time to first token, by intended time", over_time, "s", "ms", dots=True)
    flights = [(s.name, _thin([(p.at, float(p.in_flight)) for p in s.pulses])) for s in stages]
    yield _figure("Requests in flight", flights, "s", "requests")


def _times(stage: Stage, metric: str) -> list[float]:
    times = (one.times[metric] for one in stage.counted() if one.is_good)
    return [time for time in times if time is not None]


def _distribution(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Milliseconds and the share of values up to them, to the 99.9th percentile."""
    if not seconds:
        return []
    shares = np.linspace(0, 0.999, 200)
    values = np.quantile(np.asarray(seconds), shares) * 1e3
    return list(zip(map(float, values), map(float, shares), strict=True))


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return points[:: max(1, len(points) // _MOST_POINTS)]


def _figure(title: str, series: Sequence[Series], x: str, y: str, dots: bool = False) -> str:
    points = [point for _, some in series for point in some]
    most_x = max((px for px, _ in points), default=1.0) or 1.0
    most_y = max((py for _, py in points), default=1.0) or 1.0
    wide, high = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - 8

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + wide * point[0] / most_x, 8 + high * (1 - point[1] / most_y)

    marks = []
    for quarter in range(5):
        at_x, at_y = most_x * quarter / 4, most_y * quarter / 4
        px, py = place((at_x, at_y))
        marks.append(
            f'<path d="M{_LEFT},{py:.1f}H{_WIDTH - 8}" stroke="#e5e7eb"/>'
            f'<text x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{at_y:.3g}</text>'
            f'<text x="{px:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{at_x:.3g}</text>'
        )
    for number, (_, some) in enumerate(series):
        colour, placed = _COLOURS[number % len(_COLOURS)], [place(point) for point in some]
        if dots:
            circles = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="1.6"/>' for a, b in placed)
            marks.append(f'<g fill="{colour}" fill-opacity=".6">{circles}</g>')
        else:
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
            marks.append(f'<polyline fill="none" stroke="{colour}" points="{line}"/>')
    legend = " ".join(
        f'<span style="color:{_COLOURS[n % len(_COLOURS)]}">{escape(name)}</span>'
        for n, (name, _) in enumerate(series)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}">'
        f'{"".join(marks)}<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{x}</text>'
        f'<text x="4" y="12">{y}</text></svg><div>{legend}</div></figure>'
    )
