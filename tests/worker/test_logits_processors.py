"""Logits processors of an installed package: their selection, and their effect on answers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.depth import by_depth
from tests.support.worker.grammar_bench import (
    DEVICE,
    END,
    NGRAM,
    SETTINGS,
    GrammarBench,
    drawn_alone,
    drawn_in,
    grammar,
)
from tests.support.worker.installed_processors import install_processors
from worker.cli.flags import build_parser, resolve
from worker.engine.messages import AddRequest
from worker.errors import ConfigError
from worker.logits_processors import chosen

LOADED = ("forbid", "cycle", "fresh", "broken")


@pytest.fixture(autouse=True, scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("site")
    install_processors(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def asks(**arguments: Any) -> dict[str, Any]:
    return {"logits_processors": chosen(LOADED, arguments)}


def mixed(bench: GrammarBench) -> list[AddRequest]:
    changes: list[dict[str, Any]] = [
        {},
        asks(window=5),
        asks(window=9, scale=0.5),
        {**asks(window=4), "repetition_penalty": 1.1, "logprobs": 2},
        asks(cycle=[7, 8, 9]),
        asks(forbidden=[ord("a"), END], window=2),
    ]
    return [
        bench.request(None, answers, b"ab" * (2 + place), seed=place, max_tokens=60, **more, **heat)
        for place, more in enumerate(changes)
        for answers, heat in ((1, {"temperature": 0.0}), (1, {}), (3, {"top_p": 0.9}))
    ]


@pytest.fixture(scope="module")
def plain(_installed: None) -> list[list[int]]:
    return drawn_alone(mixed)


@pytest.mark.parametrize("name", by_depth(["preempted, drafts"], list(SETTINGS)))
def test_the_same_seed_gives_the_same_tokens(plain: list[list[int]], name: str) -> None:
    assert drawn_in(SETTINGS[name], mixed) == plain


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
def test_processors_force_and_exclude_tokens(speculative: Any) -> None:
    with GrammarBench(speculative) as bench:
        forced = bench.request(None, max_tokens=40, **asks(cycle=[5, 6, 7]))
        fresh = bench.request(None, max_tokens=60, **asks(window=6, forbidden=[END]))
        free = bench.request(None, max_tokens=40)
        found = [answer.token_ids for answer in bench.run(forced, fresh, free).values()]
        alone = bench.run(bench.request(None, max_tokens=40)).popitem()[1].token_ids
    assert found[0] == ([5, 6, 7] * 14)[:40]
    assert len(found[1]) == 60
    assert all(token not in found[1][max(0, i - 6) : i] for i, token in enumerate(found[1]))
    assert found[2] == alone != found[0]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drafts_drawn_from_a_distribution_are_verified(method: str) -> None:
    """The draft model has no processors: its excluded drafts are rejected."""
    config = replace(DEVICE, draft_sample_method="probabilistic", rejection_sample_method=method)
    with GrammarBench(config) as bench:
        asked = [bench.request(None, seed=n, max_tokens=60, **asks(window=9)) for n in range(8)]
        found = bench.run(*asked)
        stats = bench.scheduler.stats()
    for tokens in (answer.token_ids for answer in found.values()):
        assert all(token not in tokens[max(0, i - 9) : i] for i, token in enumerate(tokens))
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens


def test_a_grammar_applies_after_processors() -> None:
    """The answer matches, or the request fails if no token is left."""
    form = grammar(regex="(ab|cd){2,9}")
    with GrammarBench() as bench:
        found = bench.run(
            bench.request(form, **asks(cycle=[ord("x")])),
            bench.request(form, **asks(forbidden=[ord("c")])),
        )
    against, within = found.values()
    assert "no token may be drawn" in against.error
    assert within.error is None
    assert set(within.text) == {"a", "b"}


@pytest.mark.parametrize("fault", ["raises", "short", "nan"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_failing_processor_fails_only_its_request(fault: str, temperature: float) -> None:
    with GrammarBench() as bench:
        asked = bench.request(None, temperature=temperature, ignore_eos=True, **asks(fault=fault))
        failed, other = bench.run(asked, bench.request(None, max_tokens=30)).values()
    assert len(failed.token_ids) == 2
    assert failed.error is not None
    assert other.error is None


def test_names_and_arguments_reach_the_engine_process() -> None:
    with GrammarBench() as bench:
        request = bench.request(None, **asks(forbidden=[1, 2], window=3))
    sent = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(sent, type=AddRequest) == request
    assert request.params.logits_processors == (
        ("forbid", '{"forbidden":[1,2]}'),
        ("fresh", '{"window":3}'),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forbiden": [1]}, "no logits processor takes 'forbiden'; known are cycle, fault, forb"),
        ({"forbidden": []}, "forbid: forbidden must not be empty"),
        ({"forbidden": None}, "forbid: forbidden must not be empty"),
        ({"forbidden": 5}, "forbid: 'int' object is not iterable"),
        ({"scale": 2.0}, "fresh: .*missing 1 required positional argument: 'window'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(LOADED, arguments)


async def test_arguments_of_requests_reach_the_engine(bench: Any) -> None:
    asked = {"prompt": [1], "vllm_xargs": {"forbidden": [4]}}
    async with bench.client(logits_processors=LOADED) as client:
        rendered = (await client.post("/v1/completions/render", json=asked)).json()[0]
        answers = [
            await client.post("/v1/completions", json=asked),
            await client.post("/inference/v1/generate", json=rendered),
        ]
        first, second = bench.engine.requests
        refused = await client.post("/v1/completions", json={**asked, "vllm_xargs": {"x": 1}})
        big = {"vllm_xargs": {"forbidden": [1] * 40_000}}
        long = await client.post("/v1/completions", json={**asked, **big})
    assert [answer.status_code for answer in answers] == [200, 200]
    assert first.params.logits_processors == (("forbid", '{"forbidden":[4]}'),)
    assert second.params.logits_processors == first.params.logits_processors
    for answer, message in ((refused, "no logits processor takes 'x'"), (long, "at most 65536")):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "vllm_xargs")
        assert error["message"].startswith(f"`vllm_xargs`: {message}")


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_without_a_processor_arguments_are_refused(bench: Any, path: str) -> None:
    async with bench.client() as client:
        for arguments, status in (({"forbidden": [4]}, 400), ({}, 200)):
            body: dict[str, Any] = {"prompt": [1], "vllm_xargs": arguments}
            if path == "/inference/v1/generate":
                body = {"token_ids": [1], "sampling_params": {"extra_args": arguments}}
            answer = await client.post(path, json=body)
            assert answer.status_code == status
            if status == 400:
                error = answer.json()["error"]
                assert error["param"] in ("vllm_xargs", "extra_args")
                assert error["message"].startswith(f"`{error['param']}`: no logits processor is")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "not installed; installed are: anything, broken, cycle, forbid, fresh, miss"),
        ("missing", "cannot be loaded: AttributeError"),
        ("anything", "its constructor must name the arguments that it takes"),
        ("unable", "has no method `process`"),
    ],
)
def test_a_processor_that_cannot_load_is_an_error_at_the_start(name: str, message: str) -> None:
    options = build_parser().parse_args(["--logits-processors", "forbid", name])
    with pytest.raises(ConfigError, match=f"^--logits-processors {name}: {message}"):
        resolve(options, None, {})


def test_the_simulator_refuses_logits_processors() -> None:
    options = build_parser().parse_args(["--engine", "sim", "--logits-processors", "forbid"])
    with pytest.raises(ConfigError, match="--engine sim has no logits"):
        resolve(options, None, {})
