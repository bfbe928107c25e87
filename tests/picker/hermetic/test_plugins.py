"""Plugins whose work a gateway or a client can see (cases H32–H41, and more of their kind)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from ext_proc_stream import (
    DESTINATION,
    GatewayStream,
    completion,
    destination_of,
    directed,
    response_head,
    response_pieces,
)
from metrics_pages import Pod, page, pods
from whole_picker import HEAD, whole_picker

USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
ANSWER = json.dumps({"usage": USAGE}).encode()
SESSIONS = HEAD + "plugins: [{type: session-affinity-%s%s}, {type: random-picker}]"


def token_of(pod: Pod) -> str:
    """What a session is told of its endpoint."""
    return base64.b64encode(f"default/{pod.name}".encode()).decode()


async def token_in(stream: GatewayStream) -> str:
    """The token of a response."""
    (said,) = await stream.response_headers()
    options = said.response_headers.response.header_mutation.set_headers
    (token,) = [o.header.raw_value for o in options if o.header.key == "x-session-token"]
    return str(token.decode())


# H32: scores


async def test_scores_are_told_for_every_endpoint(tmp_path: Path) -> None:
    """H32: also of those that were not picked; each is not negative."""
    config = HEAD + "plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}]"
    two = pods(page(2, 0.5), page(0, 0.25))
    async with whole_picker(tmp_path, two, config, emit_endpoint_scores=True) as picker:
        scores = {two[0].host_port: 0.5, two[1].host_port: 1.75}
        told = {f"{DESTINATION}-scores": scores}
        expected = directed(two[1].host_port, completion(), metadata=told)
        assert await picker.ask(completion()) == expected


# H34–H40: sessions


@pytest.mark.parametrize("kind", ["filter", "scorer"], ids=["H34", "H35"])
async def test_a_token_pins_a_session(tmp_path: Path, kind: str) -> None:
    """Each response carries one; repeating it leads to the same endpoint."""
    config = (SESSIONS % (kind, "")).replace("random-picker", "max-score-picker")
    three = pods(page(), page(), page())
    async with whole_picker(tmp_path, three, config) as picker:
        for pod in three:
            hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [pod.host_port]}}
            async with picker.stream() as stream:
                assert destination_of(await stream.ask(completion(), metadata=hint))
                assert await token_in(stream) == token_of(pod)
            for _ in range(4):
                headers = {"x-session-token": token_of(pod)}
                async with picker.stream() as stream:
                    said = await stream.ask(completion(), headers)
                    assert said == directed(pod.host_port, completion())
                    expected = response_head({"x-session-token": token_of(pod)})
                    assert await stream.response_headers() == expected


BY_ID = "{strategy: session_id%s}"


@pytest.mark.parametrize("kind", ["filter", "scorer"])
async def test_a_session_id_pins_a_session(tmp_path: Path, kind: str) -> None:
    """H38: eleven times; other sessions go elsewhere, and no token is sent."""
    more = ", parameters: " + BY_ID % ""
    config = (SESSIONS % (kind, more)).replace("random-picker", "max-score-picker")
    four = pods(page(), page(), page(), page())
    async with whole_picker(tmp_path, four, config) as picker:
        found: dict[str, set[str]] = {}
        for number in range(11):
            for session in ("sess-A", "sess-B", "sess-C", f"other-{number}"):
                headers = {"x-session-id": session}
                went = await picker.destination(completion(), headers)
                found.setdefault(session, set()).add(went)
        assert all(len(went) == 1 for went in found.values())
        assert len(set.union(*found.values())) > 1
        async with picker.stream() as stream:
            await stream.ask(completion(), {"x-session-id": "sess-A"})
            assert await stream.response_headers() == response_head()


# Stages


def staged(decider: str = "deciders: {prefill: always-disagg-pd-decider}", more: str = "") -> str:
    """Prefill and decode at different endpoints, each stage with a token of its own."""
    return (
        HEAD
        + f"""
plugins:
- {{type: prefill-filter}}
- {{type: decode-filter}}
- {{type: always-disagg-pd-decider}}
- {{type: random-picker}}
- {{type: disagg-profile-handler, parameters: {{{decider}}}}}
- {{name: decode-token, type: session-affinity-filter, parameters: {{profileName: decode}}}}
- name: prefill-token
  type: session-affinity-filter
  parameters:
    profileName: prefill
    encodedEndpointHeaderConfig: {{header: x-prefill-session-token}}
{more}
schedulingProfiles:
- name: prefill
  plugins: [{{pluginRef: prefill-filter}}, {{pluginRef: prefill-token}}]
