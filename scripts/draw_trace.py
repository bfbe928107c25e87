"""Draw docs/pictures/trace.svg: the spans of one request through a whole fleet, as they came.

    python scripts/draw_trace.py

The fleet has a front, a picker, one prefill and one decode worker, both simulated.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402

from tests.support.fleet.running_fleet import ready_fleet  # noqa: E402
from tests.support.otlp_collector import Spans, otlp_collector, tree_of  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "trace.svg"
DECISION = "gateway.request_orchestration"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FLEET = ("--engine", "sim", "--prefill", "1", "--decode", "1", "--front", "--tracing")
COLORS = {
    "pointsman-front": "#64748b",
    "llm-d-epp": "#0284c7",
    "pointsman-sidecar": "#7c3aed",
    "pointsman-worker": "#d97706",
}
WIDTH, LEFT, ROW = 960, 280, 24


async def one_request() -> Spans:
    """Return the spans of one disaggregated request; the fleet was used once before."""
    with otlp_collector() as (address, spans):
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
        async with ready_fleet(*FLEET) as fleet:
            async with httpx.AsyncClient(timeout=60) as http:
                for trace in ("0" * 31 + "1", TRACE):
                    sampled = "01" if trace == TRACE else "00"
                    answer = await http.post(
                        f"{fleet.url}/v1/completions",
                        json={
                            "model": "sim",
                            "prompt": f"{trace} a long story " * 300,
                            "max_tokens": 12,
                        },
                        headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-{sampled}"},
                    )
                    answer.raise_for_status()
            fleet.process.send_signal(signal.SIGINT)
            await fleet.process.wait()
        return [span for span in spans if span["traceId"] == TRACE]


def drawn(spans: Spans) -> str:
    children = tree_of(spans)
    begin = min(int(span["startTimeUnixNano"]) for span in spans)
    end = max(int(span["endTimeUnixNano"]) for span in spans)
    scale = (WIDTH - LEFT - 90) / (end - begin)
    lines: list[str] = []

    def add(parent: str | None, depth: int) -> None:
        for span in children.get(parent, []):
            y = 34 + ROW * len(lines)
            start, stop = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
            x, width = LEFT + (start - begin) * scale, max((stop - start) * scale, 2)
            color, name = COLORS[span["service"]], escape(span["name"])
            lines.append(
                f'<text x="{16 + 13 * depth}" y="{y + 12}">{name}</text>'
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" rx="3" fill="{color}"/>'
                f'<text x="{x + width + 5:.1f}" y="{y + 12}" fill="#475569" font-size="11">'
                f"{(stop - start) / 1e6:.1f} ms</text>"
            )
            if span["name"] != DECISION:  # its steps are many, and short
                add(span["spanId"], depth + 1)

    add(None, 0)
    height = 34 + ROW * len(lines) + 8
    legend = "".join(
        f'<rect x="{16 + 170 * at}" y="12" width="11" height="11" rx="2" fill="{color}"/>'
        f'<text x="{32 + 170 * at}" y="22" font-weight="600">{service}</text>'
        for at, (service, color) in enumerate(COLORS.items())
    )
    body = "\n".join(lines)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" \
font-family="system-ui, sans-serif" font-size="12.5" fill="#0f172a">
<rect width="{WIDTH}" height="{height}" rx="12" fill="#f8fafc" stroke="#cbd5e1"/>
{legend}
{body}
</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(drawn(asyncio.run(one_request())), encoding="utf-8")
