"""Judges of Envoys: how they ask the picker, and where they send requests."""

from collections.abc import Iterator
from typing import Any

from fleet.doctor.cluster_look import failure_mode
from fleet.doctor.diagnosis import Facts, JudgeFinding, each, found, row
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
from picker.config.findings import Severity

QUEUE_SECONDS = 300.0  # that the picker requests while a request waits its turn
MIN_BODY_BYTES = 4 * 1024 * 1024
SHORT_ROUTE_SECONDS = 60.0
# Envoy's defaults.
_DEFAULT_MESSAGE_SECONDS = 0.2
_DEFAULT_ROUTE_SECONDS = 15.0
_DEFAULT_BUFFER_BYTES = 1024 * 1024
_DEFAULT_LIMIT = 1024
_DEFAULT_RETRIES = 3
_BODY_MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
# One name for each family of headers.
_FAMILIES = tuple(f"{prefix}host-port" for prefix in ROUTING_PREFIXES)
# A tenant and a priority, in both spellings.
_IDENTITY = tuple(
    f"{family}inference-{name}"
    for family in ("x-gateway-", "x-llm-d-")
    for name in ("fairness-id", "objective")
)
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
    return (lane for setup in _setups(facts) for lane in setup.picked)


def _pickers(facts: Facts) -> Iterator[ConfigPart]:
    return (one for setup in _setups(facts) for one in setup.pickers)


def _pools(facts: Facts) -> Iterator[ConfigPart]:
    return (one for setup in _setups(facts) for one in setup.pools)


def _reachable(facts: Facts) -> Iterator[JudgeFinding]:
    for one in facts.envoys:
        if one.problem is not None:
            yield found("silent", source=one.source, problem=one.problem)


def _version(envoy: EnvoyFacts) -> Iterator[JudgeFinding]:
    version = envoy.setup.version
    if version is not None and version < MINIMUM_VERSION:
        have, need = (".".join(map(str, v)) for v in (version, MINIMUM_VERSION))
        yield found("old", source=envoy.source, have=have, need=need)


def _present(setup: EnvoySetup) -> Iterator[JudgeFinding]:
    if not setup.lanes:
        names = ", ".join(f"'{one.listener}'" for one in setup.managers)
        yield found("missing", listeners=names or "none")


def _order(manager: Manager) -> Iterator[JudgeFinding]:
    types = [type_of(one) for one in manager.filters]
    routers = [i for i, name in enumerate(types, 1) if name.endswith(ROUTER)]
    asking = [i for i, name in enumerate(types, 1) if name.endswith(PROCESSOR)]
    if asking and not routers:
        yield found("no-router", listener=manager.listener)
    elif asking and asking[-1] > routers[0]:
        yield found("after", listener=manager.listener, asking=asking[-1], router=routers[0])


def _request_trailers(lane: Lane) -> Iterator[JudgeFinding]:
    mode = at(lane.processor, "processing_mode", "request_trailer_mode")
    if mode != "SEND":
        key = "duplex-trailers" if lane.body_mode == "FULL_DUPLEX_STREAMED" else "trailers"
        yield found(key, place=lane.place, value=mode or "not set (SKIP)")


def _mode_override(lane: Lane) -> Iterator[JudgeFinding]:
    response = at(lane.processor, "processing_mode", "response_body_mode") or "NONE"
    allowed = at(lane.processor, "allow_mode_override")
    if lane.body_mode == "BUFFERED" and response == "NONE" and not allowed:
        yield found("off", place=lane.place)


def _shorter(value: Any, least: float, default: float) -> str | None:
    given = default if value is None else seconds(value)
    if given is None or given >= least:
        return None
    return f"{given:g}s" + ("" if value else " (default)")


def _queue_timeout(facts: Facts) -> Iterator[JudgeFinding]:
    is_queueing = facts.picker is not None and facts.picker.queues.is_on
    severity = Severity.ERROR if is_queueing else Severity.WARNING
    for lane in _lanes(facts):
        limit = seconds(at(lane.processor, "max_message_timeout")) or 0.0
        if lane.body_mode == "BUFFERED" and limit < QUEUE_SECONDS:
            yield found("short", severity, place=lane.place, limit=f"{limit:g}")


