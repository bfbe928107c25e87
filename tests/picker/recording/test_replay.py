"""Replays repeat recorded decisions bit by bit, or report the differences."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from picker.config.build import DEFAULT_CONFIG
from picker.errors import ConfigError
from picker.recording.lines import (
    Config,
    DecisionLine,
    EndpointChange,
    Lost,
    RecordingError,
    ResultLine,
    decoded,
    encoded,
)
from picker.recording.replay import REFUSED, Comparison, Tally
from picker.types import EndpointMetrics
from tests.support.picker.configured_requests import GOLDEN, golden
from tests.support.picker.recorded_traffic import (
    BLEND,
    MoodyHealth,
    Replayed,
    Traffic,
    record,
    replayed,
)

BUILT_IN = DEFAULT_CONFIG.decode()
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
# Common configurations, and every plugin.
SHAPES = (
    "bursts",
    "data_parallel_profile_handler",
    *("every_filter_and_scorer", "every_filter_and_scorer_of_the_shelf"),
    *("every_way_to_look_at_requests", "every_way_to_look_at_requests_of_the_shelf"),
    *("flow_control_every_policy", "flow_control_every_policy_of_the_shelf"),
    "header_profile_handler",
    "pools_of_other_clusters",
    "published_optimized_baseline",
    "published_pd_disaggregation",
    "published_predicted_latency_slo",
    "published_tiered_prefix_cache_cpu",
    "published_wide_ep_lws_dp_aware",
    "smoke_epd",
    "smoke_pd_topology",
)
SESSIONS = f"""{HEAD}
plugins:
- type: session-affinity-scorer
  parameters:
    strategy: session_id
    sessionIdConfig: {{evictionTtlSeconds: 2, sources: [{{header: x-session-id}}]}}
- type: session-affinity-filter
  name: by-cookie
  parameters:
    strategy: session_id
    sessionIdConfig: {{sources: [{{attribute: SessionID}}]}}
- {{type: session-id-producer, parameters: {{cookieName: sid}}}}
- {{type: lora-affinity-scorer}}
- {{type: no-hit-lru-scorer}}
- {{type: weighted-random-picker, parameters: {{maxNumOfEndpoints: 2}}}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: by-cookie}}
  - {{pluginRef: session-affinity-scorer, weight: 0.3}}
  - {{pluginRef: lora-affinity-scorer}}
  - {{pluginRef: no-hit-lru-scorer}}
  - {{pluginRef: weighted-random-picker}}
"""
LOADS = f"""{HEAD}
plugins:
- {{type: concurrency-detector, name: room, parameters: {{maxConcurrency: 3}}}}
- {{type: active-request-scorer}}
- {{type: token-load-scorer, parameters: {{queueThresholdTokens: 2000}}}}
- type: inflight-load-producer
  parameters: {{addEstimatedOutputTokens: true}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: room}}
  - {{pluginRef: active-request-scorer}}
  - {{pluginRef: token-load-scorer}}
