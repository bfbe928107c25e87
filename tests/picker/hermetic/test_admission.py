"""Requests that are refused because the pool is full, in a whole picker."""

from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import completion, refused, response_head
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import whole_picker

REFUSED = refused(
    429,
    "RateLimitError",
    "The pool is full, and requests of negative priority are rejected",
    retry_after=1,
)
PRIORITIES = {"standard": 0, "sheddable": -1}


async def test_the_conformance_flag_selects_the_replies_of_the_reference(tmp_path: Path) -> None:
    full, priorities = pods(page(10, 0.95)), {"objectives": PRIORITIES, "conformance": True}
    async with whole_picker(tmp_path, full, **priorities) as picker:
        sheddable = {"x-llm-d-inference-objective": "sheddable"}
        (said,) = await picker.ask(completion(), sheddable)
        text = b"inference error: ResourceExhausted - system saturated, sheddable request dropped"
        assert said.immediate_response.body == text
        async with picker.stream() as stream:
            await stream.ask(completion())
            mark = {"x-went-into-resp-headers": "true"}
            assert await stream.response_headers() == response_head(mark)
            await stream.response_body(b"", True)
            await stream.read(1)


@pytest.mark.parametrize("header", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
async def test_a_full_pool_refuses_sheddable_requests_and_no_others(
    tmp_path: Path, header: str
) -> None:
    """The answer is a 429 without a reason, like that of the reference's legacy admission."""
    async with whole_picker(tmp_path, pods(page(10, 0.95)), objectives=PRIORITIES) as picker:
        assert await picker.ask(completion(), {header: "sheddable"}) == REFUSED
        labels = {"error_code": "ResourceExhausted", "priority": "-1", "model_name": "my-model"}
        assert await picker.series("llm_d_epp_request_error_total", **labels) == 1
        assert await picker.requests() is None
        assert await picker.outcomes() == {"refused": 1}
        assert await picker.is_idle()
        said = await picker.ask(completion(), {header: "standard"})
        assert said[0].WhichOneof("response") == "request_headers"
