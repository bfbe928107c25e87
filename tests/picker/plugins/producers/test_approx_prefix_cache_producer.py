"""approx-prefix-cache-producer: the memory of prompts and endpoints."""

from struct import pack
from typing import Any

import pytest

from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.framework.services import NoHttp, Services
from picker.plugins.producers.approx_prefix_cache_producer import (
    MAX_PROMPTS,
    MAX_REPORTED_CAPACITY,
    PLUGIN,
    ApproxPrefixCacheParameters,
    ApproxPrefixCacheProducer,
)
from picker.prefix.block_hash import block_hashes, root_hash
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, Candidates, FinishCause, ResponseHead
from tests.support.picker.plugin_scenes import candidate, decided, placed, request_for

B = 64


def blocks(*numbers: int) -> bytes:
    return b"".join(pack(f"<{B}I", *[number] * B) for number in numbers)


class Scene:
    def __init__(
        self, max_reported_capacity: int = MAX_REPORTED_CAPACITY, **parameters: Any
    ) -> None:
        self.producer = ApproxPrefixCacheProducer(
            "p",
            ApproxPrefixCacheParameters(**parameters),
            max_reported_capacity=max_reported_capacity,
        )

    def find(
        self, candidates: Candidates, *prompts: bytes, **fields: Any
    ) -> PrefixCacheMatchInfo | None:
        attributes = Attributes()
        self.producer.produce(request_for(prompts=prompts, **fields), candidates, attributes)
        return attributes.get(match_info_key("p"))

    def matched(self, candidate: Candidate, *prompts: bytes, **fields: Any) -> int:
        info = self.find([candidate], *prompts, **fields)
        return info.match_blocks.get(candidate.key, 0)

    def send(self, candidate: Candidate, *prompts: bytes, prefill: Candidate | None = None) -> None:
        attributes = Attributes()
        request = self.producer.produce(request_for(prompts=prompts), [candidate], attributes)
        profiles = {"default": [candidate], **({"prefill": [prefill]} if prefill else {})}
        self.producer.pre_request(request, decided(**profiles), attributes)
        self.producer.check_integrity()


def test_a_prompt_matches_where_it_was_sent() -> None:
    a, b, c, s = candidate("a"), candidate("b"), candidate("c"), Scene()
    s.send(a, blocks(1, 2), prefill=b)
    info = s.find([a, b, c], blocks(1, 3))
    assert info == PrefixCacheMatchInfo(2, B, {"default/a": 1, "default/b": 1})
    assert s.producer.index_size == 4


def test_only_sent_prompts_are_remembered() -> None:
    s = Scene()
    s.find([candidate("a")], blocks(1))
    assert s.matched(candidate("a"), blocks(1)) == 0


def test_models_and_salts_do_not_share() -> None:
    a, s = candidate("a"), Scene()
    s.send(a, blocks(1))
    for fields in ({"model": "adapter"}, {"salt": "tenant"}):
        assert s.matched(a, blocks(1), **fields) == 0


def test_several_prompts_add_up() -> None:
    a, s = candidate("a"), Scene()
    s.send(a, blocks(1, 2), blocks(5))
    info = s.find([a], blocks(1, 2, 3), blocks(5))
    assert info == PrefixCacheMatchInfo(4, B, {"default/a": 3})


def test_an_endpoint_that_left_or_restarted_is_forgotten() -> None:
    a, s = candidate("a"), Scene()
    s.send(a, blocks(1))
    s.producer.endpoint_removed("default/a")
    assert s.matched(a, blocks(1)) == 0
    assert s.producer.index_size == 0


def test_without_prompts_nothing_is_found_or_remembered() -> None:
    s = Scene()
    assert s.find([candidate("a")]) is None
    s.send(candidate("a"))
    assert s.producer.index_size == 0


@pytest.mark.parametrize(
    ("parameters", "reported", "expected"),
    [
        ({}, 16, 3),  # never below 64 tokens
        ({}, 128, 2),
        ({}, None, 3),
        ({}, 10**9, 3),  # no engine has such blocks
        ({"auto_tune": False, "block_size_tokens": 96}, 128, 2),
        ({"block_size_tokens": 192}, None, 1),
        ({"block_size_tokens": 0}, 128, 2),  # is left to the engines
        ({"block_size_tokens": 0}, None, 3),
    ],
)
def test_the_block_size_is_that_of_the_engines_but_at_least_64(
    parameters: dict[str, Any], reported: int | None, expected: int
) -> None:
    candidates = [candidate("a", known=False), candidate("b", block_size_tokens=reported)]
    info = Scene(**parameters).find(candidates, blocks(1, 2, 3))
    assert info.total_blocks == expected


