"""From HTTP headers to the drafter's memory: one tenant's answers are not drafted to another."""

from typing import Any

import pytest

from tests.support.worker.step_driver import advance, scheduler
from worker.config import SpeculativeConfig
from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest
from worker.types import Drafts

KEYS = ["secret-a", "secret-b"]
FAIRNESS_ID = "x-gateway-inference-fairness-id"
Headers = dict[str, bytes]


class Watched:
    """Implements `Drafter` by the suffix drafter, and keeps the calls of it."""

    def __init__(self) -> None:
        drafter = build_drafter(SpeculativeConfig("suffix", 8))
        assert drafter is not None
        self._drafter = drafter
        self.drafted: list[tuple[int, ...]] = []
        self.groups: list[tuple[str, str]] = []

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        drafts = self._drafter.propose(context, num_tokens)
        self.drafted.append(() if drafts is None else drafts.token_ids)
        return drafts

    def end(self, context: DraftContext, learns: bool) -> None:
        self.groups.append(context.group)
        self._drafter.end(context, learns)

    def learn(self, num_tokens: int) -> None:
        self._drafter.learn(num_tokens)


def key(index: int, **more: str) -> Headers:
    headers = {"authorization": f"Bearer {KEYS[index]}".encode()}
    return headers | (named(more["fairness_id"]) if more else {})


def named(fairness_id: str) -> Headers:
    return {FAIRNESS_ID: fairness_id.encode("latin-1")}


async def run(
    bench: Any, first: Headers, second: Headers, keys: list[str], salts: tuple[str | None, ...]
) -> Watched:
    """Let two clients ask in turn for the same prompt; the engine answers both alike."""
    async with bench.client(api_keys=keys) as client:
        for headers, salt in zip((first, second), salts, strict=True):
            body = {"prompt": [1, 2, 3], "max_tokens": 12, "cache_salt": salt}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
    drafter = Watched()
    config = SpeculativeConfig("suffix", 8, enable_adaptive_verification=False)
    engine = scheduler(speculation=Speculation(config, drafter, False))
    requests: list[AddRequest] = bench.engine.requests
    for request in requests:
        engine.add(request)
        position = 0
        while engine.has_unfinished:
            advance(engine, {request_seq(engine): 100 + position})
            position += 1
    return drafter


def request_seq(engine: Any) -> int:
    [sequence] = engine._live
    seq_id: int = sequence.seq_id
    return seq_id


LONG = "t" * 200


@pytest.mark.parametrize(
    ("first", "second", "keys"),
    [
        (key(0), key(1), KEYS),
        (key(0), key(1, fairness_id="key-0"), KEYS),
        (key(0), key(1, fairness_id="key-0/"), KEYS),
        (key(0, fairness_id="x"), key(1, fairness_id="x"), KEYS),
        (key(0, fairness_id="x"), key(0, fairness_id="y"), KEYS),
        (named("x"), named("y"), []),
        (named("x"), {}, []),
        (named(LONG + "A"), named(LONG + "B"), []),
        (named("\xe9\x85" * 9), {}, []),
    ],
    ids=str,
)
async def test_tenants_share_no_group(
    bench: Any, first: Headers, second: Headers, keys: list[str]
) -> None:
    drafter = await run(bench, first, second, keys, (None, None))
    one, other = drafter.groups
    assert one != other
    assert not any(drafter.drafted)


@pytest.mark.parametrize(
    ("first", "second", "keys"),
    [
        (key(0), key(0), KEYS),
        (key(0, fairness_id="x"), key(0, fairness_id="x"), KEYS),
        (named(LONG), named(LONG), []),
        ({}, {}, []),
        (key(0), key(0), KEYS[:1]),
    ],
    ids=str,
)
async def test_one_tenant_gets_its_own_answers_drafted(
    bench: Any, first: Headers, second: Headers, keys: list[str]
) -> None:
    drafter = await run(bench, first, second, keys, (None, None))
    assert len(set(drafter.groups)) == 1
    assert any(101 in tokens for tokens in drafter.drafted)
    bench.engine.requests.clear()
    salted = await run(bench, first, second, keys, ("mine", "yours"))
    assert not any(salted.drafted)
