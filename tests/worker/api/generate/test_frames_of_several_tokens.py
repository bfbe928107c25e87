"""Several tokens at once are written as if each had come by itself."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.depth import examples
from tests.worker.conftest import events_of
from worker.engine.messages import RequestOutput, SpeculationFigures
from worker.engine.process.client import merge
from worker.sim import tokenizer as sim
from worker.types import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = sim.IM_END_ID
SIZES = re.compile(
    r"^(vllm:request_(?:success_total|(?:max_num_)?generation_tokens_sum)\{.*\}) (\S+)$",
    re.MULTILINE,
)
# Bytes of plain and of longer characters, a control token, a word.
ALPHABET = (*b"abc ", *"é€".encode(), sim.IM_START_ID, sim.FIRST_WORD_ID)
# How an answer ends: the reason, and the token that did it.
ENDINGS = (
    (FinishReason.LENGTH, None),
    (FinishReason.STOP, END),
    (FinishReason.STOP, ord("c")),
    (FinishReason.REPETITION, None),
    (FinishReason.ABORT, None),
)


def answer(bench: Any, tokens: list[int], ending: tuple[FinishReason, int | None]) -> list[Any]:
    """Return one output for each token, a second apart; the last one has the end."""
    reason, stop_token = ending
    if stop_token is not None:
        tokens = [*tokens, stop_token]
    outputs = []
    for place, token in enumerate(tokens):
        is_last = place == len(tokens) - 1
        entry = bench.logprob(token, (97, -1.0), (place % 256, -2.0), own=-0.25 * place)
        said = bench.say(
            [token],
            reason if is_last else None,
            stop_token=stop_token if is_last else None,
            cached=1,
            logprobs=[entry],
        )
        outputs.append(msgspec.structs.replace(said, last_token_seconds=2.0 + place))
    return outputs


def in_runs(outputs: list[Any], cuts: set[int]) -> list[Any]:
    """Group the outputs into steps; a new step begins at every cut."""
    runs: list[Any] = []
    for place, output in enumerate(outputs):
        if not runs or place in cuts:
            runs.append(output)
        else:
            runs[-1] = msgspec.structs.replace(merge(runs[-1], output), num_steps=1)
    return runs


Body = dict[str, Any]
FIELDS: st.SearchStrategy[Body] = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.lists(st.text("abc é", min_size=1, max_size=3), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.just([ord("c")]),
        "min_tokens": st.integers(0, 6),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "ignore_eos": st.booleans(),
    },
)
STREAMING: st.SearchStrategy[Body] = st.fixed_dictionaries(
    {},
    optional={
        "stream_interval": st.integers(1, 4),
        "stream_options": st.fixed_dictionaries(
            {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
        ),
    },
)


def asked(path: str, fields: Body, with_logprobs: bool, echo: bool) -> Body:
    body: Body = {"max_tokens": 60, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hi"}]
        if echo:
            body["messages"].append({"role": "assistant", "content": "so"})
            body |= {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
        if with_logprobs:
            body |= {"logprobs": True, "top_logprobs": 2}
        return body
    body |= {"prompt": "hi", "echo": echo}
    if with_logprobs:
        body["logprobs"] = 2
    return body


@dataclass
class Player:
    api: Any
    bench: Any

    def events_of(self, steps: list[Any], path: str, body: Body) -> tuple[Any, Body]:
        echoed = [self.bench.logprob("h")] if body.get("echo") else []
        first = msgspec.structs.replace(steps[0], prompt_logprobs=echoed)
        self.bench.engine.script = lambda request, branch: [first, *steps[1:]]

        async def ask() -> str:
            async with self.bench.client_of(self.api) as client:
                response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return str(response.text)

        before = self._sizes()
        text = asyncio.run(ask())
        sizes = {name: value - before[name] for name, value in self._sizes().items()}
        return (streamed(text) if body.get("stream") else whole(text)), sizes

    def _sizes(self) -> dict[str, float]:
        return {name: float(value) for name, value in SIZES.findall(self.api.page())}


@pytest.fixture
def player(bench: Any) -> Player:
    """One player serves all examples of a test, as its documents take long to write."""
    return Player(bench.api(max_model_len=256), bench)


def whole(text: str) -> Body:
    body: Body = json.loads(text)
    del body["id"], body["created"]
    return body


def streamed(text: str) -> Body:
    found: Body = {"text": "", "logprobs": {}, "token_ids": [], "usage": None, "ends": []}
    for frame in events_of(text):
        found["usage"] = frame.get("usage") or found["usage"]
        for choice in frame["choices"]:
            found["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            found["token_ids"] += choice.get("token_ids") or []
            for name, values in (choice.get("logprobs") or {}).items():
                found["logprobs"].setdefault(name, []).extend(values)
            if choice["finish_reason"] is not None:
                found["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    return found


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@given(
    tokens=st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=14),
    ending=st.sampled_from(ENDINGS),
    cuts=st.sets(st.integers(1, 13)),
    fields=FIELDS,
    streaming=STREAMING,
    with_logprobs=st.booleans(),
    echo=st.booleans(),
)
@examples(60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_run_is_written_like_its_tokens(
    player: Player,
    path: str,
    stream: bool,
    tokens: list[int],
    ending: tuple[FinishReason, int | None],
    cuts: set[int],
    fields: Body,
    streaming: Body,
    with_logprobs: bool,
    echo: bool,
) -> None:
    body = asked(path, fields, with_logprobs, echo)
    if stream:
        body |= {"stream": True, **streaming}
    outputs = answer(player.bench, tokens, ending)
    assert player.events_of(in_runs(outputs, cuts), path, body) == player.events_of(
        outputs, path, body
    )


@given(
    tokens=st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=14),
    ending=st.sampled_from(ENDINGS),
    cuts=st.sets(st.integers(1, 13)),
    fields=FIELDS,
    streaming=STREAMING,
)
@examples(60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_stream_of_runs_says_what_the_body_says(
    player: Player,
    tokens: list[int],
    ending: tuple[FinishReason, int | None],
    cuts: set[int],
    fields: Body,
    streaming: Body,
) -> None:
    runs = in_runs(answer(player.bench, tokens, ending), cuts)
    body = asked(TEXT, {**fields, "return_token_ids": True}, True, False)
    frames, sizes = player.events_of(runs, TEXT, {**body, "stream": True, **streaming})
    answered, same_sizes = player.events_of(runs, TEXT, body)
    (choice,) = answered["choices"]
    assert sizes == same_sizes
    assert frames["text"] == choice["text"]
    assert frames["token_ids"] == choice["token_ids"]
    assert frames["logprobs"] == choice["logprobs"]
    assert frames["ends"] == [(choice["finish_reason"], choice["stop_reason"])]


async def test_usage_grows_with_every_frame(bench: Any) -> None:
    bench.engine.steps = [bench.say("a"), bench.say("bcd"), bench.say("efENDgh")]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "stop": "END", "stream_options": options}
    frames = await bench.events(TEXT, body)
    assert [f["usage"]["completion_tokens"] for f in frames] == [4, 9, 9]  # the first is held back


async def test_a_stop_string_precedes_later_ends(bench: Any) -> None:
    """The match makes the run an answer; without it, the server's own abort is an error."""
    bench.engine.steps = [bench.say("aENDb", FinishReason.ABORT, error="going home")]
    async with bench.client() as client:
        whole_answer = await client.post(TEXT, json={"prompt": "a", "stop": "END"})
        assert whole_answer.json()["choices"][0]["text"] == "a"
        assert whole_answer.json()["usage"]["completion_tokens"] == 4
        refused = await client.post(TEXT, json={"prompt": "a", "stop": "end"})
        assert refused.status_code == 503


