"""Inputs are embedded and answered in both forms."""

import base64
import math
from array import array
from typing import Any

import msgspec
import openai
import pytest

from worker.config import PoolerConfig
from worker.sim import tokenizer as sim
from worker.types import FinishReason, Pooling

PATH = "/v1/embeddings"
STATES = [3.0, -4.0, 12.0, 0.0]


@pytest.fixture
def bench(bench: Any) -> Any:
    ended = bench.say([], FinishReason.STOP, cached=1)
    bench.engine.steps = [msgspec.structs.replace(ended, pooled=STATES)]
    return bench


async def post(bench: Any, body: dict[str, Any], path: str = PATH, **settings: Any) -> Any:
    return await bench.answer(path, body, embedding_size=4, **settings)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("to be", ["to be"]),
        (["to be", "or not"], ["to be", "or not"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_inputs_have_four_forms(bench: Any, given: Any, prompts: list[Any]) -> None:
    answer = await post(bench, {"input": given, "model": "tiny"})
    encode = sim.SimTokenizer().encode
    ids = [encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in prompts]
    assert [request.prompt_token_ids for request in bench.engine.requests] == ids
    assert {request.pooling for request in bench.engine.requests} == {Pooling.LAST}
    assert [entry["index"] for entry in answer["data"]] == list(range(len(prompts)))
    assert answer["object"] == "list"
    num_tokens = sum(map(len, ids))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    assert usage.items() <= answer["usage"].items()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(prompts)}


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {}, [3 / 13, -4 / 13, 12 / 13, 0]),
        ({"dimensions": 2}, {}, [0.6, -0.8]),
        ({"dimensions": 4.0}, {}, [3 / 13, -4 / 13, 12 / 13, 0]),
        ({"use_activation": False}, {}, STATES),
        ({"normalize": False, "dimensions": 3}, {}, STATES[:3]),
        ({}, {"pooler": PoolerConfig("MEAN", use_activation=False)}, STATES),
        ({"use_activation": True}, {"pooler": PoolerConfig("MEAN", use_activation=False)}, None),
    ],
)
async def test_embeddings_are_cut_then_normalised(
    bench: Any, fields: dict[str, Any], settings: dict[str, Any], expected: list[float] | None
) -> None:
    answer = await post(bench, {"input": "a", **fields}, **settings)
    expected = expected or [value / 13 for value in STATES]
    assert answer["data"][0]["embedding"] == pytest.approx(expected)
    if settings:
        assert bench.engine.requests[0].pooling is Pooling.MEAN


async def test_base64_is_of_little_endian_float32(bench: Any) -> None:
    answer = await post(bench, {"input": "a", "encoding_format": "base64"})
    floats = array("f", base64.b64decode(answer["data"][0]["embedding"]))
    assert floats.tolist() == pytest.approx([value / 13 for value in STATES], rel=1e-6)


async def test_pooling_has_a_form_of_its_own(bench: Any) -> None:
    answer = await post(bench, {"input": "a", "task": "embed"}, "/pooling")
    assert answer["data"][0].keys() == {"index", "object", "data"}
    assert answer["data"][0]["object"] == "pooling"
    assert answer["id"].startswith("pool-")


async def test_a_context_can_be_filled(bench: Any) -> None:
    await post(bench, {"input": [1] * 64})
    refused = await bench.post(PATH, {"input": [1] * 65})
    assert refused.status_code == 400
    assert "maximum context length is 64" in refused.json()["error"]["message"]
    await post(bench, {"input": [1] * 65, "truncate_prompt_tokens": -1})
    assert len(bench.engine.requests[-1].prompt_token_ids) == 64


async def test_openais_client_reads_embeddings(bench: Any) -> None:
    async with (
        bench.listening(bench.api(embedding_size=4)) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client,
    ):
        answer = await client.embeddings.create(model="tiny", input=["a", "b"], dimensions=3)
    assert len(answer.data) == 2
    assert math.hypot(*answer.data[1].embedding) == pytest.approx(1)


async def test_embeddings_are_counted_like_other_requests(bench: Any) -> None:
    api = bench.api(embedding_size=4)
    async with bench.client_of(api) as client:
        await client.post(PATH, json={"input": "a"})
    page = api.page()
    assert 'http_requests_total{handler="/v1/embeddings",method="POST",status="2xx"} 1' in page
    labels = 'model_name="tiny",engine="0"'
    assert f'vllm:request_success_total{{{labels},finished_reason="stop"}} 1' in page
    assert f"vllm:request_generation_tokens_sum{{{labels}}} 0" in page
