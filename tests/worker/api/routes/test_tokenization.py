"""Token ids of texts and conversations, and back."""

from typing import Any

import pytest

from worker.sim import tokenizer as sim

TURNS = [{"role": "user", "content": "shono hi"}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"x": 1}, "documents": [{"text": "a"}]},
        {"add_special_tokens": True},
    ],
)
async def test_tokenize_agrees_with_generation(bench: Any, options: dict[str, Any]) -> None:
    body = {"messages": TURNS, **options}
    answer = await bench.answer("/tokenize", body)
    usage = (await bench.answer("/v1/chat/completions", body))["usage"]
    assert answer["tokens"] == bench.engine.requests[0].prompt_token_ids
    assert answer["count"] == len(answer["tokens"]) == usage["prompt_tokens"]
    assert (answer["max_model_len"], answer["token_strs"]) == (64, None)


async def test_a_text_has_ids_and_names(bench: Any) -> None:
    plain = {"prompt": "shono.", "return_token_strs": True, "model": "alias"}
    answer = await bench.answer("/tokenize", plain)
    back = await bench.answer("/detokenize", {"tokens": [*answer["tokens"], 1280]})
    assert answer["token_strs"] == [" shono", "."]
    assert back == {"prompt": " shono." + sim.IM_START}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a" * 5000}), ("/detokenize", {"tokens": [10**9] * ((1 << 18) + 1)})],
    ids=lambda value: str(value)[:40],
)
async def test_long_bodies_are_refused(bench: Any, path: str, body: dict[str, Any]) -> None:
    assert (await bench.post(path, body)).status_code == 400


async def test_the_tokenizer_is_described_when_allowed(bench: Any) -> None:
    async with bench.client() as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
    async with bench.client(enable_tokenizer_info=True) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert info["special_tokens"] == {sim.IM_START: sim.IM_START_ID, sim.IM_END: sim.IM_END_ID}
    assert (info["vocab_size"], info["model_max_length"]) == (sim.VOCAB_SIZE, 64)
    assert "add_generation_prompt" in info["chat_template"]


async def test_long_answers_are_looked_up_off_the_loop(bench: Any, watched: Any) -> None:
    long = {"prompt": "a " * 5000, "return_token_strs": True}
    async with bench.client(max_model_len=8192) as client:
        await client.post("/detokenize", json={"tokens": [1] * 10})
        await client.post("/tokenize", json={"prompt": "a b"})
        assert (watched.on_loop["decode"], watched.on_loop["token_text"]) == (1, 0)
        await client.post("/detokenize", json={"tokens": [1] * 5000})
        assert (await client.post("/tokenize", json=long)).json()["count"] == 5000
    assert (watched.on_loop["decode"], watched.elsewhere["decode"]) == (1, 1)
    assert (watched.on_loop["token_text"], watched.elsewhere["token_text"]) == (0, 5000)