"""


def compared(replay: Replayed) -> Comparison:
    tally = Tally(10)
    for one in replay.decisions:
        tally.add(one)
    return tally.result()


def reweighted(text: str, scorer: str, weight: float) -> str:
    config = yaml.safe_load(text)
    (part,) = [
        one for one in config["schedulingProfiles"][0]["plugins"] if one["pluginRef"] == scorer
    ]
    part["weight"] = weight
    return json.dumps(config)


@pytest.mark.parametrize(
    "name", ["built in", "blend", "sessions", "loads", *(one for one in SHAPES if one in GOLDEN)]
)
def test_the_same_configuration_makes_identical_decisions(name: str, tmp_path: Path) -> None:
    texts = {"built in": BUILT_IN, "blend": BLEND, "sessions": SESSIONS, "loads": LOADS}
    text = texts.get(name) or golden(name)
    requests = 1500 if name == "built in" else 300
    traffic = Traffic([text], seed=7, endpoints=14)
    found = replayed(record(traffic, requests, tmp_path / "r"))
    assert found.different == []
    assert len(found.decisions) > requests * 0.9
    assert found.notes == {}
    picked = {one.recorded.result.endpoints[0] for one in found.decisions if one.recorded.result}
    assert len(picked) > 1


def test_reloads_are_repeated(tmp_path: Path) -> None:
    texts = [BUILT_IN, LOADS, golden("published_optimized_baseline"), SESSIONS, LOADS, BLEND]
    traffic = Traffic(texts, seed=11)
    found = replayed(record(traffic, 1200, tmp_path / "r"))
    assert found.different == []
    assert {one.recorded.config for one in found.decisions} == set(range(len(texts)))


@pytest.mark.parametrize("name", ["sessions", "loads", "published_pd_disaggregation"])
def test_several_attempts_of_one_request_are_repeated(name: str, tmp_path: Path) -> None:
    text = {"sessions": SESSIONS, "loads": LOADS}.get(name) or golden(name)
    traffic = Traffic([text], seed=3, health=MoodyHealth(4))
    found = replayed(record(traffic, 400, tmp_path / "r"))
    assert found.different == []
    assert found.notes == {}
    assert sum(one.recorded.again is not None for one in found.decisions) > 2


def test_the_state_of_plugins_affects_the_replay(tmp_path: Path) -> None:
    traffic = Traffic([LOADS], seed=3)
    path = record(traffic, 400, tmp_path / "r")
    path.write_bytes(b"".join(one for one in traffic.sink.lines if b'"line":"end"' not in one))
    assert len(replayed(path).different) > 50


def test_a_difference_in_the_last_bit_of_a_total_is_found(tmp_path: Path) -> None:
    traffic = Traffic([BLEND], seed=3)
    path = record(traffic, 20, tmp_path / "r")
    lines = [decoded(line) for line in traffic.sink.lines]
    index = next(i for i, line in enumerate(lines) if isinstance(line, DecisionLine) and line.left)
    text = json.loads(encoded(lines[index]))
    totals = text["result"]["profiles"]["default"]["totals"]
    totals[0] = totals[0] + 4.5e-16 * max(1.0, abs(totals[0]))
    traffic.sink.lines[index] = json.dumps(text).encode() + b"\n"
    traffic.sink.write_to(path)
    (different,) = replayed(path).different
    assert different.line == index + 1
    (difference,) = compared(replayed(path)).differences
    assert "of candidate 1 in profile 'default'" in difference.texts[0]


async def two_pods(weight: float, path: Path) -> Path:
    text = f"""{HEAD}
plugins: [{{type: queue-scorer}}, {{type: kv-cache-utilization-scorer}}]
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer, weight: 2}}
  - {{pluginRef: kv-cache-utilization-scorer, weight: {weight}}}
