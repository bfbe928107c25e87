"""Requests without a body: the few plugins that have anything to say of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from picker.requestcontrol.pipeline import BodylessRequests
from picker.types import Candidate, FinishCause, RawRequest, ResponseHead

HEADERS = {":path": "/v1/models", "wanted": "pod-2"}


class ByHeader:
    def narrow(
        self, headers: Mapping[str, str], candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return [one for one in candidates if one.endpoint.name == headers.get("wanted")]


class Reports:
    def bodyless_response_head(self, head: ResponseHead) -> Mapping[str, str] | None:
        return {"status": str(head.status)}


class Silent:
    def bodyless_response_head(self, head: ResponseHead) -> Mapping[str, str] | None:
        return None


class Broken:
    def bodyless_response_head(self, head: ResponseHead) -> Mapping[str, str] | None:
        raise ValueError("odd")


async def test_filters_that_need_no_body_are_asked(house: Any) -> None:
    house.use(bodyless=BodylessRequests(filters=(ByHeader(),)))
    routed = [await house.route(RawRequest(HEADERS, None)) for _ in range(20)]
    keys = {c.endpoint.host_port for c in house.pool.candidates if c.endpoint.name == "pod-2"}
    assert {decision.destination for _, decision in routed} == keys
    for exchange, _ in routed:
        exchange.finish(FinishCause.COMPLETED)


async def test_a_request_without_a_candidate_after_filters_is_refused(house: Any) -> None:
    house.use(bodyless=BodylessRequests(filters=(ByHeader(),)))
    assert (await house.refusal(RawRequest({":path": "/v1/models"}, None))).status == 503


async def test_filters_stay_within_the_subset(house: Any) -> None:
    house.use(bodyless=BodylessRequests(filters=(ByHeader(),)))
    raw = RawRequest(HEADERS, None, subset_hint=("10.0.0.1:8000",))
    assert (await house.refusal(raw)).status == 503


async def test_hooks_set_headers_on_the_response(house: Any) -> None:
    house.use(bodyless=BodylessRequests(heads=(Broken(), Silent(), Reports())))
    exchange, decision = await house.route(RawRequest(HEADERS, None))
    assert decision.response.head(ResponseHead(200)) == (("status", "200"),)
    assert decision.response.body(b"piece", True) == (b"piece", {})
    assert decision.response.end() == b""
    exchange.finish(FinishCause.COMPLETED)


async def test_the_response_has_a_tap_only_if_there_are_hooks(house: Any) -> None:
    exchange, decision = await house.route(RawRequest(HEADERS, None))
    assert decision.response is None
    exchange.finish(FinishCause.COMPLETED)
