"""Token ids of token-level routes become what the whole route answers."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.model.echo_model import ANSWER, TOOLS, write_echo_model
from tests.support.worker.sim_worker import sim_worker

TEXT, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    flags = write_echo_model(tmp_path_factory.mktemp("echo"))
    with (
        sim_worker(*flags, "--reasoning-parser", "qwen3") as worker,
        httpx.Client(base_url=worker.url, timeout=60) as client,
    ):
        yield client


def chat(text: str, **fields: object) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "seed": 1, **fields}


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    del body["id"], body["created"]
    body["usage"].pop("prompt_tokens_details")
    for choice in body["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return body


@pytest.mark.parametrize(
    "body",
    [
        chat(ANSWER, tools=TOOLS),
        chat(ANSWER, tools=TOOLS, tool_choice="none"),
        chat("Hi 🙂.", logprobs=True, top_logprobs=2),
        chat("abcdef", stop=["de"]),
        chat("abcdef", stop=["de"], include_stop_str_in_output=True),
        chat("abcdef", stop_token_ids=[68]),
        chat("abcdef", max_tokens=3),
        chat("abc", n=2, return_token_ids=True),
    ],
)
def test_rendering_running_and_derendering_make_a_chat(
    client: httpx.Client, body: dict[str, Any]
) -> None:
    whole = answer(client, CHAT, body)
    rendered = answer(client, CHAT + "/render", body)
    generated = answer(client, GENERATE, rendered)
    parts = answer(
        client,
        CHAT + "/derender",
        {"model": "echo", "generate_response": generated, "chat_request": body},
    )
    assert parts["id"] == rendered["request_id"]
    assert comparable(parts) == comparable(whole)


def test_rendering_running_and_derendering_make_a_completion(client: httpx.Client) -> None:
    body = {"model": "echo", "prompt": ["ab", "Zürich"], "seed": 1, "logprobs": 1, "max_tokens": 9}
    whole = answer(client, TEXT, body)
    rendered = answer(client, TEXT + "/render", body)
    generated = [answer(client, GENERATE, entry) for entry in rendered]
    parts = answer(
        client, TEXT + "/derender", {"generate_responses": generated, "completion_request": body}
    )
    assert comparable(parts) == comparable(whole)


def test_without_the_request_the_answer_is_only_text(client: httpx.Client) -> None:
    ids = answer(client, "/tokenize", {"prompt": "<think>a</think>b"})["tokens"]
    given = {"request_id": "req-42", "choices": [{"index": 0, "token_ids": ids}]}
    body = {"model": "echo", "prompt_tokens": 5, "generate_response": given}
    answered = answer(client, CHAT + "/derender", body)
    [choice] = answered["choices"]
    assert (answered["id"], answered["object"]) == ("req-42", "chat.completion")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
    assert answered["usage"]["prompt_tokens"] == 5
    assert answered["usage"]["completion_tokens"] == len(ids)
    body = {"generate_responses": [given], "prompt_tokens": [5]}
    assert answer(client, TEXT + "/derender", body)["choices"][0]["text"] == "ab"


ENTRY = {"token": "token_id:1", "logprob": -1.0}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"token_ids": [99999]}, None),
        ({"token_ids": [-1]}, "body.generate_response.choices.0.token_ids.0"),
        ({"token_ids": [1] * 5000}, "body.generate_response.choices.0.token_ids"),
        ({"finish_reason": "error"}, "body.generate_response.choices.0.finish_reason"),
        (
            {"token_ids": [1, 2], "logprobs": {"content": [ENTRY]}},
            "body.generate_response.choices.0.logprobs.content",
        ),
        (
            {"token_ids": [1], "logprobs": {"content": [{**ENTRY, "token": "token_id:99999"}]}},
            "body.generate_response.choices.0.logprobs.content",
        ),
    ],
)
def test_answers_that_no_worker_generated_are_refused(
    client: httpx.Client, choice: dict[str, Any], param: str | None
) -> None:
    given = {"request_id": "r", "choices": [choice]}
    response = client.post(CHAT + "/derender", json={"generate_response": given})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_prompts_and_answers_must_be_as_many(client: httpx.Client) -> None:
    given = {"request_id": "r", "choices": [{"token_ids": [1]}]}
    for more in ({"prompt_tokens": [1, 2]}, {"completion_request": {"prompt": ["a", "b"]}}):
        response = client.post(TEXT + "/derender", json={"generate_responses": [given], **more})
        assert response.status_code == 400
        assert next(iter(more)) in response.json()["error"]["message"]
