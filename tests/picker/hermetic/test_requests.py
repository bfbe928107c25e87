"""Requests and responses, message by message: cases H1–H19 that need the whole picker.

The reference repeats a client's headers and leaves out only its own; this picker removes its own
and repeats none. The protocol itself is tested in `conformance.epp`.
"""

import json
from pathlib import Path

from tests.support.picker.ext_proc_stream import (
    completion,
    directed,
    response_head,
    response_pieces,
)
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import WholePicker, whole_picker


def sorted_body(model: str) -> bytes:
    members = {"max_tokens": 100, "model": model, "prompt": "test", "temperature": 0}
    return json.dumps(members, separators=(",", ":")).encode()


async def test_a_rewritten_request_goes_to_the_idlest_endpoint(tmp_path: Path) -> None:
    """H1: the body has the model of the rewrite header, sorted members and their length."""
    three = pods(page(3, 0.2), page(0, 0.1, model="my-model-12345"), page(10, 0.2))
    async with whole_picker(tmp_path, three, objectives={"my-model": 2}) as picker:
        rewrite = {"x-llm-d-model-name-rewrite": "my-model-12345"}
        said = await picker.ask(completion(), rewrite | {"x-llm-d-inference-objective": "my-model"})
        assert said == directed(three[1].host_port, sorted_body("my-model-12345"))
        names = {"model_name": "my-model", "target_model_name": "my-model-12345"}
        assert await picker.requests(**names, priority="2") == 1
        assert await picker.requests() == 1
        assert await picker.series("llm_d_epp_ready_endpoints", name="default") == 3
        assert await picker.series("inference_pool_ready_pods", name="default") == 3


async def test_the_adapter_of_a_rewrite_decides(tmp_path: Path) -> None:
    two = pods(page(0, 0.1, ("T",)), page(0, 0.1, ("my-model",)))
    async with whole_picker(tmp_path, two) as picker:
        said = await picker.ask(completion(), {"x-llm-d-model-name-rewrite": "T"})
        assert said == directed(two[0].host_port, sorted_body("T"))
        assert await picker.ask(completion()) == directed(two[1].host_port, completion())


async def test_a_list_of_fallbacks_is_routed(tmp_path: Path) -> None:
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


USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
EVENTS = [
    b'data: {"id":"1","choices":[{"text":"a"}],"usage":null}\n\n',
    b'data: {"id":"1","choices":[],"usage":'
    + json.dumps(USAGE).encode()
    + b"}\n\ndata: [DONE]\n\n",
]
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


async def tokens_of(picker: WholePicker) -> tuple[float | None, float | None]:
    asked = await picker.series("llm_d_epp_request_input_tokens_sum")
    return asked, await picker.series("llm_d_epp_request_output_tokens_sum")


async def test_a_stream_of_events_is_passed_through(tmp_path: Path) -> None:
    """H19: every chunk is echoed, the last one with the end; usage is counted once."""
    async with whole_picker(tmp_path, pods(page())) as picker, picker.stream() as stream:
        await stream.ask(completion(stream=True))
        assert await stream.response_headers(STREAM) == response_head()
        for event in EVENTS:
            await stream.response_body(event)
            assert await stream.read(1) == response_pieces(event, ends=False)
        await stream.response_body(b"", ends=True)
        assert await stream.read(1) == response_pieces(b"")
        assert await tokens_of(picker) == (7, 10)
        assert await picker.series("llm_d_epp_request_ttft_seconds_count", streaming="true") == 1
        assert await picker.series("llm_d_epp_request_streaming_tpot_seconds_count") == 1