"""
    traffic = Traffic([text], seed=1, endpoints=2)
    for name, waiting, used in (("pod-0", 0, 0.9), ("pod-1", 5, 0.1)):
        metrics = EndpointMetrics(
            waiting_requests=waiting, kv_cache_usage=used, process_start_time_seconds=1.0
        )
        traffic.datastore.update_metrics(f"default/{name}", metrics)
    traffic.draw.random = lambda: 0.9  # type: ignore[method-assign]  # no unrest
    for _ in range(10):
        await traffic.request()
        traffic.ends()
    traffic.recorder.flush()
    return traffic.sink.write_to(path)


def test_another_weight_moves_requests(tmp_path: Path) -> None:
    """Weights 2 and 1 score 2.1 and 0.9; weights 2 and 5 score 2.5 and 4.5."""
    path = asyncio.run(two_pods(1, tmp_path / "r"))
    text = json.loads(path.read_bytes().splitlines()[0])["config"]
    found = replayed(path, reweighted(text, "kv-cache-utilization-scorer", 5))
    for one in found.decisions:
        outcome = one.outcome
        assert isinstance(outcome, ResultLine)
        assert outcome.profiles["default"].totals == pytest.approx((2.5, 4.5))
        assert one.recorded.result.profiles["default"].totals == pytest.approx((2.1, 0.9))
    comparison = compared(found)
    assert comparison.decisions == comparison.moved == comparison.rescored == 10
    assert comparison.identical == 0
    (move,) = comparison.moves
    assert (move.before, move.now, move.requests) == ("default/pod-0", "default/pod-1", 10)
    assert comparison.scores.before == pytest.approx(2.1)
    assert comparison.scores.now == pytest.approx(4.5)
    shares = {one.endpoint: (one.before, one.now) for one in comparison.shares}
    assert shares == {"default/pod-0": (10, 0), "default/pod-1": (0, 10)}
    small = replayed(path, reweighted(text, "kv-cache-utilization-scorer", 2))  # 2.2 and 1.8
    assert [one.outcome.endpoints[0][0] for one in small.decisions] == ["default/pod-0"] * 10


def test_recorded_matches_apply_while_their_producer_is_unchanged(tmp_path: Path) -> None:
    """A replay does not know what the caches hold."""
    path = record(Traffic([BLEND], seed=2), 300, tmp_path / "r")
    found = replayed(path, reweighted(BLEND, "prefix-cache-scorer", 30))
    assert found.notes == {}
    comparison = compared(found)
    assert comparison.moved > 0
    assert comparison.matched_tokens_now > comparison.matched_tokens_before > 0


def with_producer(text: str, **parameters: Any) -> str:
    config = yaml.safe_load(text)
    config["plugins"].append({"type": "approx-prefix-cache-producer", "parameters": parameters})
    return json.dumps(config)


def test_a_changed_producer_runs_on_the_recorded_prompts(tmp_path: Path) -> None:
    path = record(Traffic([BLEND], seed=2), 300, tmp_path / "r")
    same = replayed(path, with_producer(BLEND, hashSeed=4711))
    assert same.different == []
    assert set(same.notes) == {
        f"'{name}' has changed since the recording: it runs"
        for name in ("approx-prefix-cache-producer", "inflight-load-producer")
    }
    other = replayed(path, with_producer(BLEND, autoTune=False, blockSizeTokens=512))
    assert len(other.different) > 10


def test_a_producer_that_cannot_run_is_noted_with_the_reason(tmp_path: Path) -> None:
    path = record(Traffic([BLEND], seed=2, prompts=False), 100, tmp_path / "r")
    assert replayed(path).different == []
    found = replayed(path, with_producer(BLEND, hashSeed=4711))
    assert found.different == []
    left_out, note, _ = found.notes  # the last is of a reader of its findings
    assert left_out == "the prompts were left out of the recording"
    assert "it needs the prompts, which were left out: the recorded data applies" in note
    path = record(Traffic([SESSIONS], seed=2), 100, tmp_path / "s")
    notes = replayed(path, SESSIONS.replace("cookieName: sid", "cookieName: other")).notes
    assert any("it reads cookies, which are not recorded" in note for note in notes)
    path = record(Traffic([BLEND], seed=2), 20, tmp_path / "t")
    notes = replayed(path, golden("precise_prefix_cache")).notes
    assert any("subscribes to KV events, which are not recorded" in note for note in notes)
    assert any(
        "'token-producer' has changed since the recording, but it calls another server" in n
        for n in notes
    )
    path = record(Traffic([golden("configured_picker_is_the_default")], seed=2), 20, tmp_path / "u")
    notes = replayed(path, BLEND).notes
    assert any(
        "needs prompts, which no producer made when this was recorded" in note for note in notes
    )


def test_the_lengths_of_omitted_prompts_suffice_to_count_tokens(tmp_path: Path) -> None:
    found = replayed(record(Traffic([LOADS], seed=5, prompts=False), 400, tmp_path / "r"))
    assert found.different == []


def test_another_run_begins_with_empty_state(tmp_path: Path) -> None:
    path = tmp_path / "r"
    both = b""
    for seed in (1, 2):
        both += record(Traffic([SESSIONS], seed), 80, path).read_bytes()
    path.write_bytes(both + b'{"line":"dec')
    found = replayed(path)
    assert found.different == []
    assert len(found.decisions) > 140
    assert list(found.notes) == [f"line {both.count(10) + 1} is half-written"]


def test_a_new_refusal_counts_as_a_move(tmp_path: Path) -> None:
    path = record(Traffic([LOADS], seed=5), 300, tmp_path / "r")
    comparison = compared(replayed(path, LOADS.replace("maxConcurrency: 3", "maxConcurrency: 1")))
    assert comparison.refused_now > comparison.refused_before
    assert any(move.now == REFUSED for move in comparison.moves)


def test_an_unusable_configuration_is_an_error(tmp_path: Path) -> None:
    traffic = Traffic([BLEND], seed=2)
    path = record(traffic, 5, tmp_path / "r")
    with pytest.raises(ConfigError, match="no-such-plugin"):
        replayed(path, BLEND.replace("queue-scorer", "no-such-plugin"))
    path.write_bytes(path.read_bytes().replace(b"queue-scorer", b"no-such-plugin"))
    with pytest.raises(RecordingError, match=r"r:1: this version cannot use its configuration"):
        replayed(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"config":0', b'"config":5', "there is no configuration 5"),
        (b'"cause":"completed"', b'"cause":"bored"', "'bored' is not a valid FinishCause"),
        (b'"api":"completions"', b'"api":"smalltalk"', "'smalltalk' is not a valid Api"),
        (b'"findings":{"PrefixCacheMatchInfo/', b'"findings":{"Nobody', "names no producer"),
    ],
)
def test_an_inconsistent_line_is_refused_with_its_number(
    tmp_path: Path, old: bytes, new: bytes, why: str
) -> None:
    path = record(Traffic([BLEND], seed=2), 30, tmp_path / "r")
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(RecordingError, match=r"r:\d+: cannot be replayed") as caught:
        replayed(path)
    assert why in str(caught.value)


def test_a_corrupt_recording_raises_no_other_error(tmp_path: Path) -> None:
    path, draw = tmp_path / "r", Random(9)
    content = record(Traffic([SESSIONS], seed=2, endpoints=3), 12, path).read_bytes()
    for _ in range(100):
        broken = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(broken))
            length = draw.randrange(1, 40)
            match draw.randrange(4):
                case 0:
                    broken[at] = draw.randrange(256)
                case 1:
                    del broken[at : at + length]
                case 2:
                    broken[at:at] = broken[at : at + length]
                case _:
                    digits = [i for i in range(at, len(broken)) if chr(broken[i]).isdigit()][:1]
                    for i in digits:
                        broken[i : i + 1] = draw.choice([b"-7", b"1e99", b'"x"', b"null", b"[]"])
        path.write_bytes(bytes(broken))
        with suppress(RecordingError):
            replayed(path)


def test_secrets_never_reach_the_file(tmp_path: Path) -> None:
    content = record(Traffic([SESSIONS], seed=2), 200, tmp_path / "r").read_bytes()
    for secret in (b"canary", b"pepper", b"session-3", b"Bearer"):
        assert secret not in content
    assert b"default/pod-1" in content


def test_changes_of_the_pool_are_recorded(tmp_path: Path) -> None:
    traffic = Traffic([BLEND], seed=2)
    asyncio.run(traffic.run(300))
    lines = [decoded(line) for line in traffic.sink.lines]
    changes = {line.change for line in lines if isinstance(line, EndpointChange)}
    assert changes == {"joined", "left", "forgotten"}


OTHER = BLEND.replace("weight: 3", "weight: 30")


def test_a_replay_continues_after_lost_lines(tmp_path: Path) -> None:
    traffic = Traffic([BLEND], seed=2)
    asyncio.run(traffic.run(50))
    traffic.sink.lose("the disk was full", 0.0)
    asyncio.run(traffic.run(50))
    found = replayed(traffic.sink.write_to(tmp_path / "r"))
    assert any("lines were lost while recording" in note for note in found.notes)
    assert len(found.decisions) > 80
    assert found.different == []
    assert found.runs == 1  # the repeated header begins no other


def test_a_recording_whose_beginning_was_lost_can_be_read(tmp_path: Path) -> None:
    traffic = Traffic([BLEND, OTHER], seed=2)
    traffic.sink.lose("the disk was full", 0.0)
    traffic.sink.lines.clear()
    traffic.reload(OTHER)
    asyncio.run(traffic.run(50))
    found = replayed(traffic.sink.write_to(tmp_path / "r"))
    assert any("lines were lost while recording" in note for note in found.notes)
    assert len(found.decisions) > 40
    assert found.runs == 1


def test_a_run_with_a_lost_beginning_does_not_continue_the_previous_run(tmp_path: Path) -> None:
    first, other = Traffic([BLEND], seed=2), Traffic([OTHER], seed=3)
    content = record(first, 50, tmp_path / "r").read_bytes()
    other.sink.lose("the disk was full", 0.0)
    other.sink.lines.clear()
    path = record(other, 50, tmp_path / "r")
    path.write_bytes(content + path.read_bytes())
    found = replayed(path)
    assert found.runs == 2
    assert found.different == []


def test_a_decision_of_a_lost_configuration_is_noted(tmp_path: Path) -> None:
    traffic = Traffic([BLEND, OTHER, BLEND], seed=2)
    path = record(traffic, 300, tmp_path / "r")
    lines = [decoded(one) for one in traffic.sink.lines]
    lost = next(i for i, one in enumerate(lines) if isinstance(one, Config) and one.number == 1)
    path.write_bytes(b"".join(encoded(Lost(1) if i == lost else x) for i, x in enumerate(lines)))
    found = replayed(path)
    by = [one.config for one in lines if isinstance(one, DecisionLine)]
    assert len(found.decisions) == len(by) - by.count(1)
    text = "decided by a configuration that was lost, and not repeated"
    assert found.notes[text] == by.count(1) > 0
