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
    refused,
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


async def test_scores_are_told_for_the_subset_and_not_without_decision(tmp_path: Path) -> None:
    """Whoever was not a candidate has no score; a request without a body has none."""
    config = HEAD + "plugins: [{type: queue-scorer}]"
    two = pods(page(2), page(0))
    async with whole_picker(tmp_path, two, config, emit_endpoint_scores=True) as picker:
        hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [two[0].host_port]}}
        told = {f"{DESTINATION}-scores": {two[0].host_port: 1.0}}
        expected = directed(two[0].host_port, completion(), metadata=told)
        assert await picker.ask(completion(), metadata=hint) == expected
        async with picker.stream() as stream:
            await stream.request_headers(path="/v1/models", ends=True, metadata=hint)
            assert await stream.read(1) == directed(two[0].host_port)


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


@pytest.mark.parametrize("token", ["", "nonsense", "ZGVmYXVsdC9nb25l", "\xff", "===="])
async def test_a_token_that_says_nothing_is_no_token(tmp_path: Path, token: str) -> None:
    """It is replaced by one that does; also where the named endpoint may not serve."""
    two = pods(page(), page())
    async with whole_picker(tmp_path, two, SESSIONS % ("filter", "")) as picker:
        async with picker.stream() as stream:
            said = await stream.ask(completion(), {"x-session-token": token})
            chosen = next(pod for pod in two if pod.host_port == destination_of(said))
            assert await token_in(stream) == token_of(chosen)
        hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [two[0].host_port]}}
        headers = {"x-session-token": token_of(two[1])}
        assert await picker.destination(completion(), headers, metadata=hint) == two[0].host_port


BY_ID = "{strategy: session_id%s}"
TWO_SOURCES = (
    ", sessionIdConfig: {sources: [{header: x-first}, {attribute: agent-identity,"
    " producer: agent-identity}]}"
)


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


async def test_a_bound_session_moves_only_when_its_endpoint_is_gone(tmp_path: Path) -> None:
    """Then it stays where it has moved to."""
    two = pods(page(), page())
    config = SESSIONS % ("filter", ", parameters: " + BY_ID % "")
    async with whole_picker(tmp_path, two, config) as picker:
        headers = {"x-session-id": "s"}
        for pod in (two[0], two[1]):
            hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [pod.host_port]}}
            assert await picker.destination(completion(), headers, metadata=hint) == pod.host_port
            for _ in range(4):
                assert await picker.destination(completion(), headers) == pod.host_port


async def test_of_two_sources_the_first_wins(tmp_path: Path) -> None:
    """H40: a header before what is known of the agent."""
    plugins = (
        HEAD
        + "plugins: [{type: agent-identity}, {type: session-affinity-filter, parameters: "
        + BY_ID % TWO_SOURCES
        + "}, {type: random-picker}]"
    )
    two = pods(page(), page())
    async with whole_picker(tmp_path, two, plugins) as picker:
        for header, pod in (("x-first", two[0]), ("session-id", two[1])):
            hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [pod.host_port]}}
            await picker.destination(completion(), {header: "s-" + header}, metadata=hint)
        both = {"x-first": "s-x-first", "session-id": "s-session-id"}
        for _ in range(4):
            assert await picker.destination(completion(), both) == two[0].host_port
            one = {"session-id": "s-session-id"}
            assert await picker.destination(completion(), one) == two[1].host_port


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


async def test_a_profile_is_chosen_by_a_header(tmp_path: Path) -> None:
    """One that nobody has is refused."""
    config = (
        HEAD
        + """
plugins:
- {type: header-profile-handler}
- {name: zone-a, type: by-label, parameters: {label: zone, validValues: [a]}}
- {name: zone-b, type: by-label, parameters: {label: zone, validValues: [b]}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: zone-a}]}
- {name: other, plugins: [{pluginRef: zone-b}]}
"""
    )
    two = pods(page(), page(), labels=[{"zone": "a"}, {"zone": "b"}])
    async with whole_picker(tmp_path, two, config) as picker:
        assert await picker.destination(completion()) == two[0].host_port
        assert await picker.destination(completion(), {"epp-profile": " other "}) == (
            two[1].host_port
        )
        (said,) = await picker.ask(completion(), {"epp-profile": "nobody"})
        assert said.immediate_response.status.code == 429


async def test_filters_that_leave_nobody_refuse(tmp_path: Path) -> None:
    """429, since another time somebody may be left."""
    config = HEAD + "plugins: [{type: label-selector-filter, parameters: {matchLabels: {a: b}}}]"
    async with whole_picker(tmp_path, pods(page()), config) as picker:
        text = "ResourceExhausted - no endpoints available for the given request"
        assert await picker.ask(completion()) == refused(429, text, "rejected-saturated")


async def test_a_test_chooses_its_endpoints_by_a_header(tmp_path: Path) -> None:
    """As the conformance suite does; without the header any serves, unlike in the reference."""
    config = HEAD + "plugins: [{type: header-based-testing-filter}]"
    three = pods(page(), page(), page())
    async with whole_picker(tmp_path, three, config) as picker:
        for pod in three:
            headers = {"test-epp-endpoint-selection": pod.host_port}
            assert await picker.destination(completion(), headers) == pod.host_port
        assert await picker.destination(completion())
        for nobody in (" ", "10.9.9.9", "x"):
            (said,) = await picker.ask(completion(), {"test-epp-endpoint-selection": nobody})
            assert said.immediate_response.status.code == 429