def test_the_memory_is_the_capacity_of_the_kv_cache() -> None:
    """Eight engine blocks of 16 tokens hold two blocks of 64."""
    a = candidate("a", block_size_tokens=16, num_kv_blocks=8)
    s = Scene()
    for number in (1, 2, 3):
        s.send(a, blocks(number))
    assert [s.matched(a, blocks(number)) for number in (1, 2, 3)] == [0, 1, 1]


def test_the_memory_is_bounded_whatever_an_engine_reports() -> None:
    a = candidate("a", block_size_tokens=16, num_kv_blocks=10**15 - 1)
    s = Scene(max_reported_capacity=10)
    for number in range(0, 40, 4):
        s.send(a, blocks(*range(number, number + 4)))
    assert s.producer.index_size == 10


def test_the_memory_is_the_configured_one_without_a_report() -> None:
    a = candidate("a", block_size_tokens=16, num_kv_blocks=8000)
    s = Scene(auto_tune=False, lru_capacity_per_server=1)
    s.send(a, blocks(1, 2))
    assert s.matched(a, blocks(1, 2)) == 1


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"max_prefix_tokens_to_match": 128}, 2),
        ({"max_prefix_tokens_to_match": 0, "max_prefix_blocks_to_match": 3}, 3),
        ({"max_prefix_tokens_to_match": 0, "max_prefix_blocks_to_match": 0}, 4),
        ({"max_prefix_tokens_to_match": 1}, 1),
    ],
)
def test_only_the_beginning_of_a_long_prompt_is_considered(
    parameters: dict[str, Any], expected: int
) -> None:
    info = Scene(**parameters).find([candidate("a")], blocks(1, 2, 3, 4))
    assert info.total_blocks == expected


def test_a_long_prompt_is_remembered_like_a_short_one() -> None:
    a, b, s = candidate("a"), candidate("b"), Scene()
    s.send(a, blocks(*range(100)))
    s.send(b, blocks(*range(40)))
    info = s.find([a, b], blocks(*range(90), *range(200, 210)))
    assert info == PrefixCacheMatchInfo(100, B, {"default/a": 90, "default/b": 40})


def test_the_seed_is_that_of_the_process_unless_one_is_configured() -> None:
    services = Services(NoHttp(), hash_seed=5)
    assert _seed_of(PLUGIN.make("p", ApproxPrefixCacheParameters(), services)) == 5
    given = ApproxPrefixCacheParameters(hash_seed=0)
    assert _seed_of(PLUGIN.make("p", given, services)) == 0


def _seed_of(plugin: object) -> int:
    assert isinstance(plugin, ApproxPrefixCacheProducer)
    attributes = Attributes()
    plugin.produce(request_for(prompts=(blocks(1),)), [candidate("a")], attributes)
    hashed = attributes.get(DataKey("BlockHashes", "p"))
    found = hashed.prompts[0]
    return next(
        seed
        for seed in range(10)
        if found == block_hashes(blocks(1), root_hash("m", "", seed), B, seed=seed)
    )


def test_only_the_first_of_very_many_prompts_are_matched() -> None:
    """A body of a hundred thousand tiny prompts must not delay other decisions."""
    s, a = Scene(), candidate("a")
    many = [blocks(number) for number in range(MAX_PROMPTS + 50)]
    s.send(a, *many)
    assert s.find([a], *many) == PrefixCacheMatchInfo(MAX_PROMPTS, B, {"default/a": MAX_PROMPTS})


def test_replicas_with_one_seed_learn_from_each_other() -> None:
    a, one, other = candidate("a"), Scene(), Scene()
    reported: list[str] = []
    one.producer.report_placements(other.producer.placed_elsewhere)
    other.producer.report_placements(lambda key, hashes, capacity: reported.append(key))
    one.send(a, blocks(1, 2))
    assert other.find([a], blocks(1, 2)) == PrefixCacheMatchInfo(2, B, {"default/a": 2})
    assert reported == []
    other.producer.use_hash_seed(other.producer.hash_seed)
    assert other.producer.index_size == 2
    other.producer.use_hash_seed(99)
    assert (other.producer.index_size, other.producer.hash_seed) == (0, 99)
    one.producer.report_placements(None)
    one.send(a, blocks(3))
    assert other.producer.index_size == 0


