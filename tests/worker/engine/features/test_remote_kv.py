"""KV fetched from other engines or exported for them: answers never change."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.moving_kv import MadeUpConnector
from tests.support.worker.paged_executor import TOKEN_BYTES, PagedExecutor, kv_of
from tests.support.worker.step_driver import outputs as run
from tests.support.worker.tier_house import tiers_below
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.features.remote_kv import RemoteKv
from worker.engine.messages import AddRequest, Pause, RequestOutput
from worker.engine.scheduling.scheduler import Scheduler
from worker.kv.asked import WantedKv
from worker.types import FinishReason, KvPeer, KvSource, SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]  # two blocks of four, and three tokens


def house(connector: MadeUpConnector, **cache: Any) -> tuple[EngineCore, Scheduler]:
    config = CacheConfig(16, 4, **cache)
    executor = PagedExecutor(4)
    remote = RemoteKv(connector, executor.read_kv, 4)
    scheduler = Scheduler(config, SchedulerConfig(), (walks.END,), [remote])
    return EngineCore(scheduler, executor, lambda: 0.0), scheduler


def asks(name: str = "a", num_tokens: int = len(PROMPT), **fields: Any) -> AddRequest:
    source = KvSource("h", 1, "e", name, num_tokens)
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=3)
    return AddRequest(name, PROMPT, params, 0.0, **{"kv_source": source, **fields})


def tokens_of(outputs: list[RequestOutput], name: str = "a") -> list[int]:
    return [t for output in outputs if output.request_id == name for t in output.token_ids]


EXPECTED = walks.alone(asks(), 0, 64)[0]


@pytest.mark.parametrize(
    ("looks", "failing", "caching", "num_loaded"),
    [(0, False, True, 10), (5, False, True, 10), (5, False, False, 10), (5, True, True, 0)],
)
def test_moved_kv_is_not_computed(
    looks: int, failing: bool, caching: bool, num_loaded: int
) -> None:
    connector = MadeUpConnector(
        {"a": (looks, PROMPT, None)}, frozenset({"a"} if failing else set())
    )
    core, scheduler = house(connector, enable_prefix_caching=caching)
    core.add(asks())
    outputs = run(core)
    assert tokens_of(outputs) == EXPECTED
    stats = scheduler.stats()
    assert (stats.scheduler.external_cache_hits, stats.scheduler.external_cache_queries) == (
        num_loaded,
        10,
    )
    assert outputs[-1].num_cached_tokens == num_loaded
    assert stats.scheduler.prompt_tokens_external == num_loaded
    assert (stats.kv_cache_usage, connector.pulls[0].is_closed) == (0.0, True)


def test_a_transfer_gives_its_room_back_as_soon_as_its_kv_is_loaded() -> None:
    connector = MadeUpConnector({"a": (0, PROMPT, None)})
    core, scheduler = house(connector)
    core.add(asks())
    while not scheduler.stats().scheduler.prompt_tokens_external:
        core.step()
    assert core.has_work
    assert connector.pulls[0].is_closed


def test_a_hit_here_is_not_asked_for_there() -> None:
    connector = MadeUpConnector(dict.fromkeys("abc", (2, PROMPT, None)))
    core, scheduler = house(connector)
    params = SamplingParams(max_tokens=1)
    core.add(AddRequest("first", PROMPT[:4], params, 0.0))
    run(core)
    core.add(asks("a"))
    assert tokens_of(run(core), "a") == EXPECTED
    assert connector.pulls[0].outcome is not None
    assert connector.pulls[0].outcome.start == 4
    core.add(asks("b"))
    assert tokens_of(run(core), "b") == EXPECTED
    assert (len(connector.pulls), scheduler.stats().scheduler.external_cache_hits) == (1, 6)


def test_others_hit_what_was_loaded() -> None:
    connector = MadeUpConnector({"a": (2, PROMPT, None)})
    core, scheduler = house(connector)
    core.add(asks())
    core.add(asks("b", kv_source=None))
    outputs = run(core)
    assert tokens_of(outputs) == tokens_of(outputs, "b") == EXPECTED
    core.add(asks("c", kv_source=None))
    assert tokens_of(run(core), "c") == EXPECTED
    assert scheduler.stats().scheduler.prefix_cache_hits >= 10


def test_blocks_evicted_meanwhile_are_computed() -> None:
    connector = MadeUpConnector({"a": (6, PROMPT, None)})
    core, scheduler = house(connector)
    core.add(AddRequest("first", PROMPT[:5], SamplingParams(max_tokens=1), 0.0))
    run(core)
    core.add(asks())
    assert connector.pulls[0].outcome is not None
    assert connector.pulls[0].outcome.start == 4
    assert scheduler.blocks.reset_prefix_cache()
    assert tokens_of(run(core)) == EXPECTED
    assert scheduler.stats().scheduler.external_cache_hits == 0


def test_an_abort_ends_the_transfer() -> None:
    connector = MadeUpConnector({"a": (10**6, PROMPT, None)})
    core, scheduler = house(connector)
    core.add(asks())
    core.step()
    assert core.is_compiling
    assert scheduler.stats().pulls.num_fetching == 1
    core.abort(["a"])
    assert [output.finish_reason for output in run(core)] == [FinishReason.ABORT]
    assert connector.pulls[0].is_closed
    assert scheduler.blocks.usage == 0.0


def test_a_prompts_log_probabilities_are_computed_here() -> None:
    """Only running the prompt gives them."""
    connector = MadeUpConnector({"a": (0, PROMPT, None)})
    core, _ = house(connector)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, seed=3)
    core.add(msgspec.structs.replace(asks(), params=params))
    outputs = run(core)
    assert not connector.pulls
    assert len(outputs[0].prompt_logprobs) == len(PROMPT) - 1


def test_kv_is_exported_for_requests_that_ask() -> None:
    connector = MadeUpConnector({})
    core, _ = house(connector)
    core.add(asks("a", kv_source=None, keeps_kv=True))
    core.add(asks("b", kv_source=None))
    core.add(asks("c", kv_source=None, keeps_kv=True))
    core.abort(["c"])
    offers = {o.request_id: o.kv_offer for o in run(core) if o.finish_reason is not None}
    assert connector.stored == {"a": bytes(kv_of(PROMPT))}
    assert (offers["b"], offers["c"]) == (None, None)
    assert offers["a"] is not None
    assert (offers["a"].source.num_tokens, len(offers["a"].block_ids)) == (len(PROMPT), 3)


def test_a_peer_is_asked_for_what_is_not_here() -> None:
    """A peer that has less than was asked for helps as far as it goes."""
    connector = MadeUpConnector({"p": (2, PROMPT[:9], None)})
    core, scheduler = house(connector)
    core.add(AddRequest("first", PROMPT[:4], SamplingParams(max_tokens=1), 0.0))
    run(core)
    core.add(asks("a", kv_source=None, kv_peer=KvPeer("p", 1)))
    assert tokens_of(run(core)) == EXPECTED
    (wanted,) = connector.asked
    assert (wanted.start, list(wanted.token_ids)) == (4, PROMPT)
    stats = scheduler.stats()
    assert (stats.scheduler.external_cache_queries, stats.scheduler.external_cache_hits) == (6, 5)
    assert (stats.scheduler.prompt_tokens_external, stats.scheduler.prompt_tokens_host) == (5, 0)
    core.add(asks("b", kv_source=None, kv_peer=KvPeer("p", 1)))
    assert tokens_of(run(core), "b") == EXPECTED
    assert len(connector.asked) == 1


def test_an_answer_that_went_on_elsewhere_is_asked_for_with_its_prompt() -> None:
    """A peer that waits to be asked is notified when nothing is needed."""
    peer = KvPeer("p", 1, "promised")
    outputs = [*EXPECTED, *EXPECTED][:4]
    connector = MadeUpConnector({"p": (2, [*PROMPT, *outputs], None)})
    core, scheduler = house(connector)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=3)
    request = AddRequest("a", PROMPT, params, 0.0, kv_peer=peer, output_token_ids=outputs)
    core.add(request)
    run(core)
    assert (connector.asked[0].start, len(connector.asked[0].token_ids)) == (0, 15)
    stats = scheduler.stats()
    assert (stats.scheduler.external_cache_queries, stats.scheduler.external_cache_hits) == (11, 11)
    assert stats.scheduler.num_steps == 2
    core.add(msgspec.structs.replace(request, request_id="b"))
    run(core)
    assert (connector.asked[1].start, len(connector.asked)) == (15, 2)


def test_a_pause_that_waits_waits_for_what_is_promised() -> None:
    connector = MadeUpConnector({})
    core, _ = house(connector)
    core.add(asks("a", kv_source=None))
    core.add(asks("b", kv_source=None))
    core.step()
    core.abort(["a", "unknown"], hands_over=True)
    core.abort(["b"])
    assert connector.promised == {"a"}
    core.command(Pause(7, "wait"))
    for _ in range(4):
        core.step()
    assert core.take_replies() == []
    connector.promised.clear()
    core.step()
    assert [(reply.command_id, reply.ok) for reply in core.take_replies()] == [(7, True)]


def test_without_a_connector_transfers_are_refused() -> None:
    scheduler = Scheduler(CacheConfig(16, 4), SchedulerConfig())
    outputs = [*scheduler.add(asks()), *scheduler.add(asks("b", kv_source=None, keeps_kv=True))]
    assert all("--kv-transfer-config" in (output.error or "") for output in outputs)


@st.composite
def moving(draw: st.DrawFn) -> tuple[walks.Scene, MadeUpConnector]:
    scene = draw(walks.scenes)
    load, prompts, failing = [], {}, set()
    for arrival in scene.load:
        request = arrival.request
        size = len(request.prompt_token_ids)
        kind = draw(st.sampled_from(["none", "there", "there", "other", "lost", "asked"]))
        if kind != "none":
            name = request.request_id
            tokens = [*request.prompt_token_ids, *([1] * 4)]
            if kind == "other":
                tokens[draw(st.integers(0, size - 1))] = 6
            looks = draw(st.sampled_from([0, 0, 3, 20, 60]))
            prompts[name] = (looks, tokens, request.cache_salt)
            if kind == "lost":
                failing.add(name)
            if kind == "asked":
                prompts[name] = (looks, tokens[: draw(st.integers(0, size))], request.cache_salt)
                request = msgspec.structs.replace(request, kv_peer=KvPeer(name, 1))
            else:
                source = KvSource("h", 1, "e", name, draw(st.integers(1, size + 1)))
                request = msgspec.structs.replace(request, kv_source=source)
        if request.pooling is None:
            request = msgspec.structs.replace(request, keeps_kv=draw(st.booleans()))
        load.append(walks.Arrival(request, arrival.at_step, arrival.abort_at))
    connector = MadeUpConnector(prompts, frozenset(failing))
    for arrival in draw(st.permutations(load)):
        wanted = (*arrival.request.prompt_token_ids, *([1] * draw(st.integers(1, 9))))
        question = WantedKv(wanted, draw(st.integers(0, 9)), arrival.request.cache_salt, None)
        connector.questions += [*([None] * draw(st.integers(0, 6))), question]
    return replace(scene, load=load), connector


@pytest.mark.parametrize("pipe", walks.PIPES)
@examples(40)
@given(moved=moving(), num_slots=st.sampled_from([0, 0, 6, 20]))
def test_moving_kv_changes_no_answer(
    pipe: str, moved: tuple[walks.Scene, MadeUpConnector], num_slots: int
) -> None:
    scene, connector = moved
    size = scene.cache.block_size
    executor = PagedExecutor(size)
    cache, tiers = tiers_below(scene.cache, num_slots)
    features = [RemoteKv(connector, executor.read_kv, size), tiers]
    scene.run(Scheduler(cache, scene.limits, (walks.END,), features), executor, pipe)
    assert all(pull.is_closed for pull in connector.pulls)
    for arrival in scene.load:
        for name in arrival.names:
            export = connector.stored.get(name)
            prompt = arrival.request.prompt_token_ids
            assert export is None or export == bytes(kv_of(prompt))
    for wanted, data in connector.answers:
        end = wanted.start + len(data) // TOKEN_BYTES
        assert end <= max(wanted.start, len(wanted.token_ids) - 1)
        assert data == bytes(kv_of(wanted.token_ids[:end])[wanted.start * TOKEN_BYTES :])
