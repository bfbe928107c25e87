"""Disaggregated requests: the stages that run, their order and their endpoints."""

from typing import Any

import pytest

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY, DisaggregationDecision
from picker.framework.interfaces import PreRequest, ProfileHandler, UsesPlugins
from picker.types import InferenceRequest, ProfileResult
from tests.support.picker.plugin_scenes import (
    SetDecider,
    configured,
    placed,
    pool_of,
    request_for,
    schedule,
)

PROFILES = ("decode", "prefill", "encode")


PREFILLER = {"x-prefiller-host-port": "10.0.0.1:8000"}
ENCODERS = {"x-encoder-hosts-ports": "10.0.0.2:8000,10.0.0.3:8000"}
BOTH = PREFILLER | ENCODERS


def connected(order: str = "", prefill: bool | None = None, encode: bool | None = None) -> Any:
    answers = {"prefill": prefill, "encode": encode}
    made = {name: SetDecider(answer) for name, answer in answers.items() if answer is not None}
    names = {name: f"{name}-decider" for name in made}
    handler = configured("disagg-profile-handler", {"stageOrder": order, "deciders": names})
    plugins = {f"{name}-decider": plugin for name, plugin in made.items()}
    handler.connect({**plugins, "something-else": object()})
    return handler, made


def counted(handler: Any, result: Any, request: InferenceRequest) -> str:
    attributes = Attributes()
    assert handler.pre_request(request, result, attributes) is None
    found = attributes.get(DISAGGREGATION_DECISION_KEY)
    return found.value


@pytest.mark.parametrize(
    ("prefill", "encode", "ran", "headers", "decision"),
    [
        (None, None, ["decode"], {}, "decode-only"),
        (False, False, ["decode"], {}, "decode-only"),
        (True, None, ["decode", "prefill"], PREFILLER, "prefill-decode"),
        (True, False, ["decode", "prefill"], PREFILLER, "prefill-decode"),
        (False, True, ["decode", "encode"], ENCODERS, "encode-decode"),
        (True, True, ["decode", "encode", "prefill"], BOTH, "encode-prefill-decode"),
    ],
)
def test_decode_first_runs_the_stages_that_deciders_want(
    prefill: bool | None, encode: bool | None, ran: list[str], headers: Any, decision: str
) -> None:
    handler, deciders = connected("", prefill, encode)
    result, runs = schedule(handler, PROFILES, pool_of(*PROFILES, "encode"))
    assert [name for name, _ in runs] == ran
    assert [peer for _, peer in runs] == [None] + ["decode0"] * (len(ran) - 1)
    assert result.primary_profile == "decode"
    assert [endpoint.name for endpoint in result.endpoints] == ["decode0"]
    assert result.set_headers == headers
    assert set(result.profiles) == set(ran)
    assert counted(handler, result, request_for()) == decision
    for made in deciders.values():
        assert set(made.shown) == {"decode0"}


@pytest.mark.parametrize(
    ("encode", "profiles", "runs_expected"),
    [
        (None, PROFILES, [("prefill", None), ("decode", "prefill1")]),
        (False, PROFILES, [("prefill", None), ("decode", "prefill1")]),
        (True, PROFILES, [("encode", None), ("prefill", "encode2"), ("decode", "prefill1")]),
        (True, ("decode", "encode"), [("encode", None), ("decode", "encode2")]),
        (True, ("decode",), [("decode", None)]),
    ],
)
def test_prefill_first_always_prefills_where_there_is_a_profile(
    encode: bool | None, profiles: tuple[str, ...], runs_expected: list[tuple[str, str | None]]
) -> None:
    handler, deciders = connected("prefill-first", None, encode)
    result, runs = schedule(handler, profiles, pool_of(*PROFILES))
    assert runs == runs_expected
    assert [endpoint.name for endpoint in result.endpoints] == ["decode0"]
    assert ("x-prefiller-host-port" in result.set_headers) is ("prefill" in profiles)
    if "encode" in deciders and "encode" in profiles:
        assert deciders["encode"].shown == [None]


