"""inflight-load-producer: each request is counted, and returned exactly once."""

import gc
from collections.abc import Callable, Mapping
from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import Attributes, EndpointLoad, inflight_load_key
from picker.framework.interfaces import Flight
from picker.plugins.producers.inflight_load_producer import (
    InflightLoadParameters,
    InflightLoadProducer,
)
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import (
    Api,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    ResponseHead,
    ResponseProgress,
    SchedulingResult,
)
from tests.depth import examples
from tests.support.picker.plugin_scenes import candidate, decided

NAME = "inflight-load-producer"
FIRST = ResponseProgress(1.0, 10, is_first=True)
LATER = ResponseProgress(2.0, 20)


def _producer(**parameters: Any) -> InflightLoadProducer:
    return InflightLoadProducer(NAME, InflightLoadParameters(**parameters))


def _request(tokens: int, limit: int | None = None) -> InferenceRequest:
    body = ParsedBody(Api.COMPLETIONS, "m", max_output_tokens=limit)
    prompts = (pack(f"<{tokens}I", *range(tokens)),)
    return InferenceRequest("same-id", {}, body, "m", "m", prompts=prompts)


def _result(**profiles: str) -> SchedulingResult:
    """The first profile is the primary one."""
    return decided(**{name: [candidate(key)] for name, key in profiles.items()})


def _leave(
    producer: InflightLoadProducer,
    request: InferenceRequest,
    result: SchedulingResult,
    match: Mapping[str, int] | None = None,
) -> Flight:
    attributes = Attributes()
    if match is not None:
        info = PrefixCacheMatchInfo(4, 64, match)
        attributes[match_info_key("approx-prefix-cache-producer")] = info
    producer.produce(request, [], attributes)
    producer.pre_request(request, result, attributes)
    return Flight(request, result, attributes)


def _end(producer: InflightLoadProducer, flight: Flight) -> None:
    producer.request_ended(flight, FinishCause.COMPLETED, None, 9.0)


def test_the_finding_has_the_tokens_that_a_request_would_add() -> None:
    producer = _producer()
    flight = _leave(producer, _request(200), _result(decode="a"), {"default/b": 2, "default/c": 4})
    load = flight.attributes.get(inflight_load_key())
    assert [load.uncached(f"default/{key}") for key in "abc"] == [200, 72, 0]
    assert load.requests("default/a") == 1
    assert load.tokens("default/a") == 200
    assert load.requests("default/b") == 0


def test_tokens_are_returned_with_the_first_piece() -> None:
    producer = _producer()
    flight = _leave(producer, _request(200), _result(default="a"), {"default/a": 1})
    assert producer.loads == {"default/a": EndpointLoad(1, 136)}
    producer.response_progress(flight, LATER)
    assert producer.loads == {"default/a": EndpointLoad(1, 136)}
    producer.response_progress(flight, FIRST)
    assert producer.loads == {"default/a": EndpointLoad(1, 0)}
    _end(producer, flight)
    assert producer.loads == {}


@pytest.mark.parametrize(("shows_first_piece", "left"), [(True, 136), (False, 0)])
def test_tokens_are_returned_with_the_headers_where_the_first_piece_is_unseen(
    shows_first_piece: bool, left: int
) -> None:
    producer = _producer()
    flight = _leave(producer, _request(200), _result(default="a"), {"default/a": 1})
    producer.response_head(flight, ResponseHead(200, shows_first_piece=shows_first_piece))
    assert producer.loads == {"default/a": EndpointLoad(1, left)}


def test_a_prefill_endpoint_is_done_with_the_first_piece() -> None:
    for parameters, decode in (({}, 0), ({"add_estimated_output_tokens": True}, 25)):
        producer = _producer(**parameters)
        flight = _leave(producer, _request(10), _result(decode="a", prefill="b"))
        assert producer.loads["default/b"].requests == 1
        producer.response_progress(flight, FIRST)
        assert producer.loads == {"default/a": EndpointLoad(1, decode)}


