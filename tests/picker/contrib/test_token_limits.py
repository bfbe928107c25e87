"""Tokens a minute of tenants and models, on one replica and on several."""

import asyncio
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.contrib.token_limits import LIMIT_HEADER, Limit, TokenLimits, parse_limits
from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes, EndpointLoad
from picker.framework.interfaces import (
    BackgroundFlush,
    DataProducer,
    Flight,
    RequestEndHook,
    RequestProcessor,
    ResponseProgressHook,
)
from picker.framework.replicas import SharesLoads
from picker.types import (
    Api,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    ResponseProgress,
    SchedulingResult,
    Usage,
)
from tests.depth import examples
from tests.support.picker.plugin_scenes import configured

make = partial(configured, "token-limits")
FAIRNESS = "x-gateway-inference-fairness-id"
DONE = FinishCause.COMPLETED


def asking(
    now: float = 0.0,
    limits: str | None = "600",
    tenant: str = "acme",
    model: str = "m",
    body: ParsedBody | None = None,
    **fields: Any,
) -> InferenceRequest:
    headers = {FAIRNESS: tenant} | ({} if limits is None else {LIMIT_HEADER: limits})
    parsed = body or ParsedBody(Api.CHAT_COMPLETIONS, model)
    return InferenceRequest(
        "r", headers, parsed, model, model, received_at_seconds=now, fairness_id=tenant, **fields
    )


def flight_of(request: InferenceRequest) -> Flight:
    return Flight(request, SchedulingResult((), "default"), Attributes())


def use(plugin: TokenLimits, tokens: int, request: InferenceRequest, now: float = 0.0) -> None:
    plugin.request_ended(flight_of(request), DONE, Usage(tokens - 1, 1, tokens), now)


def refusal(plugin: TokenLimits, request: InferenceRequest) -> RefusedError | None:
    try:
        plugin.process(request)
    except RefusedError as error:
        return error
    return None


def test_it_has_every_contract_that_its_parts_are_called_by() -> None:
    kinds = (RequestProcessor, DataProducer, ResponseProgressHook, RequestEndHook, BackgroundFlush)
    assert all(isinstance(make(), kind) for kind in (*kinds, SharesLoads))


def test_retry_after_is_exact() -> None:
    plugin = make()
    assert refusal(plugin, asking()) is None
    use(plugin, 700, asking())
    refused = refusal(plugin, asking())
    assert refused is not None
    assert refused.message == "'acme' has used its 600 tokens a minute"
    assert (refused.code, refused.status) == (Code.RESOURCE_EXHAUSTED, 429)
    assert refused.retry_after_seconds == 11  # 100 tokens beyond, at 10 tokens a second
    assert refusal(plugin, asking(now=10.0)) is not None
    assert refusal(plugin, asking(now=11.0)) is None


def test_a_limit_is_of_its_tenant_and_model() -> None:
    plugin, limits = make(), "600,  llama=100"
    use(plugin, 150, asking(limits=limits, model="llama"))
    refused = refusal(plugin, asking(limits=limits, model="llama"))
    assert refused is not None
    assert refused.message == "'acme' has used its 100 tokens a minute of model 'llama'"
    assert refusal(plugin, asking(limits=limits, model="qwen")) is None
    assert refusal(plugin, asking(limits=limits, model="llama", tenant="other")) is None
    use(plugin, 450, asking(limits=limits, model="qwen"))  # of all models together, 600
    assert refusal(plugin, asking(limits=limits, model="qwen")) is not None
    assert refusal(plugin, asking(limits=None)) is None


def test_a_rewritten_model_counts_under_both_names() -> None:
    plugin, request = make(), asking(limits="served=10", model="asked")
    rewritten = replace(request, target_model="served")
    use(plugin, 20, rewritten)
    assert refusal(plugin, rewritten) is not None
    assert refusal(plugin, request) is None


