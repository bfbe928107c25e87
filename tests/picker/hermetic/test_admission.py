"""Requests that are let in, shed, or wanted only where their prefix is cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import completion, refused
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import whole_picker

SHED = refused(
    429, "ResourceExhausted - system saturated, sheddable request dropped", retry_after=1
)
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
