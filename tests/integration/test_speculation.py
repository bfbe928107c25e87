"""Speculation in real processes: the same answers in fewer steps, and numbers that show it."""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet.running_fleet import ready_fleet
from tests.support.worker.running_worker import Worker, running_worker

pytestmark = pytest.mark.full

# How long the drafts are must not depend on how busy the machine is that runs the tests.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "enable_adaptive_verification": False,
}
SIM = ("--engine", "sim", "--sim-mode", "echo", "--sim-decode-base-ms", "1")
SONG = "row row row your boat gently down the stream merrily merrily merrily merrily " * 3
PER_REQUEST_METRICS = "--enable-per-request-metrics"
PAGE = Path(__file__).parents[2] / "docs/speculation.md"


def speculating(**config: object) -> tuple[str, str]:
    return ("--speculative-config", json.dumps(config))


@asynccontextmanager
async def both(*flags: str) -> AsyncIterator[tuple[Worker, Worker]]:
    async with AsyncExitStack() as stack:
        starting = (
            running_worker(*flags),
            running_worker(*flags, PER_REQUEST_METRICS, *speculating(**NGRAM)),
        )
        plain, drafting = await asyncio.gather(*map(stack.enter_async_context, starting))
        yield plain, drafting


async def counted(worker: Worker) -> dict[str, float]:
    found = (await worker.http.get("/metrics")).text
    lines = re.findall(r"^vllm:spec_decode_(\w+)_total\{(.*)\} (\S+)$", found, re.MULTILINE)
    return {
        name
        + (f"[{place[1]}]" if (place := re.search(r'position="(\d+)"', labels)) else ""): float(
            value
        )
        for name, labels, value in lines
    }


async def answered(worker: Worker, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = await worker.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    figures = (answer.pop("metrics") or {}).get("speculative_decoding")
    del answer["id"], answer["created"], answer["usage"]["prompt_tokens_details"]
    return answer, figures


BODIES: list[dict[str, Any]] = [
    {"prompt": SONG, "max_tokens": 50, "temperature": 0},
    {"prompt": SONG, "max_tokens": 50, "seed": 3, "n": 3, "logprobs": 2},
    {"prompt": SONG, "max_tokens": 200, "stop": ["gently down", "the"], "seed": 5, "top_p": 0.9},
    {"prompt": SONG, "max_tokens": 40, "min_tokens": 30, "seed": 6, "return_token_ids": True},
    {"messages": [{"role": "user", "content": SONG}], "max_tokens": 30, "seed": 1, "top_k": 5},
]


async def test_answers_are_the_same_with_and_without_drafts() -> None:
    async with both(*SIM) as (plain, drafting):
        before = await counted(drafting)
        places = [f"num_accepted_tokens_per_pos[{place}]" for place in range(6)]
        assert [name for name in before if "per_pos" in name] == places
        assert set(before.values()) == {0.0}
        total: dict[str, int] = dict.fromkeys(("steps", "drafted", "accepted"), 0)
        for body in BODIES:
            expected, none = await answered(plain, body)
            answer, figures = await answered(drafting, body)
            assert answer == expected
            assert (none, figures is None) == (None, False)
            total["steps"] += figures["num_spec_steps"]
            total["drafted"] += figures["num_draft_tokens"]
            total["accepted"] += figures["num_accepted_draft_tokens"]
            assert len(figures["acceptance_histogram"]) == 1 + figures["num_spec_tokens"] == 7
        after = await counted(drafting)
        assert total["accepted"] > 50
        assert after["num_drafts"] >= total["steps"]
        assert after["num_draft_tokens"] >= total["drafted"]
        assert after["num_accepted_tokens"] >= total["accepted"]
        assert sum(after[place] for place in places) == after["num_accepted_tokens"]
        assert "per_pos" not in "".join(await counted(plain))


@pytest.mark.model
async def test_the_real_model_says_the_same_in_fewer_steps(model_path: Path) -> None:
    small = ("--max-model-len", "512", "--num-gpu-blocks-override", "128")
    sentence = "The quick brown fox jumps over the lazy dog. "
    code = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add"
    bodies: list[dict[str, Any]] = [
        {"prompt": sentence * 6, "max_tokens": 40, "temperature": 0},
        {"prompt": sentence * 6, "max_tokens": 40, "temperature": 0, "stop": ["fox jumps ov"]},
        {"prompt": code, "max_tokens": 24, "temperature": 0.7, "seed": 11, "logprobs": 1},
    ]
    async with both("--model", str(model_path), *small) as (plain, drafting):
        for body in bodies:
            expected, _ = await answered(plain, body)
            answer, figures = await answered(drafting, body)
            assert close_in_logprobs(answer, expected)
            assert (answer["choices"][0]["finish_reason"] == "stop") == ("stop" in body)
            assert figures["num_accepted_draft_tokens"] > 0
        steps = [
            (await worker.counters())[_named("pointsman:engine_steps_total")]
            for worker in (plain, drafting)
        ]
        assert steps[1] < steps[0]


def close_in_logprobs(answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    for one, other in zip(answer["choices"], expected["choices"], strict=True):
        lists = [
            (choice.pop("logprobs") or {}).get("token_logprobs", []) for choice in (one, other)
        ]
        assert lists[0] == pytest.approx(lists[1], abs=1e-3)
    return answer == expected


def _named(name: str) -> str:
    labels = [("engine", "0"), ("model_name", "SmolLM2-135M-Instruct")]
    return f"{name}{labels}"


async def test_a_worker_says_what_is_wrong_with_the_configuration() -> None:
    argv = ("-m", "worker", "--engine", "sim", "--port", "0", "--speculative-config", "{")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaint = await process.communicate()
    assert (process.returncode, printed) == (1, b"")
    (line,) = complaint.decode().splitlines()
    assert line.startswith("pointsman worker: --speculative-config: not a JSON object")


@pytest.mark.envoy
async def test_a_fleet_drafts_as_the_page_says() -> None:
    line = next(li for li in PAGE.read_text().splitlines() if "suffix" in li and "up --" in li)
    given = shlex.split(line, comments=True)
    worker_args = given[given.index("--worker-args") + 1]
    flags = ("--workers", "1", "--worker-args")
    flags += (f"{worker_args} {PER_REQUEST_METRICS} --sim-mode echo",)
    async with ready_fleet(*flags) as fleet:
        answer = await fleet.openai.completions.create(
            model="sim", prompt=SONG * 2, max_tokens=64, temperature=0
        )
        figures = answer.model_extra["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] > 0