@pytest.mark.parametrize("order", ["", "prefill-first"])
@pytest.mark.parametrize(
    ("roles", "headers"),
    [
        (("decode", "encode"), {"x-encoder-hosts-ports": "10.0.0.1:8000"}),
        (("decode", "prefill"), PREFILLER),
        (("decode",), {}),
    ],
)
def test_the_decode_endpoint_replaces_a_stage_without_an_endpoint(
    order: str, roles: tuple[str, ...], headers: dict[str, str]
) -> None:
    handler, _ = connected(order, None if order else True, True)
    result, runs = schedule(handler, PROFILES, pool_of(*roles))
    assert sorted(name for name, _ in runs) == sorted(PROFILES)
    assert [endpoint.name for endpoint in result.endpoints] == ["decode0"]
    assert result.set_headers == headers


@pytest.mark.parametrize(
    ("order", "ran"), [("", ["decode"]), ("prefill-first", ["encode", "prefill", "decode"])]
)
def test_without_a_decode_endpoint_the_request_is_refused(order: str, ran: list[str]) -> None:
    handler, deciders = connected(order, None if order else True, True)
    with pytest.raises(RefusedError) as refusal:
        schedule(handler, PROFILES, pool_of("prefill", "encode"))
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
    assert refusal.value.drop_reason is DropReason.SATURATED
    if not order:
        assert all(not made.shown for made in deciders.values())


def test_an_empty_result_of_the_decode_profile_is_refused() -> None:
    handler, _ = connected("", True, True)
    results = {"decode": ProfileResult(())}
    assert not handler.pick_profiles(request_for(), PROFILES, results, Attributes())
    with pytest.raises(RefusedError, match="no decode worker") as refusal:
        handler.process_results(request_for(), results)
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("missing", [("decode",), ("decode", "prefill"), ("decode", "encode")])
def test_a_stage_without_a_profile_never_runs(missing: tuple[str, ...]) -> None:
    handler, _ = connected("", True, True)
    _, runs = schedule(handler, missing, pool_of(*PROFILES))
    assert [name for name, _ in runs] == list(missing)


def test_all_decode_endpoints_are_the_fallback_list() -> None:
    handler, _ = connected("", True)
    result, _ = schedule(handler, PROFILES, pool_of("decode", "decode", "prefill", "prefill"))
    assert [endpoint.name for endpoint in result.endpoints] == ["decode0", "decode1"]
    assert result.set_headers == {"x-prefiller-host-port": "10.0.0.2:8000"}


def test_ipv6_endpoints_are_named_in_brackets() -> None:
    handler, _ = connected("", True)
    role = {"llm-d.ai/role": "prefill"}
    prefiller = placed("p", role, address="fd00::7", port=8200)
    result, _ = schedule(handler, PROFILES, [*pool_of("decode"), prefiller])
    assert result.set_headers == {"x-prefiller-host-port": "[fd00::7]:8200"}


def test_profiles_can_have_other_names() -> None:
    profiles = {"decode": "my-decode", "prefill": "my-prefill"}
    nested = {"profiles": profiles, "deciders": {"prefill": "d"}}
    flat = {"decodeProfile": "my-decode", "prefillProfile": "my-prefill", "deciderPluginName": "d"}
    for parameters in (nested, flat):
        handler = configured("disagg-profile-handler", parameters)
        handler.connect({"d": SetDecider(True)})
        result, runs = schedule(handler, ("my-decode", "my-prefill"), pool_of(*PROFILES))
        assert [name for name, _ in runs] == ["my-decode", "my-prefill"]
        assert result.primary_profile == "my-decode"
        assert result.set_headers == PREFILLER


@pytest.mark.parametrize(
    ("order", "is_prefill_first"),
    [
        ("", False),
        ("decode", False),
        ("decode-first", False),
        ("Decode_First", False),
        ("DECODEFIRST", False),
        ("prefill", True),
        ("prefill-first", True),
        ("PrefillFirst", True),
        ("-prefill_first-", True),
    ],
)
def test_the_spelling_of_the_order_is_tolerant(order: str, is_prefill_first: bool) -> None:
    _, runs = schedule(
        configured("disagg-profile-handler", {"stageOrder": order}), PROFILES, pool_of(*PROFILES)
    )
    assert (runs[0][0] == "prefill") is is_prefill_first