def test_the_parameter_limits_tenants_whose_limit_no_header_names() -> None:
    plugin = make({"tokensPerMinute": 60})
    use(plugin, 60, asking(limits=None))
    assert refusal(plugin, asking(limits=None)) is not None
    assert refusal(plugin, asking(limits="1000")) is None


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("5", (Limit(5),)),
        (" 5 , a=b=7", (Limit(5), Limit(7, "a=b"))),
        ("", None),
        ("0", None),
        ("-1", None),
        ("=5", None),
        ("5,", None),
        ("a=x", None),
        ("٣", None),
        ("9" * 16, None),
    ],
)
def test_a_header_is_read_whole_or_not_at_all(text: str, limits: Any) -> None:
    if limits is not None:
        assert parse_limits(text) == limits
        return
    with pytest.raises(ValueError, match="is neither TOKENS nor MODEL=TOKENS"):
        parse_limits(text)


def test_a_header_that_the_gateway_has_wrong_is_no_fault_of_the_client() -> None:
    refused = refusal(make(), asking(limits="many"))
    assert refused is not None
    assert refused.status == 500


@pytest.mark.parametrize(
    ("cause", "stream", "num_bytes", "tokens"),
    [
        (DONE, False, 80, 100 + 20),
        (DONE, True, 4000, 100 + 20),
        (FinishCause.CLIENT_GONE, True, 2000, 100 + 10),
        (FinishCause.RESET, True, 2000, 0),
        (FinishCause.REFUSED, False, None, 0),
    ],
)
def test_an_answer_without_usage_costs_its_size(cause, stream, num_bytes, tokens) -> None:
    plugin = make()
    body = ParsedBody(Api.CHAT_COMPLETIONS, "m", stream=stream)
    flight = flight_of(asking(body=body, size_bytes=400))
    if num_bytes is not None:
        plugin.response_progress(flight, ResponseProgress(1.0, num_bytes, is_last=True))
    plugin.request_ended(flight, cause, None, 0.0)
    assert sum(load.tokens for load in plugin.own_loads.values()) == tokens


@pytest.mark.parametrize(
    ("api", "limits", "payload", "options"),
    [
        (Api.CHAT_COMPLETIONS, "5", {}, {"include_usage": True}),
        (
            Api.COMPLETIONS,
            "5",
            {"stream_options": {"include_usage": False, "x": 1}},
            {"include_usage": True, "x": 1},
        ),
        (Api.COMPLETIONS, "5", {"stream_options": 3}, 3),  # for the engine to refuse
        (Api.RESPONSES, "5", {}, None),  # reports without being asked
        (Api.CHAT_COMPLETIONS, None, {}, None),
    ],
)
def test_the_stream_of_a_limited_tenant_reports_its_usage(api, limits, payload, options) -> None:
    request = asking(limits=limits, body=ParsedBody(api, "m", stream=True, payload=payload))
    body = make().produce(request, (), Attributes()).body
    assert body.payload.get("stream_options") == options
    assert (body.payload is payload) == (options == payload.get("stream_options"))


@given(st.integers(0, 2**32), st.integers(1, 4))
@examples(40)
def test_all_replicas_together_keep_to_the_limit(seed: int, num_replicas: int) -> None:
    """A tenant that asks ten times a second uses its limit, and no more, on however many."""
    limit, minutes = 6000, 3
    used = asyncio.run(_used([make() for _ in range(num_replicas)], Random(seed), limit, minutes))
    # The limit at once, then its rate; each replica may admit for the time of a report.
    assert used <= limit * (minutes + 1) + num_replicas * 20 * 400
    assert used >= 0.9 * limit * minutes


async def _used(replicas: list[TokenLimits], rng: Random, limit: int, minutes: int) -> int:
    used = 0
    for tick in range(minutes * 600):
        now = tick / 10
        if tick % 20 == 0:
            _exchange(replicas)
        if tick % 10 == 0:
            for one in replicas:
                await one.flush(now, 0.0)
        one, request = rng.choice(replicas), asking(now, str(limit))
        if refusal(one, request) is None:
            tokens = rng.randint(10, 400)
            use(one, tokens, request, now)
            used += tokens
    for one in replicas:
        one.check_integrity()
    return used


def _exchange(replicas: list[TokenLimits]) -> None:
    levels = [one.own_loads["acme"].tokens if one.own_loads else 0 for one in replicas]
    for one, own in zip(replicas, levels, strict=True):
        one.set_loads_elsewhere({"acme": EndpointLoad(tokens=sum(levels) - own)})