def test_hashes_of_an_earlier_seed_are_not_remembered() -> None:
    """The seed changes between decision and departure."""
    s, a, attributes = Scene(), candidate("a"), Attributes()
    request = s.producer.produce(request_for(prompts=(blocks(1),)), [a], attributes)
    s.producer.use_hash_seed(5)
    s.producer.pre_request(request, decided(default=[a]), attributes)
    assert s.producer.index_size == 0


def test_the_capacity_of_a_remote_placement_is_limited() -> None:
    s = Scene(max_reported_capacity=3, lru_capacity_per_server=2, hash_seed=4)
    s.producer.use_hash_seed(9)
    assert s.producer.hash_seed == 4
    s.producer.placed_elsewhere("default/a", block_hashes(blocks(*range(9)), 1, B), 2**31)
    assert s.producer.index_size == 3


class Departed:
    """A request that has left for `chosen`, with `others` as candidates too."""

    def __init__(self, scene: Scene, prompt: bytes, chosen: Candidate, *others: Candidate) -> None:
        self.producer, attributes = scene.producer, Attributes()
        request = self.producer.produce(request_for(prompts=(prompt,)), [chosen], attributes)
        result = decided(default=[chosen, *others])
        self.producer.pre_request(request, result, attributes)
        self.flight = Flight(request, result, attributes)

    def head(self, status: int = 200, **fields: Any) -> None:
        self.producer.response_head(self.flight, ResponseHead(status, **fields))
        self.producer.check_integrity()

    def end(self, cause: FinishCause) -> None:
        self.producer.request_ended(self.flight, cause, None, 0.0)
        self.producer.check_integrity()


@pytest.mark.parametrize(
    "head",
    [
        {"status": 503},
        {"status": 400},
        {"status": 503, "reached_no_endpoint": True},
        {"headers": {"grpc-status": "14"}},
    ],
)
def test_a_failed_request_leaves_only_what_others_recorded(head: dict[str, Any]) -> None:
    a, s = candidate("a"), Scene()
    s.send(a, blocks(1))
    failed = Departed(s, blocks(1, 2, 3, 4), a)
    later = Departed(s, blocks(1, 2, 5), a)
    assert s.matched(a, blocks(1, 2, 3, 4)) == 4
    failed.head(**head)
    failed.end(FinishCause.COMPLETED)
    assert s.matched(a, blocks(1, 2, 3, 4)) == 2
    later.head()
    later.end(FinishCause.CLIENT_GONE)
    assert s.matched(a, blocks(1, 2, 5)) == 3


@pytest.mark.parametrize(
    ("cause", "remembered"),
    [
        (FinishCause.CLIENT_GONE, 2),
        (FinishCause.RESET, 2),
        (FinishCause.REFUSED, 0),
        (FinishCause.EVICTED, 0),
        (FinishCause.SKIPPED, 2),
        (FinishCause.COMPLETED, 2),
    ],
)
def test_a_request_that_ends_without_a_response_was_read_unless_the_picker_ended_it(
    cause: FinishCause, remembered: int
) -> None:
    """A proxy that shows no responses would otherwise make the picker forget every prompt."""
    a, s = candidate("a"), Scene()
    Departed(s, blocks(1, 2), a).end(cause)
    assert s.matched(a, blocks(1, 2)) == remembered


def test_a_request_served_elsewhere_counts_there() -> None:
    a, b, s = placed("a"), placed("b", address="10.0.0.2"), Scene()
    reported: list[str] = []
    s.producer.report_placements(lambda key, hashes, capacity: reported.append(key))
    moved = Departed(s, blocks(1, 2), a, b)
    moved.head(served_by=b.endpoint.host_port)
    moved.end(FinishCause.COMPLETED)
    assert (s.matched(a, blocks(1, 2)), s.matched(b, blocks(1, 2))) == (0, 2)
    assert reported == ["default/a", "default/b"]


def test_a_response_to_hashes_of_an_earlier_seed_changes_nothing() -> None:
    a, b, s = placed("a"), placed("b", address="10.0.0.2"), Scene()
    moved, failed = Departed(s, blocks(1), a, b), Departed(s, blocks(2), a)
    s.producer.use_hash_seed(5)
    s.send(a, blocks(1))
    moved.head(served_by=b.endpoint.host_port)
    failed.end(FinishCause.EVICTED)
    assert s.producer.index_size == 1
