"""vLLM's gRPC service behind the picker (cases H20–H31): frames pass unchanged.

The reference gathers a response frame before it passes it on and sets `:path` anew; here pieces
pass as they come, and the path stays as it is.
"""

from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import (
    RESPONSE_TRAILERS,
    directed,
    response_head,
    response_pieces,
)
from tests.support.picker.grpc_messages import field, frame
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import FOUR_SCORERS, WholePicker, whole_picker

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
GRPC = {"content-type": "application/grpc"}
CONFIG = FOUR_SCORERS.replace("openai-parser", "vllmgrpc-parser")


TEXT = frame(field(1, b"id") + field(3, b"test prompt"))
STREAM = frame(field(1, b"id") + field(3, b"test prompt") + field(5, 1))
TOKENS = frame(field(2, field(1, b"text") + field(2, bytes([1, 2, 3]))))
COMPLETE = frame(field(2, field(1, bytes([9, 9])) + field(3, 7) + field(4, 10)))


async def tokens_of(picker: WholePicker) -> tuple[float | None, float | None]:
    asked = await picker.series("llm_d_epp_request_input_tokens_sum")
    return asked, await picker.series("llm_d_epp_request_output_tokens_sum")


@pytest.mark.parametrize("body", [TEXT, STREAM, TOKENS], ids=["H20", "H22", "tokenized"])
async def test_a_generate_request_goes_to_the_idlest(tmp_path: Path, body: bytes) -> None:
    three = pods(page(3, 0.2), page(0, 0.1), page(10, 0.2))
    name = "inference-objective-with-priority-4"
    async with whole_picker(tmp_path, three, CONFIG, objectives={name: 4}) as picker:
        headers = GRPC | {"x-llm-d-inference-objective": name}
        said = await picker.ask(body, headers, path=GENERATE)
        assert said == directed(three[1].host_port, body)
        labels = {"model_name": "", "target_model_name": "", "priority": "4"}
        assert await picker.requests(**labels) == 1


async def test_a_response_frame_in_two_pieces_is_counted(tmp_path: Path) -> None:
    """H28: trailers follow, and no piece is marked as the last."""
    async with whole_picker(tmp_path, pods(page()), CONFIG) as picker, picker.stream() as stream:
        await stream.ask(TEXT, GRPC, path=GENERATE)
        assert await stream.response_headers(GRPC) == response_head()
        for piece in (COMPLETE[:4], COMPLETE[4:]):
            await stream.response_body(piece)
            assert await stream.read(1) == response_pieces(piece, ends=False)
        await stream.response_trailers()
        assert await stream.read(1) == [RESPONSE_TRAILERS]
        assert await tokens_of(picker) == (7, 10)
        assert await picker.outcomes() == {"completed": 1}
        assert await picker.is_idle()


VERTEX = "/google.cloud.aiplatform.v1beta1.PredictionService"


@pytest.mark.parametrize(
    ("method", "members"),
    [
        ("ChatCompletions", b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'),
        ("RawPredict", b'{"model":"m","input":"hi"}'),
        ("StreamRawPredict", b'{"model":"m","input":"hi","stream":true}'),
    ],
)
async def test_vertex_ai_carries_json_in_frames(
    tmp_path: Path, method: str, members: bytes
) -> None:
    one = pods(page(model="m"))
    config = FOUR_SCORERS.replace("openai-parser", "vertexai-parser")
    body = frame(field(1, b"endpoints/e") + field(2, field(2, members)))
    usage = b'{"model":"n","usage":{"prompt_tokens":7,"completion_tokens":10}}'
    answer = frame(field(2, usage[:20])) + frame(field(2, usage[20:]))
    async with whole_picker(tmp_path, one, config) as picker, picker.stream() as stream:
        headers = GRPC | {"x-llm-d-model-name-rewrite": "n"}
        said = await stream.ask(body, headers, path=f"{VERTEX}/{method}")
        assert said == directed(one[0].host_port, body)
        pieces = [answer[at : at + 5] for at in range(0, len(answer), 5)]
        assert await stream.respond(pieces, GRPC) == answer
        assert await picker.requests(model_name="m") == 1
        assert await tokens_of(picker) == (7, 10)
