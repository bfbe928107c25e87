"""One request through a whole fleet is one tree of spans, whatever number of programs it meets."""

import json
import signal
from typing import Any

import httpx
import pytest

from tests.support.fleet.running_fleet import LIMIT_SECONDS, ready_fleet
from tests.support.otlp_collector import Spans, otlp_collector, tree_of

pytestmark = [pytest.mark.envoy, pytest.mark.full]
pytest.importorskip("base.otel")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
DECISION = "gateway.request_orchestration"
STAGES = ["queue", "prefill"]


def shape(spans: Spans) -> list[Any]:
    """The tree without the steps of the picker's decision: names, and lists of what is within."""
    children = tree_of(spans)

    def below(span_id: str | None) -> list[Any]:
        found: list[Any] = []
        for span in children.get(span_id, []):
            within = [] if span["name"] == DECISION else below(span["spanId"])
            found.append([span["name"], *within] if within else span["name"])
        return found

    return below(None)


async def test_a_disaggregated_request_is_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector() as (address, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        flags = ("--engine", "sim", "--prefill", "1", "--decode", "1", "--front", "--tracing")
        async with ready_fleet(*flags) as fleet:
            async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as http:
                answer = await http.post(
                    f"{fleet.url}/v1/completions",
                    json={"model": "sim", "prompt": "a long story " * 400, "max_tokens": 4},
                    headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
                )
            assert answer.status_code == 200, answer.text
            fleet.process.send_signal(signal.SIGINT)
            await fleet.process.wait()  # the parts send the last spans as they end
        ours = [span for span in spans if span["traceId"] == TRACE]
    assert json.dumps(shape(ours)) == json.dumps(
        [
            [
                "front.request",
                [
                    "front.attempt",
                    [
                        "gateway.request",
                        DECISION,
                        [
                            "llm_d.pd_proxy.request",
                            ["llm_d.pd_proxy.prefill", ["llm_request", *STAGES]],
                            [
                                "llm_d.pd_proxy.decode",
                                ["llm_request", "queue", "kv_transfer", "prefill", "decode"],
                            ],
                        ],
                    ],
                ],
            ]
        ]
    )
    assert {span["service"] for span in ours} == {
        "pointsman-front",
        "llm-d-epp",
        "pointsman-sidecar",
        "pointsman-worker",
    }
