"""Requests that are let in, shed, or wanted only where their prefix is cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ext_proc_stream import completion, directed, refused
from metrics_pages import page, pods
from whole_picker import HEAD, whole_picker

SHED = refused(
    429, "ResourceExhausted - system saturated, sheddable request dropped", retry_after=1
)
NOT_CACHED = refused(412, "PreconditionFailed - no decode worker has the requested KV cache")
PRIORITIES = {"critical": 4, "standard": 0, "sheddable": -1}
FULL, FREE = page(10, 0.95), page(1, 0.1)


@pytest.mark.parametrize(
    ("pages", "objective", "is_shed"),
    [
        ([FULL, FULL], "sheddable", True),
        ([FULL, FULL], "standard", False),
        ([FULL, FULL], "", False),
        ([FREE, FREE], "sheddable", False),
        ([FULL, FREE], "sheddable", True),  # (2.0 + 0.2) / 2 of the pool
    ],
)
@pytest.mark.parametrize("header", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
async def test_only_sheddable_requests_are_shed_while_the_pool_is_full(
    tmp_path: Path, pages: Sequence[str], objective: str, is_shed: bool, header: str
) -> None:
    """429 without a reason beside it, as the reference's legacy admission answers."""
    async with whole_picker(tmp_path, pods(*pages), objectives=PRIORITIES) as picker:
        said = await picker.ask(completion(), {header: objective})
        assert (said == SHED) is is_shed
        assert said[0].WhichOneof("response") == (
            "immediate_response" if is_shed else "request_headers"
        )


async def test_whoever_is_shed_is_counted_and_holds_nothing(tmp_path: Path) -> None:
    """Under the name of the error, with its priority."""
    async with whole_picker(tmp_path, pods(FULL), objectives=PRIORITIES) as picker:
        headers = {"x-llm-d-inference-objective": "sheddable"}
        assert await picker.ask(completion(), headers) == SHED
        labels = {"error_code": "ResourceExhausted", "priority": "-1", "model_name": "my-model"}
        assert await picker.series("llm_d_epp_request_error_total", **labels) == 1
        assert await picker.requests() is None
        assert await picker.outcomes() == {"refused": 1}
        assert await picker.is_idle()


@pytest.mark.parametrize("fairness", ["x-llm-d-inference-fairness-id", "session-id", None])
async def test_a_request_is_somebodys(tmp_path: Path, fairness: str | None) -> None:
    """U10: of whom the header names, else of the agent's session, else of nobody in particular."""
    config = HEAD + "plugins: [{type: agent-identity}, {type: queue-scorer}]"
    async with whole_picker(tmp_path, pods(page()), config) as picker:
        await picker.ask(completion(), {fairness: "user-123"} if fairness else {})
        expected = "user-123" if fairness else "default-flow"
        assert await picker.requests(fairness_id=expected) == 1


@pytest.mark.parametrize(
    ("prefer", "is_conditional"), [("respond-async, if-available", True), ("if-available-2", False)]
)
async def test_a_conditional_request_is_served_only_from_a_cache(
    tmp_path: Path, prefer: str, is_conditional: bool
) -> None:
    """412 until an endpoint has its prefix; nothing is remembered of one that was refused."""
    body = completion(prompt="a long story " * 100)
    one = pods(page())
    async with whole_picker(tmp_path, one) as picker:
        served = directed(one[0].host_port, body)
        for _ in range(2):
            said = await picker.ask(body, {"prefer": prefer})
            assert said == (NOT_CACHED if is_conditional else served)
        if is_conditional:
            code = "PreconditionFailed"
            assert await picker.series("llm_d_epp_request_error_total", error_code=code) == 2
            assert await picker.is_idle()
        assert await picker.ask(body) == served
        assert await picker.ask(body, {"prefer": prefer}) == served
