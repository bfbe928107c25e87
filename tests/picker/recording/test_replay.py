"""Recorded decisions, decided again: what they were, bit by bit, or what is different."""

from __future__ import annotations

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
from picker.recording.comparison import REFUSED, Tally
from picker.recording.lines import (
    DecisionLine,
    EndpointChange,
    RecordingError,
    ResultLine,
    decoded,
    encoded,
)
from picker.types import EndpointMetrics
from tests.support.picker.recorded_traffic import MoodyHealth, Traffic, record, replayed

GOLDEN = Path(__file__).parents[2] / "golden" / "config"
BUILT_IN = DEFAULT_CONFIG.decode()
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
# The shapes that people run, and every plugin there is.
SHAPES = (
    "bursts",
    "data_parallel_profile_handler",
    "every_filter_and_scorer",
    "every_way_to_look_at_requests",
    "flow_control_every_policy",
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
- {{type: header-label-affinity-scorer, parameters: {{headerName: x-tier, labelKey: tier}}}}
- {{type: lora-affinity-scorer}}
- {{type: no-hit-lru-scorer}}
- {{type: weighted-random-picker, parameters: {{maxNumOfEndpoints: 2}}}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: by-cookie}}
  - {{pluginRef: session-affinity-scorer, weight: 0.3}}
  - {{pluginRef: header-label-affinity-scorer, weight: 0.2}}
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


def golden(name: str) -> str:
    """A configuration of that folder."""
    return (GOLDEN / f"{name}.in.yaml").read_text()


def reweighted(text: str, scorer: str, weight: float) -> str:
    """The configuration with another weight of one scorer."""
    config = yaml.safe_load(text)
    (part,) = [
        one for one in config["schedulingProfiles"][0]["plugins"] if one["pluginRef"] == scorer
    ]
    part["weight"] = weight
    return json.dumps(config)


@pytest.mark.parametrize("name", ["built in", "sessions", "loads", *SHAPES])
def test_the_same_configuration_decides_the_same(name: str, tmp_path: Path) -> None:
    """To every total and refusal; with churn, restarts and losses of clients."""
    texts = {"built in": BUILT_IN, "sessions": SESSIONS, "loads": LOADS}
    text = texts.get(name) or golden(name)
    requests = 1500 if name == "built in" else 300
    traffic = Traffic([text], seed=7, endpoints=14)
    found = replayed(record(traffic, requests, tmp_path / "r"))
    assert found.different == []
    assert len(found.decisions) > requests * 0.9
    assert found.notes == {}
    picked = {one.recorded.result.endpoints[0] for one in found.decisions if one.recorded.result}
    assert len(picked) > 1


def test_configurations_that_change_in_between_decide_the_same(tmp_path: Path) -> None:
    """State of plugins goes on where their entries are alike."""
    texts = [BUILT_IN, LOADS, golden("published_optimized_baseline"), SESSIONS, LOADS, BUILT_IN]
    traffic = Traffic(texts, seed=11)
    found = replayed(record(traffic, 1200, tmp_path / "r"))
    assert found.different == []
    assert {one.recorded.config for one in found.decisions} == set(range(len(texts)))


@pytest.mark.parametrize("name", ["sessions", "loads", "published_pd_disaggregation"])
def test_requests_that_were_decided_several_times_are_too(name: str, tmp_path: Path) -> None:
    """An ejected endpoint is tried out first, and those that are held back are asked last."""
    text = {"sessions": SESSIONS, "loads": LOADS}.get(name) or golden(name)
    traffic = Traffic([text], seed=3, health=MoodyHealth(4))
    found = replayed(record(traffic, 400, tmp_path / "r"))
    assert found.different == []
    assert found.notes == {}
    assert sum(one.recorded.again is not None for one in found.decisions) > 2


def test_what_plugins_remember_matters_to_the_replay(tmp_path: Path) -> None:
    """So it is not by chance that replays are identical."""
    traffic = Traffic([LOADS], seed=3)
    path = record(traffic, 400, tmp_path / "r")
    kept = [line for line in traffic.sink.lines if b'"line":"end"' not in line]
    path.write_bytes(b"".join(kept))
    assert len(replayed(path).different) > 50


