"""token-producer: the tokens of prompts, estimated or from a server."""

from collections.abc import Mapping
from struct import pack
from typing import Any

import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import AsyncDataProducer, DataProducer, ProducesData
from picker.framework.services import HttpError, Services
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.types import Api, InferenceRequest, MultiModalFeature, ParsedBody
from tests.support.picker.plugin_scenes import configured, request_for

HELLO = pack("<3I", 1819043176, 1870078063, 6581362)
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/i.png"}}


class Server:
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any, float]] = []

    async def post_json(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        self.asked.append((url, body, timeout_seconds))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def make(server: Server | None = None, **parameters: Any) -> object:
    return configured("token-producer", parameters, "mine", Services(server or Server()))  # type: ignore[no-any-return]


def estimated(request: InferenceRequest, **parameters: Any) -> InferenceRequest:
    producer = make(**parameters)
    assert isinstance(producer, DataProducer)
    return producer.produce(request, [], Attributes())


async def asked(request: InferenceRequest, server: Server, **vllm: Any) -> InferenceRequest:
    producer = make(server, modelName="real", vllm={"url": "http://render:8000/", **vllm})
    assert isinstance(producer, AsyncDataProducer)
    return await producer.look_up(request, [], Attributes())


@pytest.mark.parametrize("parameters", [{}, {"estimate": {}}, {"modelName": "m"}])
def test_the_finding_does_not_depend_on_the_name(parameters: dict[str, Any]) -> None:
    """The prompt travels in the request, so consumers need not know the instance."""
    producer = make(**parameters)
    assert isinstance(producer, ProducesData)
    assert producer.produces == (TOKENIZED_PROMPT,)


def test_text_is_packed_four_bytes_a_token() -> None:
    """`hello world` is [1819043176, 1870078063, 6581362] in little endian, zero-padded."""
    request = estimated(request_for(Api.COMPLETIONS, {"prompt": "hello world"}))
    assert (request.prompts, request.features) == ((HELLO,), ((),))


def test_each_prompt_has_its_features() -> None:
    """A prompt without items has an empty tuple, so both can be zipped."""
    request = estimated(request_for(Api.COMPLETIONS, {"prompt": ["a", "b"]}))
    assert (request.prompts, request.features) == ((b"a\0\0\0", b"b\0\0\0"), ((), ()))
    chat = {"messages": [{"role": "user", "content": [IMAGE]}]}
    ((feature,),) = estimated(request_for(Api.CHAT_COMPLETIONS, chat)).features
    assert (feature.modality, feature.offset, feature.length) == ("image", 1, 225)


def test_the_estimate_is_configurable() -> None:
    video = {"type": "video_url", "video_url": {"url": "http://x/v"}}
    chat = {"messages": [{"role": "user", "content": [IMAGE, video]}]}
    body = ParsedBody(Api.CHAT_COMPLETIONS, "m", payload=chat)
    request = InferenceRequest("r", {"x-llm-d-video-duration-seconds": "1"}, body, "m", "m")
    estimate = {
        "image": {"mode": "static", "static": {"staticToken": 10}},
        "video": {"frames": {"sampled": {"sampleFPS": 1}}},
    }
    (features,) = estimated(request, estimate=estimate).features
    assert [feature.length for feature in features] == [10, 225]


def test_tokens_of_the_body_are_taken_as_they_are() -> None:
    feature = MultiModalFeature("image", "h", 0, 1)
    body = ParsedBody(Api.GENERATE, prompts=(b"abcd",), features=((feature,),), can_rewrite=False)
    request = estimated(InferenceRequest("r", {}, body, "", ""))
    assert (request.prompts, request.features) == ((b"abcd",), ((feature,),))
    empty = ParsedBody(Api.COMPLETIONS, payload={"prompt": [1]}, prompts=(b"abcd", b"efgh"))
    request = estimated(InferenceRequest("r", {}, empty, "", ""))
    assert (request.prompts, request.features) == ((b"abcd", b"efgh"), ((), ()))


def test_a_request_without_a_prompt_is_unchanged() -> None:
    for request in (
        request_for(Api.RAW, None),
        request_for(Api.IMAGES, {"prompt": "a cat"}),
        request_for(Api.CHAT_COMPLETIONS, {"messages": "nonsense"}),
        request_for(Api.COMPLETIONS, {"prompt": "x"}, prompts=(b"abcd",)),
    ):
        assert estimated(request) is request


async def test_a_server_renders_the_tokens_of_its_model() -> None:
    server = Server([{"token_ids": [1]}, {"token_ids": [2, 3]}])
    payload = {"model": "alias", "prompt": ["a", "b"]}
    request = await asked(request_for(Api.COMPLETIONS, payload), server)
    assert (request.prompts, request.features) == ((pack("<I", 1), pack("<2I", 2, 3)), ((), ()))
    body = {"model": "real", "prompt": ["a", "b"]}
    assert server.asked == [("http://render:8000/v1/completions/render", body, 5.0)]


@pytest.mark.parametrize(
    ("content", "vllm", "seconds"),
    [
        ("hi", {}, 5.0),
        ([{"type": "text", "text": "hi"}], {}, 30.0),
        ("hi", {"timeout": "1500ms"}, 1.5),
        ([IMAGE], {"mmTimeout": "1m"}, 60.0),
    ],
)
async def test_a_chat_with_blocks_has_more_time(
    content: Any, vllm: dict[str, str], seconds: float
) -> None:
    """The server may have to fetch media."""
    server = Server({"token_ids": [1]})
    chat = {"messages": [{"role": "user", "content": content}]}
    request = await asked(request_for(Api.CHAT_COMPLETIONS, chat), server, **vllm)
    assert request.prompts == (pack("<I", 1),)
    assert server.asked[0][::2] == ("http://render:8000/v1/chat/completions/render", seconds)


async def test_known_tokens_are_not_requested() -> None:
    server = Server()
    body = ParsedBody(Api.GENERATE, prompts=(b"abcd",))
    generate = await asked(InferenceRequest("r", {}, body, "", ""), server)
    assert generate.prompts == (b"abcd",)
    for request in (
        request_for(Api.COMPLETIONS, {"prompt": "x"}, prompts=(b"abcd",)),
        request_for(Api.EMBEDDINGS, {"input": "x"}),
        request_for(Api.RAW, None),
    ):
        assert await asked(request, server) is request
    assert server.asked == []


@pytest.mark.parametrize("answer", [HttpError("gone"), [], {}, "x", {"token_ids": []}])
async def test_a_failed_server_gives_no_tokens(answer: Any) -> None:
    request = request_for(Api.COMPLETIONS, {"prompt": "x"})
    with pytest.raises(HttpError):
        await asked(request, Server(answer))


def test_the_time_limit_is_the_longest_wait() -> None:
    producer = make(modelName="m", vllm={"mmTimeout": "45s"})
    assert isinstance(producer, AsyncDataProducer)
    assert producer.timeout_seconds == 45.0
    longer = make(modelName="m", vllm={"timeout": "2m"})
    assert isinstance(longer, AsyncDataProducer)
    assert longer.timeout_seconds == 120.0