@pytest.mark.parametrize(
    ("parameters", "references"),
    [
        ({}, {}),
        (
            {"deciders": {"prefill": "a", "encode": "b"}},
            {"deciders.prefill": "a", "deciders.encode": "b"},
        ),
        (
            {"prefillDeciderPluginName": "a", "encodeDeciderPluginName": "b"},
            {"prefillDeciderPluginName": "a", "encodeDeciderPluginName": "b"},
        ),
        ({"deciderPluginName": "a"}, {"deciderPluginName": "a"}),
    ],
)
def test_deciders_are_references_by_parameter(
    parameters: dict[str, Any], references: dict[str, str]
) -> None:
    handler = configured("disagg-profile-handler", parameters)
    assert handler.references == references
    for contract in (ProfileHandler, UsesPlugins, PreRequest):
        assert isinstance(handler, contract)
    assert handler.max_profiles is None


def test_another_plugin_than_a_decider_is_refused() -> None:
    handler = configured("disagg-profile-handler", {"deciders": {"encode": "queue"}})
    with pytest.raises(ValueError, match="'queue' is not a decider"):
        handler.connect({"queue": object()})


NAME = "prefix-based-pd-decider"


@pytest.mark.parametrize("answer", [True, False])
def test_the_decider_decides_about_prefill(answer: bool) -> None:
    handler, made = configured("pd-profile-handler"), SetDecider(answer)
    assert handler.references == {"deciderPluginName": NAME}
    handler.connect({NAME: made})
    result, runs = schedule(handler, ("decode", "prefill"), pool_of("prefill", "decode"))
    assert runs == [("decode", None), ("prefill", "decode1")][: 2 if answer else 1]
    assert made.shown == ["decode1"]
    assert [endpoint.host_port for endpoint in result.endpoints] == ["10.0.0.1:8000"]
    prefiller = {"x-prefiller-host-port": "10.0.0.0:8000"}
    assert result.set_headers == (prefiller if answer else {})
    attributes = Attributes()
    handler.pre_request(request_for(), result, attributes)
    word = "prefill-decode" if answer else "decode-only"
    assert attributes.get(DISAGGREGATION_DECISION_KEY) is DisaggregationDecision(word)


def test_the_primary_port_replaces_that_of_the_picked_endpoint() -> None:
    """The header would be wrong for a fallback endpoint, so there is none."""
    handler = configured("pd-profile-handler", {"primaryPort": 9000})
    handler.connect({NAME: SetDecider(True)})
    result, _ = schedule(handler, ("decode", "prefill"), pool_of("decode", "decode", "prefill"))
    assert [endpoint.host_port for endpoint in result.endpoints] == ["10.0.0.0:9000"]
    assert result.set_headers == {
        "x-data-parallel-host-port": "10.0.0.0:8000",
        "x-prefiller-host-port": "10.0.0.2:8000",
    }
    assert result.profiles["decode"].picked[0].candidate.endpoint.port == 8000


@pytest.mark.parametrize("roles", [("decode",), ("prefill",)])
def test_only_the_decode_profile_is_required(roles: tuple[str, ...]) -> None:
    handler = configured(
        "pd-profile-handler", {"deciderPluginName": "d", "prefixPluginType": "anything"}
    )
    handler.connect({"d": SetDecider(True)})
    if roles == ("decode",):
        result, _ = schedule(handler, ("decode", "prefill"), pool_of(*roles))
        assert result.set_headers == {}
        return
    with pytest.raises(RefusedError) as refusal:
        schedule(handler, ("decode", "prefill"), pool_of(*roles))
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


def test_without_a_prefill_profile_the_decider_is_not_called() -> None:
    handler, made = configured("pd-profile-handler"), SetDecider(True)
    handler.connect({NAME: made})
    _, runs = schedule(handler, ("decode",), pool_of("decode"))
    assert runs == [("decode", None)]
    assert made.shown == []


def test_the_decider_of_pd_has_to_be_a_decider() -> None:
    with pytest.raises(ValueError, match=NAME):
        configured("pd-profile-handler", {"deciderPluginName": ""}).connect({})