async def test_gaps_are_between_steps_and_not_between_tokens(bench: Any) -> None:
    outputs = answer(bench, [*b"abcdefgh"], (FinishReason.LENGTH, None))
    runs = in_runs(outputs, {1, 4, 6})
    bench.engine.steps = [runs[0], runs[1], merge(runs[2], runs[3])]
    api = bench.api()
    async with bench.client_of(api) as client:
        await client.post(TEXT, json={"prompt": "a"})
    name, labels = "vllm:inter_token_latency_seconds", '{model_name="tiny",engine="0"}'
    assert f"{name}_count{labels} 3\n" in api.page()
    assert f"{name}_sum{labels} 7.0\n" in api.page()


def speculated(output: RequestOutput, *histogram: int, drafted: int) -> RequestOutput:
    accepted = sum(place * count for place, count in enumerate(histogram))
    figures = SpeculationFigures(sum(histogram), drafted, accepted, list(histogram))
    return msgspec.structs.replace(output, speculation=figures)


@pytest.mark.parametrize("stream", [False, True])
async def test_drafts_are_reported_with_the_metrics(bench: Any, stream: bool) -> None:
    def script(request: Any, branch: int) -> list[Any]:
        if branch == 0:
            return [
                speculated(bench.say("ab"), 1, 0, 0, drafted=2),
                speculated(bench.say("cd", FinishReason.LENGTH), 2, 1, 3, drafted=12),
            ]
        if branch == 1:
            return [speculated(bench.say("ENDx"), 0, 0, 1, drafted=2)]
        return [bench.say("z", FinishReason.LENGTH)]

    bench.engine.script = script
    body = {"prompt": "a", "n": 3, "stop": "END", "stream": stream}
    response = await bench.post(TEXT, body, enable_per_request_metrics=True)
    events = events_of(response.text) if stream else [response.json()]
    (metrics,) = [m for e in events if (m := e.get("metrics")) is not None]
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 9 / 7,
        "draft_acceptance_rate": 9 / 14,
        "acceptance_histogram": [2, 1, 4],
        "num_spec_steps": 7,
        "num_accepted_draft_tokens": 9,
        "num_draft_tokens": 14,
        "num_spec_tokens": 2,
    }
