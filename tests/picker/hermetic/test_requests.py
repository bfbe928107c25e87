"""Requests and their decisions, message by message: of the reference's cases H1–H14 those that need
the whole picker.

The whole picker runs in this process; its endpoints are real HTTP servers. Where the reference
repeats a client's headers and leaves out only its own, this picker removes its own and repeats
none; see `docs/protocol.md`. Objectives and rewrites (H1, H8, H20) stand in the endpoints
file; H43 belongs to flow control, and H49 to the room that watches Kubernetes objects. H44 and H46
are `test_known_configurations`, H47 is `test_endpoints`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from ext_proc_stream import completion, directed, refused
from metrics_pages import page, pods
from whole_picker import whole_picker

DROPPED = "failed to find endpoint candidates for serving the request"
Load = tuple[float, float, Sequence[str]]


def sorted_body(model: str) -> bytes:
    """What `completion` becomes when its model is replaced."""
    members = {"max_tokens": 100, "model": model, "prompt": "test", "temperature": 0}
    return json.dumps(members, separators=(",", ":")).encode()


async def test_a_rewritten_request_goes_to_the_idlest_endpoint(tmp_path: Path) -> None:
    """H1: with the model of the rewrite header, sorted members and their length."""
    three = pods(page(3, 0.2), page(0, 0.1), page(10, 0.2))
    async with whole_picker(tmp_path, three, objectives={"my-model": 2}) as picker:
        rewrite = {"x-llm-d-model-name-rewrite": "my-model-12345"}
        said = await picker.ask(completion(), rewrite | {"x-llm-d-inference-objective": "my-model"})
        assert said == directed(three[1].host_port, sorted_body("my-model-12345"))
        names = {"model_name": "my-model", "target_model_name": "my-model-12345"}
        assert await picker.requests(**names, priority="2") == 1
        assert await picker.requests() == 1
        assert await picker.series("llm_d_epp_ready_endpoints", name="default") == 3
        assert await picker.series("inference_pool_ready_pods", name="default") == 3


@pytest.mark.parametrize(
    ("loads", "model", "expected"),
    [
        pytest.param(
            [(0, 0.2, ("foo", "bar")), (0, 0.1, ("foo", "T")), (10, 0.2, ("foo", "bar"))],
            "T",
            1,
            id="H2: the adapter is loaded",
        ),
        pytest.param(
            [(6, 0.2, ("foo", "bar", "T")), (0, 0.85, ("foo",)), (10, 0.9, ("foo",))],
            "T",
            0,
            id="H4: a queue is better than a full cache",
        ),
        pytest.param(
            [(0, 0.1, ("a", "b", "c", "d")), (0, 0.1, ("a", "b", "c"))],
            "T",
            1,
            id="room for one more adapter",
        ),
        pytest.param(
            [(6, 0.0, ()), (3, 0.1, ()), (0, 0.99, ())], "T", 1, id="two signals make one sum"
        ),
    ],
)
async def test_load_and_adapters_decide(
    tmp_path: Path, loads: Sequence[Load], model: str, expected: int
) -> None:
    """Queue, KV cache and adapters, with equal weights."""
    some = pods(*(page(*load) for load in loads))
    async with whole_picker(tmp_path, some) as picker:
        body = completion(model)
        assert await picker.ask(body) == directed(some[expected].host_port, body)


async def test_the_adapter_of_a_rewrite_decides(tmp_path: Path) -> None:
    """Not the one that the client names."""
    two = pods(page(0, 0.1, ("T",)), page(0, 0.1, ("my-model",)))
    async with whole_picker(tmp_path, two) as picker:
        said = await picker.ask(completion(), {"x-llm-d-model-name-rewrite": "T"})
        assert said == directed(two[0].host_port, sorted_body("T"))
        assert await picker.ask(completion()) == directed(two[1].host_port, completion())


async def test_a_request_without_body_needs_an_endpoint(tmp_path: Path) -> None:
    """H5, with the status that the protocol names: 503 instead of the reference's 500."""
    async with whole_picker(tmp_path) as picker, picker.stream() as stream:
        await stream.request_headers(path="/v1/models", ends=True)
        expected = refused(503, f"ServiceUnavailable - {DROPPED}", "rejected-no-endpoints")
        assert await stream.rest() == expected
        assert await picker.series("llm_d_epp_request_error_total") == 1


async def test_a_list_of_fallbacks(tmp_path: Path) -> None:
    """`maxNumOfEndpoints: 3` of four: best first, the same in header and metadata."""
    four = pods(page(3, 0.2), page(0, 0.1), page(10, 0.2), page(10, 0.9))
    config = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}
"""
    async with whole_picker(tmp_path, four, config) as picker:
        ordered = ",".join(four[index].host_port for index in (1, 0, 2))
        assert await picker.ask(completion()) == directed(ordered, completion())
        async with picker.stream() as stream:
            await stream.ask(completion())
            assert (await picker.endpoints())["pod-1"]["inflight_requests"] == 1
            assert (await picker.endpoints())["pod-0"]["inflight_requests"] == 0
