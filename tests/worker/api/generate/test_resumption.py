"""A stream continues at another worker, exactly where it was cut."""

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.support.worker.scripted_talk import TEMPLATE
from worker.engine.messages import AddRequest
from worker.types import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MARK = re.compile(rb"^: resume (.*)\n\n", re.MULTILINE)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLS = (
    'I look.\n<tool_call>{"name": "look", "arguments": {"w": "é 🙂"}}</tool_call>\n'
    '<tool_call>{"name": "look", "arguments": {"w": [1, "}"]}}</tool_call>'
)
LOGPROBS = {"logprobs": True, "top_logprobs": 1}
# (path, what the engine says, fields, settings)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "text": (TEXT, "Zwölf € 🙂 end", {}, {}),
    "chat": (CHAT, "Zwölf € 🙂 end", {"stream_options": {"include_usage": True}}, {}),
    "counts": (
        CHAT,
        "Zwölf €uro",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {},
    ),
    "stop": (TEXT, "a ENE€ENDING", {"stop": ["END", "NEVER"]}, {}),
    "stop shown": (CHAT, "a ENE€ENDING", {"stop": "END", "include_stop_str_in_output": True}, {}),
    "stop later": (TEXT, "END END", {"stop": "END", "min_tokens": 4}, {}),
    "log probabilities": (TEXT, "a€b 🙂", {"logprobs": 1}, {}),
    "of a chat": (CHAT, "a€b 🙂", LOGPROBS, {}),
    "token ids": (TEXT, "a€b 🙂", {"return_token_ids": True}, {}),
    "intervals": (CHAT, "Zwölf €uro", {"stream_interval": 3}, {}),
    "calls": (CHAT, CALLS, {"tools": TOOLS}, {}),
    "reasoning": (CHAT, "<think>so é</think>\n\nthus", {}, {"reasoning_parser": "qwen3"}),
}


def script(bench: Any, text: str, size: int) -> None:
    """Make the engine give a text byte by byte, `size` bytes a step, from the end of the answer."""
    raw = text.encode()

    def steps(request: AddRequest, _: int) -> Sequence[Any]:
        begun = len(request.output_token_ids)
        assert request.output_token_ids == list(raw[:begun])
        said = []
        for start in range(begun, len(raw), size):
            ids = raw[start : start + size]
            end = FinishReason.STOP if start + size >= len(raw) else None
            entries = [bench.logprob(i, (32, -3.0)) for i in ids]
            wanted = request.params.logprobs is not None
            said.append(bench.say(ids, end, logprobs=entries if wanted else ()))
        return said

    bench.engine.script = steps


def client_of(bench: Any, case: str) -> Any:
    bench.template_source = TEMPLATE
    return bench.client(max_model_len=4096, **CASES[case][3])


async def ask(client: Any, case: str, resume: Any) -> tuple[dict[str, Any], bytes]:
    path, _, fields, _ = CASES[case]
    base = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "a"}
    body = {"max_tokens": 200, **base, **fields, "stream": True, "resume": resume}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.headers["x-pointsman-resume"]), response.content


def cuts(stream: bytes) -> list[tuple[bytes, list[int]]]:
    found: list[tuple[bytes, list[int]]] = []
    tokens: list[int] = []
    for mark in MARK.finditer(stream):
        tokens = [*tokens, *json.loads(mark[1])]
        found.append((MARK.sub(b"", stream[: mark.end()]), tokens))
    return found


def same_calls(stream: bytes) -> bytes:
    """Replace the ids of calls by their order: a worker that continues a call never names it."""
    numbers = itertools.count()
    return re.sub(rb"chatcmpl-tool-[0-9a-f]+", lambda _: b"call-%d" % next(numbers), stream)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", CASES)