def _strip(lane: Lane) -> Iterator[JudgeFinding]:
    left = [name for name in (*ROUTING_HEADERS, *_FAMILIES) if not lane.strips(name)]
    if left:
        astray = is_original_destination(lane.cluster) and ROUTING_HEADERS[0] in left
        yield found("astray" if astray else "left", place=lane.place, names=", ".join(left))
    elif not lane.authenticates:
        open_names = [name for name in _IDENTITY if not lane.strips(name)]
        if open_names:
            yield found("identity", place=lane.place, names=", ".join(open_names))


def _namespaces(lane: Lane) -> Iterator[JudgeFinding]:
    def lacks(group: str, name: str) -> bool:
        given = at(lane.processor, "metadata_options", group)
        return not any(name in texts(given, kind) for kind in ("untyped", "typed"))

    if lacks("receiving_namespaces", DESTINATION_NAMESPACE):
        yield found("needed" if _reads_metadata(lane) else "dropped", place=lane.place)
    subset = f"{DESTINATION_NAMESPACE}.subset_hint"
    for key, name in (("served", DESTINATION_NAMESPACE), ("subset", subset)):
        if lacks("forwarding_namespaces", name):
            yield found(key, place=lane.place)


def _reads_metadata(lane: Lane) -> bool:
    if lane.policy is None:
        return at(lane.cluster, "original_dst_lb_config", "metadata_key") is not None
    sources = listed(lane.policy, "override_host_sources")
    return not any(at(one, "header") == DESTINATION_KEY for one in sources)


def _unnamed(setup: EnvoySetup) -> Iterator[JudgeFinding]:
    for lane in setup.picked:
        if lane.picker_name and setup.clusters and not lane.picker:
            yield found("missing", place=lane.place, name=lane.picker_name)


def _speaks_http2(cluster: Json) -> bool:
    if at(cluster, "http2_protocol_options") is not None:
        return True
    for name, one in mapped(cluster, "typed_extension_protocol_options").items():
        if name.endswith(".HttpProtocolOptions"):
            explicit = at(one, "explicit_http_config", "http2_protocol_options")
            # Over TLS, ALPN chooses the version.
            by_tls = at(one, "auto_config"), at(cluster, "transport_socket")
            return explicit is not None or all(given is not None for given in by_tls)
    return False


def _attributes(lane: Lane) -> Iterator[JudgeFinding]:
    given = texts(lane.processor, "response_attributes")
    missing = [name for name in _ATTRIBUTES if name not in given]
    if missing:
        yield found("missing", place=lane.place, missing=", ".join(missing))


def _destination(lane: Lane) -> Iterator[JudgeFinding]:
    if lane.cluster and not is_original_destination(lane.cluster) and lane.policy is None:
        policy = at(lane.cluster, "lb_policy") or "ROUND_ROBIN"
        cluster = at(lane.cluster, "name")
        yield found("ignored", cluster=cluster, place=lane.place, policy=policy)


def _outliers(setup: EnvoySetup) -> Iterator[JudgeFinding]:
    for cluster in setup.pickers:
        yield from _PICKER_OUTLIERS(cluster)
    for cluster in setup.pools:
        yield from _POOL_OUTLIERS(cluster)


def _original(cluster: ConfigPart) -> Iterator[JudgeFinding]:
    settings = at(cluster.document, "original_dst_lb_config")
    if not is_original_destination(cluster.document) or _is_key(at(settings, "metadata_key")):
        return
    header = at(settings, "http_header_name")
    if not at(settings, "use_http_header"):
        yield found("unused", place=cluster.place)
    elif header != DESTINATION_KEY:
        yield found("other", place=cluster.place, header=header or "x-envoy-original-dst-host")


def _is_key(key: object) -> bool:
    steps = [at(one, "key") for one in listed(key, "path")]
    return at(key, "key") == DESTINATION_NAMESPACE and steps == [DESTINATION_KEY]


