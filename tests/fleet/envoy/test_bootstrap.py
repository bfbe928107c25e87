"""The generated bootstraps: the committed ones, those that Envoy accepts, and their contents."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from base.response_bodies import ResponseBodies
from fleet.envoy.binary import find_envoy
from fleet.envoy.bootstrap import build, endpoints_document, to_json, to_yaml
from fleet.envoy.clusters import PICKER
from fleet.envoy.response_reports import LUA
from fleet.envoy.settings import (
    BootstrapConfig,
    EndpointDiscovery,
    Limits,
    Mechanism,
    PipeAddress,
    SocketAddress,
)
from fleet.envoy.tenants import AllowedTenant, RemoteKeys, Tenants, Tokens
from picker.extproc.machine.stream import FIRST_AND_END
from picker.extproc.wire import FIRST_PIECE_METHOD
from picker.requestcontrol.headers import REPORT, REPORT_ID, REPORT_NAMESPACE
from tests.depth import examples
from tests.support.certificates import certificates

LOCAL = SocketAddress("127.0.0.1", 8080)
KEY_SERVER = RemoteKeys("https://login.example/keys", "login.example", 443, "CA")
TENANTS = Tenants(
    (
        AllowedTenant('a"\\', ("sk-0123456789abcdef",), "c\\", "o", 60, '9, m"=5'),
        AllowedTenant("b", (), "b"),
    ),
    Tokens("https://login.example", ("chat",), "team", KEY_SERVER),
)


def config(**changes: object) -> BootstrapConfig:
    return BootstrapConfig(**{"listen": LOCAL, "admin": LOCAL, "picker": LOCAL, **changes})


def document_of(**changes: object) -> dict:
    return json.loads(to_json(build(config(**changes))))


def manager_of(document: dict) -> dict:
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def routes_of(document: dict) -> list[dict]:
    return manager_of(document)["route_config"]["virtual_hosts"][0]["routes"]


def filter_of(**changes: object) -> dict:
    return manager_of(document_of(**changes))["http_filters"][0]["typed_config"]


@pytest.mark.envoy
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mechanism": Mechanism.ORIGINAL_DST},
        {"buffer_request_body": True, "failure_mode_allow": False},
        {"response_bodies": ResponseBodies.ALL, "trust_control_headers": True},
        {"response_bodies": ResponseBodies.USAGE, "access_log_path": "/dev/null"},
        {"admin": PipeAddress("/tmp/admin.sock"), "access_log_path": "/dev/null"},
        {"endpoints": (SocketAddress("::1", 1), SocketAddress("10.0.0.1", 65535))},
        {"limits": Limits(request_buffer_bytes=64 << 20, max_heap_bytes=1 << 34)},
        {"discovery": EndpointDiscovery(LOCAL)},
        {"discovery": EndpointDiscovery(LOCAL, "llama", is_delta=True)},
        {"discovery": EndpointDiscovery(LOCAL), "pools": ("llama", "research/qwen")},
        {"mechanism": Mechanism.ORIGINAL_DST, "pools": ("llama", "qwen")},
        {"discovery": EndpointDiscovery(LOCAL), "pools": ("a", "b"), "route_by_model": True},
        {"welcome": "here: /v1\n"},
        {"tenants": TENANTS, "welcome": "here: /v1\n"},
    ],
    ids=lambda changes: "+".join(changes) or "default",
)
def test_envoy_accepts_what_is_generated(changes: dict, tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.yaml"
    authorities = certificates(tmp_path) / "ca.crt" if "tenants" in changes else "CA"
    path.write_text(to_yaml(build(config(**changes))).replace(": CA\n", f": {authorities}\n"))
    command = [str(find_envoy()), "--mode", "validate", "-c", str(path), "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@examples(30)
@given(
    st.builds(
        BootstrapConfig,
        listen=st.builds(SocketAddress, st.just("0.0.0.0"), st.integers(1, 65535)),
        admin=st.builds(PipeAddress, st.just("/run/a")),
        picker=st.builds(SocketAddress, st.just("127.0.0.1"), st.integers(1, 65535)),
        endpoints=st.lists(st.integers(1, 65535), max_size=5).map(
            lambda ports: tuple(SocketAddress("127.0.0.1", port) for port in ports)
        ),
        mechanism=st.sampled_from(Mechanism),
        failure_mode_allow=st.booleans(),
    )
)
def test_yaml_and_json_say_the_same(bootstrap: BootstrapConfig) -> None:
    message = build(bootstrap)
    assert yaml.safe_load(to_yaml(message, "two\nlines")) == json.loads(to_json(message))


def test_the_picker_sees_the_end_of_a_response() -> None:
    """Without response trailers Envoy ends the stream at the response headers."""
    for buffered in (False, True):
        mode = filter_of(buffer_request_body=buffered)["processing_mode"]
        assert mode["response_trailer_mode"] == "SEND"
        assert "response_body_mode" not in mode  # NONE


def test_the_timeout_of_the_picker_depends_on_the_mode() -> None:
    """It is one second in the mode that continues without an answer, unless it is given."""
    for changes, expected in (
        ({}, "10s"),
        ({"buffer_request_body": True}, "1s"),
        ({"buffer_request_body": True, "message_timeout_seconds": 0.25}, "0.250s"),
        ({"message_timeout_seconds": 3.0}, "3s"),
    ):
        assert filter_of(**changes)["message_timeout"] == expected


def test_request_trailers_always_reach_the_picker() -> None:
    """If they were skipped, a request of headers and trailers would pass the picker unseen."""
    for buffered in (False, True):
        mode = filter_of(buffer_request_body=buffered)["processing_mode"]
        assert mode["request_trailer_mode"] == "SEND"
        assert mode["request_body_mode"] == ("BUFFERED" if buffered else "FULL_DUPLEX_STREAMED")


def test_the_picker_may_request_a_response_body() -> None:
    for changes, expected in (
        ({}, False),
        ({"buffer_request_body": True}, True),
        ({"buffer_request_body": True, "response_bodies": ResponseBodies.ALL}, False),
    ):
        assert filter_of(**changes).get("allow_mode_override", False) is expected


def test_reports_on_responses_need_a_filter_behind_the_pickers_and_an_access_log() -> None:
    manager = manager_of(document_of(response_bodies=ResponseBodies.USAGE))
    kinds = [one["name"].rpartition(".")[2] for one in manager["http_filters"]]
    assert kinds == ["ext_proc", "lua", "router"]
    (log,) = manager["access_log"]
    service = log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]
    assert service["cluster_name"] == PICKER
    assert "lua" not in str(manager_of(document_of(response_bodies=ResponseBodies.ALL)))


def test_picker_and_bootstrap_use_the_same_names_for_reports() -> None:
    assert f'known["{REPORT_ID}"]' in LUA
    assert f'set("{REPORT_NAMESPACE}", "{REPORT}", said)' in LUA
    assert FIRST_PIECE_METHOD in LUA
    assert f"== {ord(FIRST_AND_END)} then" in LUA


def test_envoy_listens_to_the_pickers_metadata() -> None:
    """Envoy drops dynamic metadata whose namespace is not named."""
    assert filter_of()["metadata_options"]["receiving_namespaces"] == {"untyped": ["envoy.lb"]}


def test_an_endpoints_file_holds_the_pool() -> None:
    document = json.loads(endpoints_document([SocketAddress("10.0.0.1", 8000)]))
    (resource,) = document["resources"]
    assert resource["cluster_name"] == "pool"
    (member,) = resource["endpoints"][0]["lb_endpoints"]
    socket = member["endpoint"]["address"]["socket_address"]
    assert socket == {"address": "10.0.0.1", "port_value": 8000}


def test_endpoints_come_from_a_picker_with_discovery() -> None:
    """Endpoints that leave the picker's answer are removed at once, healthy or not."""
    asking = EndpointDiscovery(SocketAddress("127.0.0.1", 9004), "llama")
    static = (SocketAddress("10.0.0.1", 8000),)
    document = document_of(endpoints=static, discovery=asking)
    pool, _, xds = document["static_resources"]["clusters"]
    assert (pool["type"], pool["ignore_health_on_host_removal"]) == ("EDS", True)
    assert "load_assignment" not in pool
    assert pool["eds_cluster_config"]["service_name"] == "llama"
    source = pool["eds_cluster_config"]["eds_config"]["api_config_source"]
    assert source["api_type"] == "GRPC"
    assert source["grpc_services"][0]["envoy_grpc"]["cluster_name"] == xds["name"] == "xds"
    (member,) = xds["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert member["endpoint"]["address"]["socket_address"]["port_value"] == 9004


def test_original_dst_needs_no_source_of_endpoints() -> None:
    asking = EndpointDiscovery(LOCAL)
    changes = {"mechanism": Mechanism.ORIGINAL_DST, "discovery": asking}
    document = document_of(**changes)
    assert [one["name"] for one in document["static_resources"]["clusters"]] == ["pool", "picker"]


@pytest.mark.parametrize("text", [None, "the API is below /v1\n"])
def test_a_welcome_is_at_the_root_alone(text: str | None) -> None:
    *welcomes, pool = routes_of(document_of(welcome=text))
    assert pool["match"] == {"prefix": "/"}
    assert len(welcomes) == (text is not None)
    for one in welcomes:
        assert one["match"] == {"path": "/"}
        assert one["direct_response"] == {"status": 200, "body": {"inline_string": text}}
        settings = one["typed_per_filter_config"]["envoy.filters.http.ext_proc"]
        assert settings["disabled"] is True


def test_every_pool_of_one_picker_has_a_route_and_endpoints_of_its_own() -> None:
    asking = EndpointDiscovery(LOCAL)
    document = document_of(discovery=asking, pools=("llama", "qwen"))
    *pools, nowhere = routes_of(document)
    clusters = {one["name"]: one for one in document["static_resources"]["clusters"]}
    for name, route in zip(("llama", "qwen"), pools, strict=True):
        settings = route["typed_per_filter_config"]["envoy.filters.http.ext_proc"]
        metadata = settings["overrides"]["grpc_initial_metadata"]
        assert metadata == [{"key": "x-pointsman-pool", "value": name}]
        assert (route["match"]["prefix"], route["route"]["cluster"]) == (f"/{name}/", name)
        assert clusters[name]["eds_cluster_config"]["service_name"] == name
    assert nowhere["direct_response"]["status"] == 404
    settings = nowhere["typed_per_filter_config"]["envoy.filters.http.ext_proc"]
    assert settings["disabled"] is True


def test_the_picker_may_choose_the_pool_by_a_header_that_no_client_can_set() -> None:
    """The header is matched after the pools' paths; without a choice the request is refused."""
    changes = {"discovery": EndpointDiscovery(LOCAL), "pools": ("llama", "qwen")}
    document = document_of(route_by_model=True, **changes)
    routes = routes_of(document)
    assert [one["match"]["prefix"] for one in routes] == ["/llama/", "/qwen/", "/", "/", "/"]
    for name, route in zip(("llama", "qwen"), routes[2:4], strict=True):
        (header,) = route["match"]["headers"]
        assert header == {"name": "x-pointsman-pool", "string_match": {"exact": name}}
        assert route["route"]["cluster"] == name
        assert "prefix_rewrite" not in route["route"]
    assert routes[4]["direct_response"]["status"] == 503
    assert "typed_per_filter_config" not in routes[4]
    (mutations,) = manager_of(document)["early_header_mutation_extensions"]
    removed = mutations["typed_config"]["mutations"]
    assert {"remove": "x-pointsman-pool"} in removed
    with pytest.raises(ValueError, match="name them"):
        config(route_by_model=True)


def test_several_pools_need_a_source_of_their_endpoints() -> None:
    """Static endpoints would be those of every pool."""
    with pytest.raises(ValueError, match="endpoint discovery"):
        config(pools=("llama", "qwen"))