def test_a_tampered_total_is_found(tmp_path: Path) -> None:
    """The last bit counts."""
    traffic = Traffic([BUILT_IN], seed=3)
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
    tally = Tally(5)
    tally.add(different)
    (difference,) = tally.result().differences
    assert "of candidate 1 in profile 'default'" in difference.texts[0]


async def two_pods(weight: float, path: Path) -> Path:
    """Ten requests in turn: pod-0 has an empty queue and a full cache, pod-1 the reverse."""
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
    traffic.draw.random = lambda: 0.9  # type: ignore[method-assign]  # nothing special happens
    for _ in range(10):
        await traffic.request()
        traffic.ends()
    traffic.recorder.flush()
    return traffic.sink.write_to(path)


def test_another_weight_moves_what_it_should(tmp_path: Path) -> None:
    """By hand: with 2 and 1, 2·1 + 1·0.1 = 2.1 and 1·0.9 = 0.9; with 2 and 5, 2.5 and 4.5."""
    path = asyncio.run(two_pods(1, tmp_path / "r"))
    text = json.loads(path.read_bytes().splitlines()[0])["config"]
    found = replayed(path, reweighted(text, "kv-cache-utilization-scorer", 5))
    tally = Tally(10)
    for one in found.decisions:
        tally.add(one)
        outcome = one.outcome
        assert isinstance(outcome, ResultLine)
        assert outcome.profiles["default"].totals == pytest.approx((2.5, 4.5))
        assert one.recorded.result.profiles["default"].totals == pytest.approx((2.1, 0.9))
    told = tally.result()
    assert (told.decisions, told.moved, told.rescored, told.identical) == (10, 10, 10, 0)
    (move,) = told.moves
    assert (move.before, move.now, move.requests) == ("default/pod-0", "default/pod-1", 10)
    assert told.scores.before == pytest.approx(2.1)
    assert told.scores.now == pytest.approx(4.5)
    shares = {one.endpoint: (one.before, one.now) for one in told.shares}
    assert shares == {"default/pod-0": (10, 0), "default/pod-1": (0, 10)}
    small = replayed(path, reweighted(text, "kv-cache-utilization-scorer", 2))  # 2.2 and 1.8
    assert [one.outcome.endpoints[0][0] for one in small.decisions] == ["default/pod-0"] * 10


def test_matches_are_taken_as_recorded_while_their_producer_is_as_it_was(tmp_path: Path) -> None:
    """Also where requests now go elsewhere: what is cached where is not for the replay to say."""
    path = record(Traffic([BUILT_IN], seed=2), 300, tmp_path / "r")
    found = replayed(path, reweighted(BUILT_IN, "prefix-cache-scorer", 30))
    assert found.notes == {}
    tally = Tally(0)
    for one in found.decisions:
        tally.add(one)
    told = tally.result()
    assert told.moved > 0
    assert told.matched_tokens_now > told.matched_tokens_before > 0


def with_producer(text: str, **parameters: Any) -> str:
    """The configuration with other parameters of its prefix cache."""
    config = yaml.safe_load(text)
    config["plugins"].append({"type": "approx-prefix-cache-producer", "parameters": parameters})
    return json.dumps(config)


def test_a_producer_that_is_not_as_it_was_is_run(tmp_path: Path) -> None:
    """On the recorded prompts, and so is what takes its findings: with the same parameters written
    out it finds what it found.
    """
    path = record(Traffic([BUILT_IN], seed=2), 300, tmp_path / "r")
    same = replayed(path, with_producer(BUILT_IN, hashSeed=4711))
    assert same.different == []
    assert set(same.notes) == {
        f"'{name}' has changed since the recording: it runs"
        for name in ("approx-prefix-cache-producer", "inflight-load-producer")
    }
    other = replayed(path, with_producer(BUILT_IN, autoTune=False, blockSizeTokens=512))
    assert len(other.different) > 10


