"""Plugins with effects visible to a gateway or a client (cases H32–H41 and similar ones)."""

import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import (
    DESTINATION,
    GatewayStream,
    completion,
    destination_of,
    directed,
    response_head,
    response_pieces,
)
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.whole_picker import HEAD, whole_picker
from tests.support.waiting import until

USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
ANSWER = json.dumps({"usage": USAGE}).encode()
SESSIONS = HEAD + "plugins: [{type: session-affinity-%s}, {type: max-score-picker}]"


def token_of(pod: Pod) -> str:
    return base64.b64encode(f"default/{pod.name}".encode()).decode()


async def token_in(stream: GatewayStream) -> str:
    (said,) = await stream.response_headers()
    options = said.response_headers.response.header_mutation.set_headers
    (token,) = [o.header.raw_value for o in options if o.header.key == "x-session-token"]
    return str(token.decode())


# H32: scores


# H34–H40: sessions


@pytest.mark.parametrize("kind", ["filter", "scorer"], ids=["H34", "H35"])
async def test_a_token_pins_a_session(tmp_path: Path, kind: str) -> None:
    three = pods(page(), page(), page())
    async with whole_picker(tmp_path, three, SESSIONS % kind) as picker:
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


# Prefill and decode at different endpoints, each stage with a token of its own.
STAGED = (
    HEAD
    + """
plugins:
- {type: prefill-filter}
- {type: decode-filter}
- {type: always-disagg-pd-decider}
- {type: random-picker}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- {name: decode-token, type: session-affinity-filter, parameters: {profileName: decode}}
- name: prefill-token
  type: session-affinity-filter
  parameters:
    profileName: prefill
    encodedEndpointHeaderConfig: {header: x-prefill-session-token}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: prefill-token}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: decode-token}]
"""
)


ROLES = [{"llm-d.ai/role": role} for role in ("prefill", "prefill", "decode", "decode")]


async def test_both_stages_of_a_session_are_pinned(tmp_path: Path) -> None:
    """H36: a request header names the prefill endpoint."""
    four = pods(*[page()] * 4, labels=ROLES)
    prefill, decode = four[1], four[2]
    tokens = {"x-session-token": token_of(decode), "x-prefill-session-token": token_of(prefill)}
    async with whole_picker(tmp_path, four, STAGED) as picker:
        for _ in range(4):
            async with picker.stream() as stream:
                said = await stream.ask(completion(), tokens)
                headers = {"x-prefiller-host-port": prefill.host_port}
                assert said == directed(decode.host_port, completion(), headers=headers)
                assert await stream.response_headers() == response_head(tokens)


async def test_a_request_is_under_way_at_each_endpoint_until_it_has_done_its_part(
    tmp_path: Path,
) -> None:
    four = pods(*[page()] * 4, labels=ROLES)
    tokens = {"x-session-token": token_of(four[2]), "x-prefill-session-token": token_of(four[1])}

    async def counts() -> list[int]:
        rows = await picker.endpoints()
        return [rows[pod.name]["inflight_requests"] for pod in four]

    async with whole_picker(tmp_path, four, STAGED) as picker:
        async with picker.stream() as stream:
            await stream.ask(completion(), tokens)
            assert await counts() == [0, 1, 1, 0]
            await stream.response_headers()
            await stream.response_body(b'{"id":', ends=False)
            await until(lambda: _is(counts, [0, 0, 1, 0]))
            await stream.response_body(b'"x"}', ends=True)
            await stream.read_response()
        assert await counts() == [0, 0, 0, 0]
        async with picker.stream() as stream:
            await stream.ask(completion(), tokens)
        await until(lambda: _is(counts, [0, 0, 0, 0]))


async def _is(counts: Callable[[], Awaitable[list[int]]], expected: list[int]) -> bool:
    return await counts() == expected


async def test_a_cost_is_reported_with_the_last_piece(tmp_path: Path) -> None:
    """H41: no other piece has it, whether the response has one piece or several."""
    config = (
        HEAD
        + """
plugins:
- {type: queue-scorer}
- type: request-attribute-reporter
  parameters:
    attributes:
    - {key: {name: x-gateway-inference-request-cost}, expression: usage.completion_tokens}
"""
    )
    headers = {"envoy.lb": {"x-gateway-inference-request-cost": 10}}
    async with whole_picker(tmp_path, pods(page()), config) as picker:
        for pieces in ([ANSWER], [ANSWER, b""]):
            async with picker.stream() as stream:
                await stream.ask(completion())
                await stream.response_headers()
                expected = []
                for piece in pieces:
                    is_last = piece is pieces[-1]
                    await stream.response_body(piece, ends=is_last)
                    metadata = headers if is_last else None
                    expected += response_pieces(piece, ends=is_last, metadata=metadata)
                assert await stream.read_response() == expected
