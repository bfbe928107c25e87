"""Bootstraps of ours, and ways to spoil them that a doctor has to notice."""

import json
from collections.abc import Callable
from typing import Any

from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.settings import BootstrapConfig, Mechanism, SocketAddress

LOCAL = SocketAddress("127.0.0.1", 8080)
Document = dict[str, Any]


def bootstrap(**changes: object) -> Document:
    settings = {"listen": LOCAL, "admin": LOCAL, "picker": LOCAL, "endpoints": (LOCAL,), **changes}
    return json.loads(to_json(build(BootstrapConfig(**settings))))


def manager(document: Document) -> Document:
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def processor(document: Document) -> Document:
    return manager(document)["http_filters"][0]["typed_config"]


def route(document: Document) -> Document:
    return manager(document)["route_config"]["virtual_hosts"][0]["routes"][0]


def cluster(document: Document, name: str) -> Document:
    return next(one for one in document["static_resources"]["clusters"] if one["name"] == name)


PARTS: dict[str, Callable[[Document], Any]] = {
    "manager": manager,
    "filters": lambda d: manager(d)["http_filters"],
    "strip": lambda d: manager(d)["early_header_mutation_extensions"][0]["typed_config"],
    "processor": processor,
    "modes": lambda d: processor(d)["processing_mode"],
    "metadata": lambda d: processor(d)["metadata_options"],
    "route": route,
    "action": lambda d: route(d)["route"],
    "retries": lambda d: route(d)["route"]["retry_policy"],
    "picker": lambda d: cluster(d, "picker"),
    "outliers": lambda d: cluster(d, "picker")["outlier_detection"],
    "common": lambda d: cluster(d, "picker")["common_lb_config"],
    "pool": lambda d: cluster(d, "pool"),
    "original": lambda d: cluster(d, "pool")["original_dst_lb_config"],
    "policy": lambda d: cluster(d, "pool")["load_balancing_policy"]["policies"][0][
        "typed_extension_config"
    ]["typed_config"],
}
Break = Callable[[Document], object]


def without(part: str, key: Any) -> Break:
    return lambda document: PARTS[part](document).pop(key)


def other(part: str, **settings: str) -> Break:
    return lambda document: PARTS[part](document).update(settings)


# The check, what it says, and what is spoilt.
PICKER: list[tuple[str, str, Break]] = [
    ("ext-proc", "no filter", without("filters", 0)),
    ("filter-order", "after the router", lambda d: PARTS["filters"](d).reverse()),
    ("filter-order", "no router", without("filters", 1)),
    ("processing-mode", "body_mode is STREAMED", other("modes", request_body_mode="STREAMED")),
    ("processing-mode", "request_body_mode is NONE", without("modes", "request_body_mode")),
    ("processing-mode", "request_header_mode is SKIP", other("modes", request_header_mode="SKIP")),
    ("processing-mode", "response_header_mode", other("modes", response_header_mode="SKIP")),
    ("processing-mode", "trailer_mode is not set", without("modes", "response_trailer_mode")),
    ("processing-mode", "request_trailer_mode", other("modes", request_trailer_mode="SKIP")),
    ("processing-mode", "GRPC", other("modes", response_body_mode="GRPC")),
    ("message-timeout", "0.2s (default)", without("processor", "message_timeout")),
    ("message-timeout", "0.05s", other("processor", message_timeout="0.050s")),
    (
        "header-strip",
        "x-gateway-destination-endpoint,",
        without("manager", "early_header_mutation_extensions"),
    ),
    ("header-strip", "kv-cache-source-host-port", lambda d: PARTS["strip"](d)["mutations"].pop()),
    ("metadata", "receiving_namespaces lacks", without("metadata", "receiving_namespaces")),
    ("metadata", "forwarding_namespaces lacks", without("metadata", "forwarding_namespaces")),
    ("response-attributes", "upstream.address", without("processor", "response_attributes")),
    ("picker-cluster", "'picker', which does not exist", other("picker", name="elsewhere")),
    ("picker-http2", "HTTP/1", without("picker", "typed_extension_protocol_options")),
    ("picker-health-check", "no health_checks", without("picker", "health_checks")),
    ("outlier-detection", "has no outlier_detection", without("picker", "outlier_detection")),
    (
        "outlier-detection",
        "consecutive_local_origin_failure",
        without("outliers", "consecutive_local_origin_failure"),
    ),
    ("panic-threshold", "below 50 %", without("common", "healthy_panic_threshold")),
    ("circuit-breakers", "at max_connections 1024", without("picker", "circuit_breakers")),
    ("circuit-breakers", "max_retries 3", without("pool", "circuit_breakers")),
    ("route-timeout", "15s (default)", without("action", "timeout")),
    ("retries", "not set", without("action", "retry_policy")),
    ("retries", "retry_on has 5xx", other("retries", retry_on="5xx,connect-failure")),
    ("retries", "previous_hosts", without("retries", "retry_host_predicate")),
    ("buffers", "1048576 bytes", without("route", "request_body_buffer_limit")),
]
OVERRIDE: list[tuple[str, str, Break]] = [
    ("override-host", "no fallback_policy", without("policy", "fallback_policy")),
    ("override-host", "override_host_sources", without("policy", "override_host_sources")),
    ("outlier-detection", "'pool' of workers", without("pool", "outlier_detection")),
    ("destination", "balances by itself (ROUND_ROBIN)", without("pool", "load_balancing_policy")),
]
ORIGINAL: list[tuple[str, str, Break]] = [
    ("original-dst", "without use_http_header", without("pool", "original_dst_lb_config")),
    ("original-dst", "reads the header x-other", other("original", http_header_name="x-other")),
]
BUFFERED: list[tuple[str, str, Break]] = [
    ("mode-override", "is off", without("processor", "allow_mode_override")),
    ("queue-patience", "is 0s", without("processor", "max_message_timeout")),
]
CASES = [
    (settings, f"envoy-{check}", said, spoil)
    for settings, spoilt in (
        ({}, PICKER + OVERRIDE),
        ({"mechanism": Mechanism.ORIGINAL_DST}, PICKER + ORIGINAL),
        ({"buffer_request_body": True}, PICKER + OVERRIDE + BUFFERED),
    )
    for check, said, spoil in spoilt
]
