"""token-producer asks a real worker's render routes for the tokens of its model."""

from array import array
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from picker.app.json_client import JsonClient
from picker.framework.attributes import Attributes
from picker.framework.interfaces import AsyncDataProducer, Parser
from picker.framework.services import HttpError, Services
from picker.plugins.parsers.http_parsers import AnthropicParser, OpenAIParser
from picker.types import InferenceRequest
from tests.support.picker.plugin_scenes import configured
from tests.support.worker.sim_worker import SimWorker, sim_worker

pytestmark = [pytest.mark.model, pytest.mark.full]
SYSTEM, QUESTION = "Be kind.", "What is the capital of France?"


@pytest.fixture(scope="module")
def worker(model_path: Any) -> Iterator[SimWorker]:
    with sim_worker("--model", str(model_path), "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[JsonClient]:
    async with JsonClient() as running:
        yield running


async def tokens_of(
    worker: SimWorker, client: JsonClient, parser: Parser, path: str, payload: dict[str, Any]
) -> list[list[int]]:
    parameters = {"modelName": "tiny", "vllm": {"url": worker.url, "timeout": "30s"}}
    producer = configured("token-producer", parameters, services=Services(client))
    assert isinstance(producer, AsyncDataProducer)
    body = parser.parse(path, {}, msgspec.json.encode(payload))
    request = InferenceRequest("r", {}, body, body.model, body.model)
    request = await producer.look_up(request, [], Attributes())
    return [array("I", prompt).tolist() for prompt in request.prompts]


async def test_prompts_have_the_tokens_of_the_model(worker: SimWorker, client: JsonClient) -> None:
    path, parser = "/v1/completions", OpenAIParser()
    (single,) = await tokens_of(worker, client, parser, path, {"prompt": "Hello world"})
    both = await tokens_of(worker, client, parser, path, {"prompt": ["Hello world", "Bye"]})
    assert 1 < len(single) < len("Hello world")
    assert both[0] == single
    assert both[1] != single
    assert await tokens_of(worker, client, parser, path, {"prompt": single}) == [single]


async def test_anthropics_messages_have_the_tokens_of_the_same_chat(
    worker: SimWorker, client: JsonClient
) -> None:
    chat = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    }
    messages = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": SYSTEM}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
    }
    (expected,) = await tokens_of(worker, client, OpenAIParser(), "/v1/chat/completions", chat)
    (converted,) = await tokens_of(worker, client, AnthropicParser(), "/v1/messages", messages)
    assert converted == expected
    assert len(expected) > 10


async def test_a_chat_that_the_worker_refuses_has_no_tokens(
    worker: SimWorker, client: JsonClient
) -> None:
    payload = {"messages": [{"role": "user", "content": [{"type": "odd"}]}]}
    with pytest.raises(HttpError):
        await tokens_of(worker, client, OpenAIParser(), "/v1/chat/completions", payload)
