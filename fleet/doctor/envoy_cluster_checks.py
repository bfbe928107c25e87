"""Checks of where Envoy sends things: clusters of pickers and workers, and routes to them."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.doctor.cluster_facts import failure_mode
from fleet.doctor.envoy_document import (
    EnvoySetup,
    Json,
    Lane,
    at,
    is_original_destination,
    listed,
    mapped,
    number,
    override_host,
    picker_name,
    seconds,
)
from fleet.doctor.envoy_filter_checks import of_lanes, of_setup
from fleet.doctor.facts import Facts, HostSeen
from fleet.doctor.findings import Check, Finding, error, warning
from fleet.envoy.settings import DESTINATION_KEY, DESTINATION_NAMESPACE

LEAST_BODY_BYTES = 4 * 1024 * 1024
SHORT_ROUTE_SECONDS = 60.0
_DEFAULT_ROUTE_SECONDS = 15.0
_DEFAULT_BUFFER_BYTES = 1024 * 1024
_DEFAULT_LIMIT = 1024
_DEFAULT_RETRIES = 3
_HTTP_OPTIONS = ".HttpProtocolOptions"
_BREAKERS = ("max_connections", "max_pending_requests", "max_requests")
_PREDICATE = ".PreviousHostsPredicate"


def _name(cluster: Json) -> str:
    return f"cluster '{at(cluster, 'name')}'"


def _health(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in setup.pickers:
        if not listed(cluster, "health_checks"):
            yield warning(
                f"{_name(cluster)} of the picker has no health_checks",
                "a picker that hangs or went away is found out by requests, which wait or fail",
                "add health_checks: [{timeout: 2s, interval: 1s, unhealthy_threshold: 1, "
                "healthy_threshold: 1, grpc_health_check: {service_name: "
                "envoy.service.ext_proc.v3.ExternalProcessor}}]",
            )


def _outliers(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in setup.pickers:
        found = at(cluster, "outlier_detection")
        if at(found, "consecutive_local_origin_failure") is None:
            what = "outlier_detection" if found is None else "consecutive_local_origin_failure"
            yield warning(
                f"{_name(cluster)} of the picker has no {what}",
                "until the health check notices, request after request is sent to a dead picker",
                "add outlier_detection: {split_external_local_origin_errors: true, "
                "consecutive_local_origin_failure: 1, interval: 1s, base_ejection_time: 1s, "
                "max_ejection_percent: 100}",
            )
    for cluster in setup.pools:
        if override_host(cluster) is not None and at(cluster, "outlier_detection") is None:
            yield warning(
                f"{_name(cluster)} of workers has no outlier_detection",
                "retries, and requests without a picker, go to workers that fail",
                "add outlier_detection as in deploy/envoy/override-host.yaml",
            )


def _panic(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in setup.pickers:
        threshold = at(cluster, "common_lb_config", "healthy_panic_threshold")
        if threshold is None or at(threshold, "value"):
            share = 50 if threshold is None else at(threshold, "value")
            yield warning(
                f"{_name(cluster)} of the picker panics below {share} % healthy",
                "with the only picker down Envoy takes it for healthy again and sends it requests",
                "add common_lb_config: {healthy_panic_threshold: {value: 0}}",
            )


def _http2(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in setup.pickers:
        if not _speaks_http2(cluster):
            yield error(
                f"{_name(cluster)} of the picker speaks HTTP/1",
                "ext_proc is gRPC, which needs HTTP/2: no call gets through",
                "add typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3."
                "HttpProtocolOptions: {'@type': type.googleapis.com/envoy.extensions.upstreams."
                "http.v3.HttpProtocolOptions, explicit_http_config: {http2_protocol_options: {}}}}",
            )


def _speaks_http2(cluster: Json) -> bool:
    if at(cluster, "http2_protocol_options") is not None:
        return True
    options = mapped(cluster, "typed_extension_protocol_options")
    for name, one in options.items():
        if name.endswith(_HTTP_OPTIONS):
            explicit = at(one, "explicit_http_config", "http2_protocol_options")
            by_tls = at(one, "auto_config"), at(cluster, "transport_socket")
            return explicit is not None or all(found is not None for found in by_tls)
    return False


def _missing_picker(setup: EnvoySetup) -> Iterator[Finding]:
    for lane in setup.picked:
        name = picker_name(lane.processor)
        if name and setup.clusters and not lane.picker:
            yield error(
                f"{lane.place}: ext_proc names the cluster '{name}', which there is not",
                "Envoy cannot ask the picker",
                f"add a cluster '{name}' as in deploy/envoy, or name the one that is there",
            )


def _original(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in setup.pools:
        settings = at(cluster, "original_dst_lb_config")
        if not is_original_destination(cluster) or _reads_destination_metadata(settings):
            continue
        header = at(settings, "http_header_name")
        if not at(settings, "use_http_header"):
            yield error(
                f"{_name(cluster)} is ORIGINAL_DST without use_http_header",
                "it goes where the client's connection went, not where the picker says",
                "add original_dst_lb_config: {use_http_header: true, "
                f"http_header_name: {DESTINATION_KEY}}}",
            )
        elif header != DESTINATION_KEY:
            yield error(
                f"{_name(cluster)} reads the header {header or 'x-envoy-original-dst-host'}",
                f"the picker names the endpoint in {DESTINATION_KEY}",
                f"original_dst_lb_config: {{use_http_header: true, "
                f"http_header_name: {DESTINATION_KEY}}}",
            )


def _reads_destination_metadata(settings: object) -> bool:
    found = at(settings, "metadata_key")
    return _is_destination(found)


def _is_destination(key: object) -> bool:
    steps = [at(one, "key") for one in listed(key, "path")]
    return at(key, "key") == DESTINATION_NAMESPACE and steps == [DESTINATION_KEY]


def _override(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in setup.pools:
        policy = override_host(cluster)
        if policy is None:
            continue
        if not listed(policy, "fallback_policy", "policies"):
            yield error(
                f"{_name(cluster)}: override_host has no fallback_policy",
                "with the picker away no request has anywhere to go",
                "add fallback_policy: {policies: [{typed_extension_config: {name: "
                "envoy.load_balancing_policies.least_request, typed_config: {'@type': "
                "type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3."
                "LeastRequest}}}]}",
            )
        sources = listed(policy, "override_host_sources")
        if not any(
            at(one, "header") == DESTINATION_KEY or _is_destination(at(one, "metadata"))
            for one in sources
        ):
            yield error(
                f"{_name(cluster)}: override_host_sources does not read {DESTINATION_KEY}",
                "what the picker answers has no effect on where requests go",
                f"override_host_sources: [{{metadata: {{key: {DESTINATION_NAMESPACE}, path: "
                f"[{{key: {DESTINATION_KEY}}}]}}}}]",
            )


def _breakers(setup: EnvoySetup) -> Iterator[Finding]:
    for cluster in (*setup.pickers, *setup.pools):
        default = next(
            (
                one
                for one in listed(cluster, "circuit_breakers", "thresholds")
                if at(one, "priority") in (None, "DEFAULT")
            ),
            {},
        )
        low = {
            name: value
            for name in _BREAKERS
            if (value := number(at(default, name)) or _DEFAULT_LIMIT) <= _DEFAULT_LIMIT
        }
        retries = number(at(default, "max_retries")) or _DEFAULT_RETRIES
        if cluster in setup.pools and retries <= _DEFAULT_RETRIES:
            low["max_retries"] = retries
        if low:
            told = ", ".join(f"{name} {value}" for name, value in low.items())
            yield warning(
                f"{_name(cluster)}: circuit breakers at {told}",
                "requests that stream stay open for long; past a limit Envoy answers 503 at once, "
                "or does not retry what a dead worker has dropped",
                "add circuit_breakers: {thresholds: [{max_connections: 10000, "
                "max_pending_requests: 10000, max_requests: 10000, max_retries: 1024}]}",
            )


def _timeout(lane: Lane) -> Iterator[Finding]:
    if not lane.route:
        return
    given = at(lane.route, "route", "timeout")
    timeout = _DEFAULT_ROUTE_SECONDS if given is None else seconds(given)
    if timeout and timeout < SHORT_ROUTE_SECONDS:
        yield error(
            f"{lane.place}: the route's timeout is {timeout:g}s" + ("" if given else " (default)"),
            "it cuts every answer that streams for longer",
            "on the route: timeout: 0s, with idle_timeout: 300s",
        )


def _retries(lane: Lane) -> Iterator[Finding]:
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
    predicates = listed(policy, "retry_host_predicate")
    if policy and not any(
        str(at(one, "typed_config", "@type")).endswith(_PREDICATE) for one in predicates
    ):
        yield warning(
            f"{lane.place}: retry_host_predicate lacks previous_hosts",
            "a retry may go to the very worker that has just failed",
            "retry_policy: {retry_host_predicate: [{name: envoy.retry_host_predicates."
            "previous_hosts, typed_config: {'@type': type.googleapis.com/envoy.extensions.retry."
            "host.previous_hosts.v3.PreviousHostsPredicate}}]}",
        )


def _buffers(lane: Lane) -> Iterator[Finding]:
    if not lane.route:
        return
    given = at(lane.route, "request_body_buffer_limit")
    own = number(at(given, "value") if isinstance(given, dict) else given)
    limit = own or lane.manager.listener_buffer_bytes or _DEFAULT_BUFFER_BYTES
    if limit >= LEAST_BODY_BYTES:
        return
    effect = (
        "a longer prompt, or one with pictures, is a 413"
        if lane.body_mode == "BUFFERED"
        else "a longer prompt is served but never retried"
    )
    yield warning(
        f"{lane.place}: a request's body is buffered up to {limit} bytes",
        effect,
        f"on the route: request_body_buffer_limit: {LEAST_BODY_BYTES}",
    )


def _alive(facts: Facts) -> Iterator[Finding]:
    """Whether Envoy can reach them now, where it could be asked."""
    for envoy in facts.envoys:
        for clusters, what, effect in (
            (envoy.setup.pickers, "picker", "requests go on without a decision, or fail"),
            (envoy.setup.pools, "pool", "requests have nowhere to go"),
        ):
            for cluster in clusters:
                if envoy.hosts and not is_original_destination(cluster):
                    name = str(at(cluster, "name"))
                    yield from _judged_hosts(envoy.hosts.get(name, ()), name, what, effect)


def _judged_hosts(
    hosts: tuple[HostSeen, ...], name: str, what: str, effect: str
) -> Iterator[Finding]:
    ill = [one for one in hosts if one.ailments]
    if not hosts:
        yield error(
            f"cluster '{name}' ({what}) has no endpoints",
            effect,
            "look at its discovery: curl ADMIN/clusters, and the log of Envoy",
        )
    elif ill:
        told = "; ".join(f"{one.address}: {', '.join(one.ailments)}" for one in ill)
        everybody = len(ill) == len(hosts)
        yield (error if everybody else warning)(
            f"cluster '{name}' ({what}): {len(ill)} of {len(hosts)} endpoints fail ({told})",
            effect if everybody else "fewer are left to serve",
            "see that they run and that Envoy reaches the port: `grpcurl -plaintext HOST:PORT "
            "grpc.health.v1.Health/Check` for a picker, `curl HOST:PORT/health` for a worker",
        )


def _failure_mode(facts: Facts) -> Iterator[Finding]:
    """The pool's word against the filter's."""
    wanted = failure_mode(facts.cluster)
    if wanted is None:
        return
    for envoy in facts.envoys:
        for lane in envoy.setup.picked:
            is_open = bool(at(lane.processor, "failure_mode_allow"))
            if is_open != (wanted == "FailOpen"):
                yield error(
                    f"{lane.place}: failure_mode_allow is {str(is_open).lower()}, the pool's "
                    f"failureMode is {wanted}",
                    "with the picker away requests "
                    + (
                        "pass, though they should fail"
                        if is_open
                        else "fail, though they should pass"
                    ),
                    "in the typed_config of the filter envoy.filters.http.ext_proc: "
                    f"failure_mode_allow: {str(not is_open).lower()}",
                )


CHECKS = (
    Check(
        "envoy-picker-cluster", "ext_proc names a cluster that is there", of_setup(_missing_picker)
    ),
    Check("envoy-picker-http2", "the picker is spoken to in HTTP/2", of_setup(_http2)),
    Check("envoy-picker-health-check", "a hanging picker is noticed", of_setup(_health)),
    Check("envoy-outlier-detection", "who fails is taken out of use", of_setup(_outliers)),
    Check("envoy-panic-threshold", "a dead picker stays out of use", of_setup(_panic)),
    Check("envoy-original-dst", "the destination header is followed", of_setup(_original)),
    Check("envoy-override-host", "the destination is read, with a fallback", of_setup(_override)),
    Check("envoy-circuit-breakers", "limits leave room for streams", of_setup(_breakers)),
    Check("envoy-route-timeout", "answers may stream for long", of_lanes(_timeout)),
    Check(
        "envoy-retries", "what can be retried is, elsewhere, and nothing else", of_lanes(_retries)
    ),
    Check("envoy-buffers", "long prompts are taken and retried", of_lanes(_buffers)),
    Check("envoy-hosts", "Envoy finds picker and workers healthy now", _alive),
    Check("envoy-failure-mode", "failing open is as the pool says", _failure_mode),
)
