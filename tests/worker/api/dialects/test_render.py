"""Rendered requests ask the same of the engine as the requests themselves."""

from typing import Any

import pytest

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TURNS = [{"role": "user", "content": "shono hi"}]
SAMPLING = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "seed": 3,
    "stop": ["x"],
    "stop_token_ids": [4],
    "bad_words": ["shono"],
    "min_tokens": 2,
    "logit_bias": {"5": 2.0},
    "allowed_token_ids": [1, 2, 3],
    "ignore_eos": True,
    "n": 2,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "logprob_token_ids": [9],
    "repetition_detection": {"max_pattern_size": 3},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS, **SAMPLING, "cache_salt": "s", "priority": 2}),
        (CHAT, {"messages": TURNS}),
        (TEXT, {"prompt": "shono.", **SAMPLING, "logprobs": 2}),
        (TEXT, {"prompt": [1, 2, 3]}),
    ],
)
async def test_a_rendered_request_asks_the_same_of_the_engine(
    bench: Any, path: str, body: dict[str, Any]
) -> None:
    async with bench.client() as client:
        answer = (await client.post(path + "/render", json=body)).json()
        assert bench.engine.requests == []
        rendered = answer if path == CHAT else answer[0]
        direct = await client.post(path, json=body)
        tokens = await client.post("/inference/v1/generate", json=rendered)
    assert (direct.status_code, tokens.status_code) == (200, 200)
    first, second = bench.engine.requests
    for name in ("prompt_token_ids", "cache_salt", "priority"):
        assert getattr(first, name) == getattr(second, name)
    assert len(first.branch_ids) == len(second.branch_ids)
    if "seed" in body:
        assert first.params == second.params
    else:
        assert rendered["sampling_params"]["seed"] is None
    assert rendered["token_ids"] == first.prompt_token_ids


async def test_several_prompts_have_an_entry_each(bench: Any) -> None:
    async with bench.client() as client:
        body = {"prompt": ["shono.", [1, 2]], "request_id": "r"}
        mixed = await client.post(TEXT + "/render", json={**body, "prompt": ["shono.", "hi"]})
    assert [entry["request_id"] for entry in mixed.json()] == ["cmpl-r-0", "cmpl-r-1"]
    first = mixed.json()[0]
    assert (first["model"], first["output_mode"], first["features"]) == ("tiny", "tokens", None)
    assert (first["stream"], first["priority"], first["token_offsets"]) == (False, 0, None)


async def test_offsets_are_returned_when_asked_for(bench: Any) -> None:
    ask = {"return_token_offsets": True}
    async with bench.client() as client:
        text = await client.post(TEXT + "/render", json={"prompt": "shono.", **ask})
        ids = await client.post(TEXT + "/render", json={"prompt": [1, 2], **ask})
        chat = await client.post(CHAT + "/render", json={"messages": TURNS, **ask})
        refused = await client.post(TEXT, json={"prompt": "a", **ask})
    offsets = text.json()[0]["token_offsets"]
    assert ["shono."[start:end] for start, end in offsets] == ["shono", "."]
    assert ids.json()[0]["token_offsets"] is None
    assert len(chat.json()["token_offsets"]) == len(chat.json()["token_ids"])
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (TEXT, {"prompt": "a", "temperature": 3}, 400),
        (TEXT, {"prompt": ""}, 400),
        (CHAT, {"messages": TURNS, "model": "x"}, 404),
        (CHAT, {"prompt": "a"}, 400),
    ],
)
async def test_rendering_is_as_strict_as_generating(
    bench: Any, path: str, body: dict[str, Any], status: int
) -> None:
    async with bench.client() as client:
        answers = [await client.post(path + end, json=body) for end in ("", "/render")]
    assert [a.status_code for a in answers] == [status, status]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": ["shono " * 900, "hi", "hi"]}),
        (CHAT, {"messages": [{"role": "user", "content": "shono " * 900}]}),
    ],
)
async def test_offsets_cost_no_second_encoding(
    bench: Any, watched: Any, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "return_token_offsets": True, "bad_words": ["hi"]}
    response = await bench.post(path + "/render", body, max_model_len=4096)
    assert response.status_code == 200
    answer = response.json()
    entries = answer if path == TEXT else [answer]
    assert all(len(e["token_offsets"]) == len(e["token_ids"]) for e in entries)
    assert watched.elsewhere["encode_with_offsets"] >= 1
    calls = watched.on_loop + watched.elsewhere
    num_bad_words = 2  # with and without a space in front
    assert calls == {"encode_with_offsets": len(entries), "encode": num_bad_words}