def _reads_destination(cluster: Json) -> bool:
    return any(
        at(one, "header") == DESTINATION_KEY or _is_key(at(one, "metadata"))
        for one in listed(override_host(cluster), "override_host_sources")
    )


def _lacks_fallback(cluster: Json) -> bool:
    policy = override_host(cluster)
    return policy is not None and not listed(policy, "fallback_policy", "policies")


def _breakers(setup: EnvoySetup) -> Iterator[JudgeFinding]:
    for cluster in (*setup.pickers, *setup.pools):
        thresholds = listed(cluster.document, "circuit_breakers", "thresholds")
        given = next((one for one in thresholds if at(one, "priority") in (None, "DEFAULT")), {})
        limits = {name: number(at(given, name)) or _DEFAULT_LIMIT for name in _BREAKERS}
        low = [f"{name} {value}" for name, value in limits.items() if value <= _DEFAULT_LIMIT]
        retries = number(at(given, "max_retries")) or _DEFAULT_RETRIES
        # The death of one busy worker is many retries at once.
        if cluster in setup.pools and retries <= _DEFAULT_RETRIES:
            low.append(f"max_retries {retries}")
        if low:
            yield found("low", place=cluster.place, low=", ".join(low))


def _retries(lane: Lane) -> Iterator[JudgeFinding]:
    if not lane.route:
        return
    policy = at(lane.route, "route", "retry_policy") or at(lane.route, "host", "retry_policy")
    words = {word.strip() for word in str(at(policy, "retry_on") or "").split(",")}
    repeats = sorted(words & {"5xx", "gateway-error"})
    if repeats:
        yield found("repeats", place=lane.place, words=", ".join(repeats))
    elif not {"connect-failure", "reset"} <= words:
        given = ", ".join(sorted(words - {""}))
        yield found("lost", place=lane.place, words=given or "not set")
    predicates = [type_of(one) for one in listed(policy, "retry_host_predicate")]
    if policy and not any(one.endswith(".PreviousHostsPredicate") for one in predicates):
        yield found("same-host", place=lane.place)


def _buffers(lane: Lane) -> Iterator[JudgeFinding]:
    given = at(lane.route, "request_body_buffer_limit")
    own = number(at(given, "value") if isinstance(given, dict) else given)
    limit = own or lane.manager.listener_buffer_bytes or _DEFAULT_BUFFER_BYTES
    if lane.route and limit < MIN_BODY_BYTES:
        key = "refused" if lane.body_mode == "BUFFERED" else "not-retried"
        yield found(key, place=lane.place, limit=limit)


def _hosts(envoy: EnvoyFacts) -> Iterator[JudgeFinding]:
    for clusters, what, effect in (
        (envoy.setup.pickers, "picker", "requests continue without a decision, or fail"),
        (envoy.setup.pools, "pool", "requests have nowhere to go"),
    ):
        for cluster in clusters:
            if envoy.hosts and not is_original_destination(cluster.document):
                hosts = envoy.hosts.get(str(at(cluster.document, "name")), ())
                yield from _reached(hosts, f"{cluster.place} ({what})", effect)


def _reached(hosts: tuple[HostSeen, ...], place: str, effect: str) -> Iterator[JudgeFinding]:
    ill = [one for one in hosts if one.ailments]
    named = "; ".join(f"{one.address}: {', '.join(one.ailments)}" for one in ill)
    counts = {"ill": len(ill), "all": len(hosts), "named": named}
    if not hosts:
        yield found("none", place=place, effect=effect)
    elif len(ill) == len(hosts):
        yield found("all", place=place, effect=effect, **counts)
    elif ill:
        yield found("some", place=place, **counts)


def _failure_mode(facts: Facts) -> Iterator[JudgeFinding]:
    wanted = failure_mode(facts.cluster)
    for lane in _lanes(facts) if wanted is not None else ():
        is_open = bool(at(lane.processor, "failure_mode_allow"))
        if is_open != (wanted == "FailOpen"):
            yield found("open" if is_open else "closed", place=lane.place, wanted=wanted)


