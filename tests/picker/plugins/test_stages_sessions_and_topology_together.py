"""A whole configuration with stages, sessions and topology."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.config.build import Assembly, BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.decisions.steps import PluginSteps
from picker.framework.attributes import Attributes, Topology
from picker.framework.interfaces import DataProducer
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import Api, InferenceRequest, SchedulingResult
from tests.support.picker.plugin_scenes import placed, request_for

CONFIG = b"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters: {deciders: {prefill: prefix-based-pd-decider}}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 64}}
- {type: prefill-filter}
- {type: decode-filter}
- {type: topology-extractor}
- {type: topology-affinity-filter, parameters: {minAffinity: rack}}
- {type: topology-affinity-scorer}
- type: session-affinity-filter
  parameters:
    strategy: session_id
    sessionIdConfig: {sources: [{attribute: SessionID}, {attribute: agent-identity}]}
- {type: session-id-producer, parameters: {cookieName: sid}}
- {type: agent-identity}
- type: utilization-filter
  parameters: {conditions: [{metric: active-requests, maxValue: 9}], fallbackOnEmpty: true}
- {type: max-score-picker}
schedulingProfiles:
- name: decode
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: utilization-filter}
  - {pluginRef: session-affinity-filter}
  - {pluginRef: max-score-picker}
- name: prefill
  plugins:
  - {pluginRef: prefill-filter}
  - {pluginRef: topology-affinity-filter}
  - {pluginRef: topology-affinity-scorer, weight: 2}
  - {pluginRef: max-score-picker}
"""
RACKS = "abc"
Decide = Callable[[InferenceRequest], SchedulingResult]


@pytest.fixture
def assembly() -> Assembly:
    options = BuildOptions(allow_experimental=True, strict_data_scope=True)
    loaded = load_config(CONFIG, "test.yaml")
    return build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0, options)


@pytest.fixture
def decide(assembly: Assembly) -> Decide:
    candidates = [
        placed(
            f"{role}-{rack}",
            {"llm-d.ai/role": role},
            address=f"10.0.0.{1 + RACKS.index(rack)}",
            attributes={"Topology/topology-extractor": Topology(f"{role}-{rack}", rack)},
        )
        for rack in RACKS
        for role in ("prefill", "decode")
    ]
    rng = Random(1)

    def run(request: InferenceRequest) -> SchedulingResult:
        attributes = Attributes()
        for processor in assembly.pipeline.processors:
            request = processor.plugin.process(request)
        for producer in assembly.pipeline.producers:
            assert isinstance(producer.plugin, DataProducer)
            request = producer.plugin.produce(request, candidates, attributes)
        result = assembly.pipeline.scheduler.plugin.schedule(
            request, candidates, attributes, rng, PluginSteps()
        )
        for hook in assembly.pipeline.hooks:
            hook.plugin.pre_request(request, result, attributes)
        return result

    return run


def completion(prompt: str, **headers: str) -> InferenceRequest:
    payload: dict[str, Any] = {"model": "m", "prompt": prompt}
    return replace(request_for(Api.COMPLETIONS, payload), headers=headers)


def test_a_long_prompt_is_prefilled_in_the_rack_of_its_decode_endpoint(decide: Decide) -> None:
    racks = set()
    for session in range(12):
        first = completion(f"{session} " * 400, cookie=f"sid={session}")
        result = decide(first)
        _, rack = result.endpoints[0].name.split("-")
        racks.add(rack)
        assert result.profiles["prefill"].picked[0].candidate.endpoint.name == f"prefill-{rack}"
        host = result.profiles["prefill"].picked[0].candidate.endpoint.host_port
        assert result.set_headers == {"x-prefiller-host-port": host}
        again = decide(first)
        assert again.endpoints == result.endpoints
        assert again.set_headers == {}
    assert len(racks) > 1


def test_a_short_prompt_is_not_worth_a_prefill_endpoint(decide: Decide) -> None:
    result = decide(completion("hello"))
    assert list(result.profiles) == ["decode"]
    assert result.set_headers == {}


def test_an_agents_turns_stay_together(decide: Decide) -> None:
    for agent in range(6):
        headers = {"x-claude-code-session-id": f"agent-{agent}"}
        turns = [decide(completion(f"turn {turn}", **headers)) for turn in range(4)]
        assert len({turn.endpoints[0].key for turn in turns}) == 1


def test_every_finding_is_declared(decide: Decide, caplog: pytest.LogCaptureFixture) -> None:
    """An undeclared finding would be dropped."""
    decide(completion("long " * 400, cookie="sid=1"))
    assert "declared" not in caplog.text
