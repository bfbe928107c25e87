"""Bootstraps of ours, and ways to spoil them that a doctor has to notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.settings import BootstrapConfig, Mechanism, SocketAddress

LOCAL = SocketAddress("127.0.0.1", 8080)
Document = dict[str, Any]


def bootstrap(**changes: object) -> Document:
    """One of ours."""
    settings = {"listen": LOCAL, "admin": LOCAL, "picker": LOCAL, "endpoints": (LOCAL,), **changes}
    return json.loads(to_json(build(BootstrapConfig(**settings))))


def manager(document: Document) -> Document:
    """The connection manager."""
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def processor(document: Document) -> Document:
    """The settings of ext_proc."""
    return manager(document)["http_filters"][0]["typed_config"]


def route(document: Document) -> Document:
    """The only route."""
    return manager(document)["route_config"]["virtual_hosts"][0]["routes"][0]


def cluster(document: Document, name: str) -> Document:
    """A cluster by its name."""
    return next(one for one in document["static_resources"]["clusters"] if one["name"] == name)


def policy(document: Document) -> Document:
    """The settings of override_host."""
    policies = cluster(document, "pool")["load_balancing_policy"]["policies"]
    return policies[0]["typed_extension_config"]["typed_config"]


Break = Callable[[Document], object]
PICKER: list[tuple[str, str, Break]] = [
    ("envoy-ext-proc", "no filter", lambda d: manager(d)["http_filters"].pop(0)),
    ("envoy-filter-order", "after the router", lambda d: manager(d)["http_filters"].reverse()),
    ("envoy-filter-order", "no router", lambda d: manager(d)["http_filters"].pop(1)),
    (
        "envoy-processing-mode",
        "request_body_mode is STREAMED",
        lambda d: processor(d)["processing_mode"].update(request_body_mode="STREAMED"),
    ),
    (
        "envoy-processing-mode",
        "request_body_mode is NONE",
        lambda d: processor(d)["processing_mode"].pop("request_body_mode"),
    ),
    (
        "envoy-processing-mode",
        "request_header_mode is SKIP",
        lambda d: processor(d)["processing_mode"].update(request_header_mode="SKIP"),
    ),
    (
        "envoy-processing-mode",
        "response_header_mode is SKIP",
        lambda d: processor(d)["processing_mode"].update(response_header_mode="SKIP"),
    ),
    (
        "envoy-processing-mode",
        "response_trailer_mode is not set",
        lambda d: processor(d)["processing_mode"].pop("response_trailer_mode"),
    ),
    (
        "envoy-processing-mode",
        "request_trailer_mode is SKIP",
        lambda d: processor(d)["processing_mode"].update(request_trailer_mode="SKIP"),
    ),
    (
        "envoy-processing-mode",
        "GRPC",
        lambda d: processor(d)["processing_mode"].update(response_body_mode="GRPC"),
    ),
    ("envoy-message-timeout", "0.2s (default)", lambda d: processor(d).pop("message_timeout")),
    (
        "envoy-message-timeout",
        "0.05s",
        lambda d: processor(d).update(message_timeout="0.050s"),
    ),
    (
        "envoy-header-strip",
        "x-gateway-destination-endpoint,",
        lambda d: manager(d).pop("early_header_mutation_extensions"),
    ),
    (
        "envoy-header-strip",
        "x-kv-cache-source-host-port",
        lambda d: manager(d)["early_header_mutation_extensions"][0]["typed_config"][
            "mutations"
        ].pop(),
    ),
    (
        "envoy-metadata",
        "receiving_namespaces lacks envoy.lb",
        lambda d: processor(d)["metadata_options"].pop("receiving_namespaces"),
    ),
    (
        "envoy-metadata",
        "forwarding_namespaces lacks envoy.lb.subset_hint",
        lambda d: processor(d)["metadata_options"].pop("forwarding_namespaces"),
    ),
    (
        "envoy-response-attributes",
        "upstream.address",
        lambda d: processor(d).pop("response_attributes"),
    ),
    (
        "envoy-picker-cluster",
        "'picker', which there is not",
        lambda d: cluster(d, "picker").update(name="elsewhere"),
    ),
    (
        "envoy-picker-http2",
        "HTTP/1",
        lambda d: cluster(d, "picker").pop("typed_extension_protocol_options"),
    ),
    (
        "envoy-picker-health-check",
        "no health_checks",
        lambda d: cluster(d, "picker").pop("health_checks"),
    ),
    (
        "envoy-outlier-detection",
        "'picker' of the picker has no outlier_detection",
        lambda d: cluster(d, "picker").pop("outlier_detection"),
    ),
    (
        "envoy-outlier-detection",
        "consecutive_local_origin_failure",
        lambda d: cluster(d, "picker")["outlier_detection"].pop("consecutive_local_origin_failure"),
    ),
    (
        "envoy-panic-threshold",
        "below 50 %",
        lambda d: cluster(d, "picker")["common_lb_config"].pop("healthy_panic_threshold"),
    ),
    (
        "envoy-circuit-breakers",
        "'picker': circuit breakers at max_connections 1024",
        lambda d: cluster(d, "picker").pop("circuit_breakers"),
    ),
    (
        "envoy-circuit-breakers",
        "max_retries 3",
        lambda d: cluster(d, "pool").pop("circuit_breakers"),
    ),
    (
        "envoy-route-timeout",
        "15s (default)",
        lambda d: route(d)["route"].pop("timeout"),
    ),
    ("envoy-retries", "not set", lambda d: route(d)["route"].pop("retry_policy")),
    (
        "envoy-retries",
        "retry_on has 5xx",
        lambda d: route(d)["route"]["retry_policy"].update(retry_on="5xx,connect-failure"),
    ),
    (
        "envoy-retries",
        "previous_hosts",
        lambda d: route(d)["route"]["retry_policy"].pop("retry_host_predicate"),
    ),
    ("envoy-buffers", "1048576 bytes", lambda d: route(d).pop("request_body_buffer_limit")),
]
OVERRIDE: list[tuple[str, str, Break]] = [
    ("envoy-override-host", "no fallback_policy", lambda d: policy(d).pop("fallback_policy")),
    (
        "envoy-override-host",
        "override_host_sources",
        lambda d: policy(d).pop("override_host_sources"),
    ),
    (
        "envoy-outlier-detection",
        "'pool' of workers",
        lambda d: cluster(d, "pool").pop("outlier_detection"),
    ),
    (
        "envoy-destination",
        "balances by itself (ROUND_ROBIN)",
        lambda d: cluster(d, "pool").pop("load_balancing_policy"),
    ),
]
ORIGINAL: list[tuple[str, str, Break]] = [
    (
        "envoy-original-dst",
        "without use_http_header",
        lambda d: cluster(d, "pool").pop("original_dst_lb_config"),
    ),
    (
        "envoy-original-dst",
        "reads the header x-other",
        lambda d: cluster(d, "pool")["original_dst_lb_config"].update(http_header_name="x-other"),
    ),
]
BUFFERED: list[tuple[str, str, Break]] = [
    ("envoy-mode-override", "is off", lambda d: processor(d).pop("allow_mode_override")),
    ("envoy-queue-patience", "is 0s", lambda d: processor(d).pop("max_message_timeout")),
]
CASES = [
    *(({}, *one) for one in PICKER + OVERRIDE),
    *(({"mechanism": Mechanism.ORIGINAL_DST}, *one) for one in PICKER + ORIGINAL),
    *(({"buffer_request_body": True}, *one) for one in PICKER + OVERRIDE + BUFFERED),
]