@pytest.mark.parametrize(
    ("parameters", "limit", "tokens"),
    [
        ({}, None, 11 + 17),
        ({}, 4, 11 + 4),
        ({"max_estimated_output_tokens": 3}, 4, 11 + 3),
        ({"max_estimated_output_tokens": 0}, None, 11),
        ({"output_ratio": 0.0}, None, 11),
        ({"output_ratio": 2.0}, None, 33),
    ],
)
def test_the_output_is_estimated_from_the_input(
    parameters: dict[str, Any], limit: int | None, tokens: int
) -> None:
    producer = _producer(add_estimated_output_tokens=True, **parameters)
    _flight = _leave(producer, _request(11, limit), _result(default="a"))
    assert producer.loads == {"default/a": EndpointLoad(1, tokens)}


def test_a_returning_endpoint_starts_empty() -> None:
    producer = _producer()
    old = _leave(producer, _request(10), _result(default="a"))
    producer.endpoint_removed("default/a")
    assert producer.loads == {}
    new = _leave(producer, _request(7), _result(default="a"))
    _end(producer, old)
    assert producer.loads == {"default/a": EndpointLoad(1, 7)}
    _end(producer, new)
    assert producer.loads == {}


def test_a_vanished_request_returns_everything() -> None:
    producer = _producer()
    flight = _leave(producer, _request(10), _result(default="a"))
    assert producer.loads
    del flight
    gc.collect()
    assert producer.loads == {}
    producer.check_integrity()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["leave", "again", "first", "later", "end", "forget", "remove"]),
        st.integers(0, 7),
        st.sampled_from("abc"),
        st.sampled_from("abc"),
        st.integers(0, 300),
    ),
    max_size=60,
)


@examples(150)
@given(steps=STEPS, estimate=st.booleans())
def test_any_walk_ends_with_nothing_in_flight(
    steps: list[tuple[str, int, str, str, int]], estimate: bool
) -> None:
    producer = _producer(add_estimated_output_tokens=estimate)
    flights: list[Flight] = []
    actions: dict[str, Callable[[Flight], object]] = {
        "again": lambda f: producer.pre_request(f.request, f.result, f.attributes),
        "first": lambda f: producer.response_progress(f, FIRST),
        "later": lambda f: producer.response_progress(f, LATER),
        "end": lambda f: _end(producer, f),
        "forget": lambda f: flights.remove(f),
    }
    for step, which, one, other, tokens in steps:
        if step == "remove":
            producer.endpoint_removed(f"default/{one}")
        elif step == "leave":
            match = {f"default/{other}": which} if which else None
            result = _result(decode=one, prefill=other) if tokens % 2 else _result(decode=one)
            flights.append(_leave(producer, _request(tokens), result, match))
        elif flights:
            actions[step](flights[which % len(flights)])
        producer.check_integrity()
    while len(flights) > len(steps) // 20:
        _end(producer, flights.pop())
    flights.clear()
    assert producer.loads == {}
    producer.check_integrity()


def test_an_infinite_estimate_refuses_no_request() -> None:
    producer = _producer(add_estimated_output_tokens=True, output_ratio=1e308)
    first = _leave(producer, _request(1000), _result(decode="w"))
    assert producer.loads["default/w"].tokens > 10**9
    _end(producer, first)
    _leave(producer, _request(1000, limit=7), _result(decode="w"))
    producer.check_integrity()


@pytest.mark.parametrize("is_synced", [True, False])
def test_the_load_of_other_replicas_counts_where_it_is_shared(is_synced: bool) -> None:
    producer = _producer(sync_cross_replica_state=is_synced)
    elsewhere = {"default/a": EndpointLoad(2, 20), "default/b": EndpointLoad(1)}
    producer.set_loads_elsewhere(elsewhere)
    flight = _leave(producer, _request(100), _result(default="a"))
    producer.check_integrity()
    own = {"default/a": EndpointLoad(1, 100)}
    assert producer.own_loads == (own if is_synced else None)
    together = {"default/a": EndpointLoad(3, 120), "default/b": EndpointLoad(1)}
    assert producer.loads == (together if is_synced else own)
    _end(producer, flight)
    producer.check_integrity()
    assert producer.loads == (elsewhere if is_synced else {})
    producer.set_loads_elsewhere({})
    assert producer.loads == {}
    producer.check_integrity()