_MODE = "filter.processing_mode"
_MODES = (
    row(
        "body",
        f"{_MODE}.request_body_mode",
        lambda mode: None if (mode or "NONE") in _BODY_MODES else str(mode or "NONE"),
    ),
    row("request-headers", f"{_MODE}.request_header_mode", lambda mode: mode == "SKIP"),
    row("response-headers", f"{_MODE}.response_header_mode", lambda mode: mode == "SKIP"),
    row(
        "grpc",
        _MODE,
        lambda mode: "GRPC" in (at(mode, "request_body_mode"), at(mode, "response_body_mode")),
    ),
    row(
        "response-trailers",
        f"{_MODE}.response_trailer_mode",
        lambda mode: mode != "SEND" and str(mode or "not set (SKIP)"),
    ),
)
_MESSAGE_TIMEOUT = row(
    "short", "filter.message_timeout", lambda value: _shorter(value, 1.0, _DEFAULT_MESSAGE_SECONDS)
)
_PICKER_HTTP2 = row("http1", "", lambda cluster: not _speaks_http2(cluster))
_PICKER_HEALTH = row("none", "", lambda cluster: not listed(cluster, "health_checks"))
_PICKER_OUTLIERS = row(
    "picker",
    "outlier_detection",
    lambda given: (
        at(given, _LOCAL_FAILURES) is None
        and ("outlier_detection" if given is None else _LOCAL_FAILURES)
    ),
)
_POOL_OUTLIERS = row(
    "pool",
    "",
    lambda cluster: override_host(cluster) is not None and at(cluster, "outlier_detection") is None,
)
_PANIC = row(
    "panics",
    "common_lb_config.healthy_panic_threshold",
    lambda threshold: "50" if threshold is None else at(threshold, "value"),
)
_FALLBACK = row("no-fallback", "", _lacks_fallback)
_SOURCES = row(
    "sources",
    "",
    lambda cluster: override_host(cluster) is not None and not _reads_destination(cluster),
)
_ROUTE_TIMEOUT = row(
    "short",
    "route.route",
    lambda action: (
        action
        and seconds(at(action, "timeout")) != 0.0  # which means no limit
        and _shorter(at(action, "timeout"), SHORT_ROUTE_SECONDS, _DEFAULT_ROUTE_SECONDS)
    ),
)

JUDGES = {
    "envoy-reachable": _reachable,
    "envoy-version": each(_envoys, _version),
    "envoy-ext-proc": each(_setups, _present),
    "envoy-filter-order": each(_managers, _order),
    "envoy-processing-mode": each(_lanes, *_MODES, _request_trailers),
    "envoy-mode-override": each(_lanes, _mode_override),
    "envoy-message-timeout": each(_lanes, _MESSAGE_TIMEOUT),
    "envoy-queue-patience": _queue_timeout,
    "envoy-header-strip": each(_lanes, _strip),
    "envoy-metadata": each(_lanes, _namespaces),
    "envoy-response-attributes": each(_lanes, _attributes),
    "envoy-destination": each(_lanes, _destination),
    "envoy-picker-cluster": each(_setups, _unnamed),
    "envoy-picker-http2": each(_pickers, _PICKER_HTTP2),
    "envoy-picker-health-check": each(_pickers, _PICKER_HEALTH),
    "envoy-outlier-detection": each(_setups, _outliers),
    "envoy-panic-threshold": each(_pickers, _PANIC),
    "envoy-original-dst": each(_pools, _original),
    "envoy-override-host": each(_pools, _FALLBACK, _SOURCES),
    "envoy-circuit-breakers": each(_setups, _breakers),
    "envoy-route-timeout": each(_lanes, _ROUTE_TIMEOUT),
    "envoy-retries": each(_lanes, _retries),
    "envoy-buffers": each(_lanes, _buffers),
    "envoy-hosts": each(_envoys, _hosts),
    "envoy-failure-mode": _failure_mode,
}