- name: decode
  plugins: [{{pluginRef: decode-filter}}, {{pluginRef: decode-token}}]
"""
    )


ROLES = [{"llm-d.ai/role": role} for role in ("prefill", "prefill", "decode", "decode")]


async def test_both_stages_of_a_session_are_pinned(tmp_path: Path) -> None:
    """H36: a token each; the prefill endpoint is told in a header of the request."""
    four = pods(*[page()] * 4, labels=ROLES)
    prefill, decode = four[1], four[2]
    tokens = {"x-session-token": token_of(decode), "x-prefill-session-token": token_of(prefill)}
    async with whole_picker(tmp_path, four, staged()) as picker:
        for _ in range(4):
            async with picker.stream() as stream:
                said = await stream.ask(completion(), tokens)
                told = {"x-prefiller-host-port": prefill.host_port}
                assert said == directed(decode.host_port, completion(), headers=told)
                assert await stream.response_headers() == response_head(tokens)


async def test_without_a_decider_only_one_stage_runs(tmp_path: Path) -> None:
    """H37: only its token is sent, and a client's own prefill header is removed."""
    four = pods(*[page()] * 4, labels=ROLES)
    async with whole_picker(tmp_path, four, staged("")) as picker, picker.stream() as stream:
        sent = {"x-session-token": token_of(four[3]), "x-prefiller-host-port": "6.6.6.6:1"}
        assert await stream.ask(completion(), sent) == directed(four[3].host_port, completion())
        expected = response_head({"x-session-token": token_of(four[3])})
        assert await stream.response_headers() == expected


async def test_a_stage_without_endpoints_is_left_out_but_not_decode(tmp_path: Path) -> None:
    """No prefill endpoint: decode does it all; no decode endpoint: 429 in the reference's words."""
    only = pods(page(), labels=[{"llm-d.ai/role": "decode"}])
    async with whole_picker(tmp_path, only, staged()) as picker:
        assert await picker.ask(completion()) == directed(only[0].host_port, completion())
    only = pods(page(), labels=[{"llm-d.ai/role": "prefill"}])
    async with whole_picker(tmp_path, only, staged()) as picker:
        (said,) = await picker.ask(completion())
        assert said.immediate_response.status.code == 429


# H41: attributes


def reporting(expression: str, more: str = "", namespace: str = "") -> str:
    """A configuration that reports a number."""
    key = f"name: x-gateway-inference-request-cost{namespace}"
    return (
        HEAD
        + "plugins:\n- {type: queue-scorer}\n- type: request-attribute-reporter\n"
        + f"  parameters: {{attributes: [{{key: {{{key}}}, expression: '{expression}'{more}}}]}}"
    )


COST = "usage.completion_tokens"
TOLD = {"envoy.lb": {"x-gateway-inference-request-cost": 10}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(reporting(COST), TOLD, id="H41"),
        pytest.param(reporting(COST, namespace=", namespace: my.own"), {
            "my.own": TOLD["envoy.lb"]}, id="another namespace"),
        pytest.param(reporting(COST, ", condition: 'usage.prompt_tokens > 5'"), TOLD, id="is so"),
        pytest.param(reporting(COST, ", condition: 'usage.prompt_tokens > 7'"), None, id="is not"),
        pytest.param(reporting(f"{COST} - 10"), None, id="nothing"),
        pytest.param(reporting(f"{COST} / (usage.prompt_tokens - 7)"), None, id="no number"),
    ],
)  # fmt: skip
async def test_a_cost_is_told_with_the_last_piece(
    tmp_path: Path, config: str, expected: dict[str, Any] | None
) -> None:
    """And with no other; whether the response comes in one piece or in several."""
    async with whole_picker(tmp_path, pods(page()), config) as picker:
        async with picker.stream() as stream:
            await stream.ask(completion())
            await stream.response_headers()
            await stream.response_body(ANSWER, ends=True)
            assert await stream.read_response() == response_pieces(ANSWER, metadata=expected)
        async with picker.stream() as stream:
            await stream.ask(completion())
            await stream.response_headers()
            await stream.response_body(ANSWER)
            await stream.response_body(b"", ends=True)
            last = response_pieces(b"", metadata=expected)
            assert await stream.read_response() == [*response_pieces(ANSWER, ends=False), *last]


# Other plugins that answer headers