def test_what_cannot_be_run_is_told_and_stands_in(tmp_path: Path) -> None:
    """Left out prompts, engines, other servers, cookies: each with its reason."""
    path = record(Traffic([BUILT_IN], seed=2, prompts=False), 100, tmp_path / "r")
    assert replayed(path).different == []
    found = replayed(path, with_producer(BUILT_IN, hashSeed=4711))
    assert found.different == []
    left_out, note, _ = found.notes  # the last one of what takes its findings
    assert left_out == "the prompts were left out of the recording"
    assert "it needs the prompts, which were left out: the recorded data applies" in note
    path = record(Traffic([SESSIONS], seed=2), 100, tmp_path / "s")
    notes = replayed(path, SESSIONS.replace("cookieName: sid", "cookieName: other")).notes
    assert any("it reads cookies, which are not recorded" in note for note in notes)
    path = record(Traffic([BUILT_IN], seed=2), 20, tmp_path / "t")
    notes = replayed(path, golden("precise_prefix_cache")).notes
    assert any("subscribes to KV events, which are not recorded" in note for note in notes)
    assert any(
        "'token-producer' has changed since the recording, but it calls another server" in n
        for n in notes
    )
    path = record(Traffic([golden("configured_picker_is_the_default")], seed=2), 20, tmp_path / "u")
    notes = replayed(path, BUILT_IN).notes
    assert any(
        "needs prompts, which no producer made when this was recorded" in note for note in notes
    )


def test_lengths_of_left_out_prompts_decide_as_the_prompts_did(tmp_path: Path) -> None:
    """In a configuration that counts tokens."""
    found = replayed(record(Traffic([LOADS], seed=5, prompts=False), 400, tmp_path / "r"))
    assert found.different == []


def test_another_run_begins_with_nothing(tmp_path: Path) -> None:
    """Two pickers wrote to one file, one after the other."""
    path = tmp_path / "r"
    both = b""
    for seed in (1, 2):
        both += record(Traffic([SESSIONS], seed), 80, path).read_bytes()
    path.write_bytes(both + b'{"line":"dec')
    found = replayed(path)
    assert found.different == []
    assert len(found.decisions) > 140
    assert list(found.notes) == [f"line {both.count(10) + 1} is half-written"]


def test_refusals_are_destinations_too(tmp_path: Path) -> None:
    """What a new configuration refuses shows as a move to nowhere."""
    path = record(Traffic([LOADS], seed=5), 300, tmp_path / "r")
    tally = Tally(3)
    for one in replayed(path, LOADS.replace("maxConcurrency: 3", "maxConcurrency: 1")).decisions:
        tally.add(one)
    told = tally.result()
    assert told.refused_now > told.refused_before
    assert any(move.now == REFUSED for move in told.moves)


def test_a_configuration_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """The other one as a `ConfigError`, the recorded one with its line."""
    traffic = Traffic([BUILT_IN], seed=2)
    path = record(traffic, 5, tmp_path / "r")
    with pytest.raises(ConfigError, match="no-such-plugin"):
        replayed(path, BUILT_IN.replace("queue-scorer", "no-such-plugin"))
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
def test_lines_that_make_no_sense_are_refused_with_their_number(
    tmp_path: Path, old: bytes, new: bytes, why: str
) -> None:
    path = record(Traffic([BUILT_IN], seed=2), 30, tmp_path / "r")
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(RecordingError, match=r"r:\d+: cannot be replayed") as told:
        replayed(path)
    assert why in str(told.value)


def test_garbage_never_raises_anything_else(tmp_path: Path) -> None:
    """Bytes that were changed, cut out, doubled or swapped, anywhere in a recording."""
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
    """Credentials, cookies, queries, salts, session ids and tokens that are none."""
    content = record(Traffic([SESSIONS], seed=2), 200, tmp_path / "r").read_bytes()
    for secret in (b"canary", b"pepper", b"session-3", b"Bearer"):
        assert secret not in content
    assert b"default/pod-1" in content


def test_what_becomes_of_the_pool_is_told(tmp_path: Path) -> None:
    """Endpoints that join, leave and restart."""
    traffic = Traffic([BUILT_IN], seed=2)
    asyncio.run(traffic.run(300))
    changes = [decoded(line) for line in traffic.sink.lines]
    told = {line.change for line in changes if isinstance(line, EndpointChange)}
    assert told == {"joined", "left", "forgotten"}