async def test_a_stream_continues_after_every_mark(bench: Any, case: str, size: int) -> None:
    script(bench, CASES[case][1], size)
    async with client_of(bench, case) as client:
        state, stream = await ask(client, case, {})
        whole = MARK.sub(b"", stream)
        assert whole.endswith(b"data: [DONE]\n\n")
        found = cuts(stream)
        assert len(found) > 1
        for text, tokens in found:
            again, rest = await ask(client, case, {**state, "token_ids": tokens})
            assert again == state
            assert same_calls(text + MARK.sub(b"", rest)) == same_calls(whole)


async def test_a_stream_that_has_not_begun_starts_under_its_id(bench: Any) -> None:
    script(bench, "hi", 1)
    async with client_of(bench, "chat") as client:
        state, stream = await ask(client, "chat", {})
        assert await ask(client, "chat", state) == (state, stream)
    first, second = bench.engine.requests
    assert first.params.seed == second.params.seed == state["seed"]


async def test_marks_follow_the_text_of_their_tokens(bench: Any) -> None:
    """Only the opening is marked with no tokens; half a character is no text of its own yet."""
    script(bench, "é!", 1)
    async with client_of(bench, "chat") as client:
        _, stream = await ask(client, "chat", {})
    assert [tokens for _, tokens in cuts(stream)] == [[], [0xC3, 0xA9]]


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"stream": False}]
)
async def test_a_stream_that_cannot_continue_has_no_header_and_no_marks(
    bench: Any, fields: dict[str, Any]
) -> None:
    body = {"prompt": "a", "stream": True, "temperature": 1.0, **fields}
    async with bench.client() as client:
        answer = await client.post(TEXT, json={**body, "resume": {}})
        assert "x-pointsman-resume" not in answer.headers
        assert b": resume" not in answer.content
        state = {"id": "cmpl-1", "created": 1, "seed": 1, "prompt": 1}
        answer = await client.post(TEXT, json={**body, "resume": state})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "resume"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": None}, "lacks seed"),
        ({"id": "chatcmpl-1"}, "cmpl-"),
        ({"id": "cmpl-" + "x" * 129}, "cmpl-"),
        ({"id": "cmpl-ü"}, "cmpl-"),
        ({"prompt": 1}, "another prompt"),
        ({"token_ids": [97] * 40}, "at most 40 is over"),
        ({"token_ids": list(b"a END")}, "stop string"),
        ({"token_ids": [1 << 40]}, "out of vocabulary"),
        ({"nope": 1}, "nope"),
    ],
)
async def test_facts_of_no_header_are_refused(
    bench: Any, changes: dict[str, Any], reason: str
) -> None:
    script(bench, "a E", 1)
    body = {"prompt": "a", "stream": True, "stop": "END", "max_tokens": 40}
    async with bench.client(strict_fields=True) as client:
        answer = await client.post(TEXT, json={**body, "resume": {}})
        state = json.loads(answer.headers["x-pointsman-resume"])
        bench.engine.requests.clear()
        answer = await client.post(TEXT, json={**body, "resume": {**state, **changes}})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert not bench.engine.requests


async def until_cut(response: httpx.Response) -> bytes:
    found = b""
    try:
        async for chunk in response.aiter_raw():
            found += chunk
    except httpx.RemoteProtocolError:
        return found
    pytest.fail("it has a regular end")


async def test_a_worker_that_drains_hands_its_streams_over(bench: Any) -> None:
    may_end = asyncio.Event()
    bench.engine.steps = [bench.say("a"), may_end, bench.say("b", FinishReason.STOP)]
    api = bench.api()
    async with bench.listening(api) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"prompt": "a", "stream": True}
        async with (
            client.stream("POST", TEXT, json={**body, "resume": {}}) as leaving,
            client.stream("POST", TEXT, json=body) as staying,
        ):
            api.admission.drains.set()
            found = await until_cut(leaving)
            begun, error = found.split(b": resume [97]\n\n")
            assert b'"text":"a"' in begun
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
            may_end.set()
            assert (await staying.aread()).endswith(b"data: [DONE]\n\n")
    (handed_over,) = bench.engine.handed_over
    assert handed_over == bench.engine.requests[0].request_id
    assert len(bench.engine.aborted) == 1
