"""Bootstraps: ours have no findings, and every removed part is found."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from base.response_bodies import ResponseBodies
from fleet.doctor.cluster_look import ClusterFacts
from fleet.doctor.command import CHECKS, diagnose
from fleet.doctor.diagnosis import Diagnosis, Facts
from fleet.doctor.envoy_look import EnvoyFacts, HostSeen, read_envoy_file, read_setup
from fleet.doctor.picker_look import PickerFacts
from fleet.envoy.settings import Mechanism
from fleet.envoy.tenants import AllowedTenant, Tenants, Tokens
from picker.config.findings import Severity
from picker.flowcontrol.views import QueuesView
from tests.support.fleet.spoilt_bootstraps import (
    CASES,
    Break,
    Document,
    bootstrap,
    cluster,
    manager,
    processor,
    route,
)

TENANTS = Tenants(
    (AllowedTenant("acme", ("sk-0123456789abcdef",), "acme"),), Tokens("i", (), "sub", "{}")
)
COMMITTED = sorted((Path(__file__).parents[3] / "deploy" / "envoy").glob("*.yaml"))


def findings_of(document: Document, **facts: object) -> tuple[Diagnosis, ...]:
    return diagnose(Facts(envoys=(EnvoyFacts("it", read_setup(document)),), **facts))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_bootstraps_are_in_order(path: Path) -> None:
    facts = read_envoy_file(path)
    assert facts.problem is None
    assert facts.setup.picked
    assert diagnose(Facts(envoys=(facts,))) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"buffer_request_body": True},
        {"mechanism": Mechanism.ORIGINAL_DST, "buffer_request_body": True},
        {"response_bodies": ResponseBodies.ALL, "buffer_request_body": True},
        {"response_bodies": ResponseBodies.USAGE, "buffer_request_body": True},
        {"tenants": TENANTS},
        {"endpoints_file": "/pool.json", "pickers_file": "/pickers.json"},
        {"failure_mode_allow": False},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_generated_bootstraps_are_in_order(changes: dict[str, object]) -> None:
    assert findings_of(bootstrap(**changes)) == ()


@pytest.mark.parametrize(
    ("changes", "check", "text", "take_out"),
    CASES,
    ids=[f"{'+'.join(one[0]) or 'default'}-{one[1]}-{one[2]}" for one in CASES],
)
def test_a_removed_part_is_found(
    changes: dict[str, object], check: str, text: str, take_out: Break
) -> None:
    document = bootstrap(**changes)
    take_out(document)
    found = findings_of(document)
    meant = [one for one in found if one.check == check]
    assert any(text in one.seen for one in meant), found
    assert all(one.why and one.fix for one in found)
    together = {"envoy-destination": {"envoy-override-host"}}
    if check not in ("envoy-ext-proc", "envoy-picker-cluster"):
        assert {one.check for one in found} <= {check} | together.get(check, set())


def test_clients_that_can_name_a_tenant_without_a_key_are_a_warning() -> None:
    (finding,) = findings_of(bootstrap(trust_control_headers=True))
    assert (finding.check, finding.severity) == ("envoy-header-strip", Severity.WARNING)
    assert "x-llm-d-inference-fairness-id" in finding.seen
    assert findings_of(bootstrap(trust_control_headers=True, tenants=TENANTS)) == ()


def test_clients_that_can_name_any_address_are_an_error() -> None:
    """An ORIGINAL_DST cluster connects to any address; override_host stays within the pool."""
    for mechanism, severity in (
        (Mechanism.ORIGINAL_DST, Severity.ERROR),
        (Mechanism.OVERRIDE_HOST, Severity.WARNING),
    ):
        document = bootstrap(mechanism=mechanism)
        manager(document).pop("early_header_mutation_extensions")
        (finding,) = findings_of(document)
        assert finding.severity is severity


@pytest.mark.parametrize(
    "matcher",
    [{"prefix": "X-"}, {"safe_regex": {"regex": "x-.*"}}, {"contains": "-"}],
    ids=lambda matcher: next(iter(matcher)),
)
def test_headers_may_be_stripped_in_any_way(matcher: dict[str, object]) -> None:
    """A filter in front of the picker may strip them, too; one behind it is too late."""
    document = bootstrap()
    manager(document).pop("early_header_mutation_extensions")
    mutation = {"remove_on_match": {"key_matcher": matcher}}
    stripping = {"name": "strip", "typed_config": {"mutations": {"request_mutations": [mutation]}}}
    filters = manager(document)["http_filters"]
    filters.insert(0, stripping)
    assert findings_of(document) == ()
    filters.insert(1, filters.pop(0))
    assert [one.check for one in findings_of(document)] == ["envoy-header-strip"]


def test_an_old_envoy_is_found() -> None:
    document = {"configs": [{"bootstrap": bootstrap()}]}
    node = document["configs"][0]["bootstrap"]["node"]
    for minor, patch, expected in ((37, 0, ["envoy-version"]), (37, 1, []), (40, 0, [])):
        node["user_agent_build_version"] = {
            "version": {"major_number": 1, "minor_number": minor, "patch": patch}
        }
        assert [one.check for one in findings_of(document)] == expected


def test_a_dump_of_a_gateway_is_read_as_well() -> None:
    whole = bootstrap()
    listener = copy.deepcopy(whole["static_resources"]["listeners"][0])
    hcm = listener["filter_chains"][0]["filters"][0]["typed_config"]
    table = hcm.pop("route_config")
    hcm["rds"] = {"route_config_name": table["name"]}
    settings = copy.deepcopy(hcm["http_filters"][0]["typed_config"])
    kind = settings.pop("@type")
    hcm["http_filters"][0]["typed_config"] = {
        "@type": kind,
        **settings,
        "processing_mode": {"request_header_mode": "SKIP", "response_header_mode": "SKIP"},
    }
    per_route = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "overrides": {"processing_mode": settings["processing_mode"]},
    }
    name = hcm["http_filters"][0]["name"]
    table["virtual_hosts"][0]["routes"][0]["typed_per_filter_config"] = {name: per_route}
    other = {"match": {"prefix": "/other"}, "route": {"cluster": "other"}}
    table["virtual_hosts"][0]["routes"].append(other)
    dump = {
        "configs": [
            {"bootstrap": {"node": {"id": "it"}}},
            {
                "dynamic_active_clusters": [
                    {"cluster": one} for one in whole["static_resources"]["clusters"]
                ]
            },
            {"dynamic_listeners": [{"name": "it", "active_state": {"listener": listener}}]},
            {"dynamic_route_configs": [{"route_config": table}]},
        ]
    }
    assert findings_of(dump) == ()
    per_route["overrides"]["processing_mode"] = {}
    assert {one.check for one in findings_of(dump)} == {"envoy-processing-mode"}


def test_names_may_be_spelt_as_json_spells_them() -> None:
    """Both spellings are Envoy's own."""

    def camel(value: object) -> object:
        if isinstance(value, list):
            return [camel(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {_camel(key): camel(one) for key, one in value.items()}

    def _camel(key: str) -> str:
        first, *others = key.split("_")
        return key if "." in key or "@" in key else first + "".join(map(str.capitalize, others))

    document = camel(bootstrap())
    assert isinstance(document, dict)
    assert "staticResources" in document
    assert findings_of(document) == ()


def test_a_queue_makes_impatience_an_error() -> None:
    """With flow control on, requests will wait."""
    document = bootstrap(buffer_request_body=True)
    processor(document)["max_message_timeout"] = "5s"
    for is_on, severity in ((True, Severity.ERROR), (False, Severity.WARNING)):
        picker = PickerFacts(
            "http://it",
            queues=QueuesView(is_on=is_on),
            metrics={"llm_d_epp_ready_endpoints": 1},
            is_ready=False,
            readiness="not ready",
        )
        found = [one for one in findings_of(document, picker=picker) if "envoy" in one.check]
        assert [(one.check, one.severity) for one in found] == [("envoy-queue-patience", severity)]


@pytest.mark.parametrize("is_open", [True, False])
def test_the_failure_mode_has_to_match_the_pools(is_open: bool) -> None:
    """By default the pool's picker fails closed."""
    document = bootstrap(failure_mode_allow=is_open)
    for mode in ("FailOpen", "FailClose", None):
        reference = {"name": "p", **({} if mode is None else {"failureMode": mode})}
        pool = {"spec": {"endpointPickerRef": reference}}
        facts = ClusterFacts("default", "it", pool=pool)
        found = [one.check for one in findings_of(document, cluster=facts) if "envoy" in one.check]
        assert found == ([] if is_open == (mode == "FailOpen") else ["envoy-failure-mode"])


def test_failing_endpoints_are_found() -> None:
    setup = read_setup(bootstrap())
    well, ill = HostSeen("1.1.1.1:1"), HostSeen("1.1.1.1:2", ("failed_active_health_check",))
    for hosts, expected in (
        ((well,), []),
        ((ill,), [Severity.ERROR]),
        ((well, ill), [Severity.WARNING]),
        ((), [Severity.ERROR]),
    ):
        facts = EnvoyFacts("it", setup, {"picker": hosts, "pool": (well,)})
        found = diagnose(Facts(envoys=(facts,)))
        assert [one.severity for one in found] == expected
        assert {one.check for one in found} <= {"envoy-hosts"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: [", "neither YAML nor JSON"),
        (b"{", "neither YAML nor JSON"),
        (b"[]", "neither a bootstrap nor"),
        (b"endpoints: []", "neither a bootstrap nor"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_a_configuration_is_reported(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "envoy.yaml"
    if content is not None:
        path.write_bytes(content)
    facts = read_envoy_file(path)
    assert problem in (facts.problem or "")
    assert [one.check for one in diagnose(Facts(envoys=(facts,)))] == ["envoy-reachable"]


def test_yaml_and_json_are_read_alike(tmp_path: Path) -> None:
    document = bootstrap()
    for text in (json.dumps(document), yaml.safe_dump(document)):
        path = tmp_path / "envoy"
        path.write_text(text)
        assert read_envoy_file(path).setup.lanes


def test_every_check_has_a_name_of_its_own() -> None:
    names = [one.name for one in CHECKS]
    assert len(names) == len(set(names))
    document = bootstrap()
    cluster(document, "picker").pop("health_checks")
    route(document)["route"].pop("timeout")
    facts = Facts(envoys=(EnvoyFacts("it", read_setup(document)),))
    assert [one.check for one in diagnose(facts, ["envoy-route-timeout"])] == [
        "envoy-route-timeout"
    ]
