"""One HTTP listener that cleans a request, asks the picker, and forwards."""

from collections.abc import Sequence

from base.response_bodies import ResponseBodies
from fleet.envoy.clusters import PICKER, POOL
from fleet.envoy.local_replies import local_reply_config
from fleet.envoy.proto import Json, address, extension, packed, seconds
from fleet.envoy.response_reports import access_log, lua_filter
from fleet.envoy.settings import (
    CONTROL_PREFIXES,
    DESTINATION_NAMESPACE,
    POOL_METADATA,
    ROUTING_HEADERS,
    ROUTING_PREFIXES,
    BootstrapConfig,
)

MAX_PATIENCE_SECONDS = 3600.0  # that the picker may extend the wait for its answer to
_ACCESS_LOG_LINE = (
    "%START_TIME% %REQ(:METHOD)% %REQ(:PATH)% %RESPONSE_CODE% %RESPONSE_FLAGS% "
    "%RESPONSE_CODE_DETAILS% %UPSTREAM_HOST% attempts=%UPSTREAM_REQUEST_ATTEMPT_COUNT% "
    "%DURATION%ms %REQ(X-REQUEST-ID)%"
)
_FILTERS = "envoy.extensions.filters"
_EXT_PROC = "envoy.filters.http.ext_proc"
_ENDPOINT_NAME = " endpoint=%UPSTREAM_METADATA(pointsman:name)%"  # as the picker reports it


def listener(config: BootstrapConfig) -> Json:
    manager = extension(
        "envoy.filters.network.http_connection_manager",
        f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        **_connection_manager(config),
    )
    return {
        "name": "ingress",
        "address": address(config.listen),
        # Two proxies on one port would share its connections silently.
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": 1024 * 1024,
        "filter_chains": [{"filters": [manager]}],
    }


def _connection_manager(config: BootstrapConfig) -> Json:
    limits = config.limits
    idle = seconds(limits.stream_idle_timeout_seconds)
    return {
        "stat_prefix": "ingress",  # the names in `admin` contain it
        "server_name": "pointsman",
        "use_remote_address": True,
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
        "max_request_headers_kb": limits.max_request_headers_kib,
        "request_headers_timeout": seconds(limits.request_headers_timeout_seconds),
        "request_timeout": seconds(limits.request_timeout_seconds),
        "stream_idle_timeout": idle,
        "drain_timeout": "1s",
        "common_http_protocol_options": {
            "idle_timeout": idle,
            "max_headers_count": limits.max_request_headers,
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        # The picker decides a WebSocket (vLLM's /v1/realtime) at the headers.
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        # `curl --http1.0`, `ab` and old health checks; such a request may have no Host.
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": "pointsman"},
        "http2_protocol_options": {
            "allow_connect": True,  # which a WebSocket over HTTP/2 begins with
            "max_concurrent_streams": limits.max_concurrent_streams,
            "initial_stream_window_size": 65_536,
            "initial_connection_window_size": 1_048_576,
        },
        "early_header_mutation_extensions": [
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                mutations=_strip(config),
            )
        ],
        "route_config": _routes(config),
        "local_reply_config": local_reply_config(),
        "http_filters": [
            _ext_proc(config),
            # Nearer to the endpoint, so that it has seen the end of a response before ext_proc.
            *([lua_filter()] if config.response_bodies is ResponseBodies.USAGE else []),
            extension(
                "envoy.filters.http.router",
                f"{_FILTERS}.http.router.v3.Router",
                suppress_envoy_headers=True,
            ),
        ],
        "access_log": _access_log(config),
    }


def _strip(config: BootstrapConfig) -> list[Json]:
    """Remove headers of a request before anything, the route included, reads them."""
    prefixes: tuple[str, ...] = ROUTING_PREFIXES
    if not config.trust_control_headers:
        prefixes = CONTROL_PREFIXES + ROUTING_PREFIXES
    exact = [name for name in ROUTING_HEADERS if not name.startswith(prefixes)]
    if config.route_by_model:
        exact.append(POOL_METADATA)  # by which the picker chooses the route
    matchers = [{"prefix": prefix, "ignore_case": True} for prefix in prefixes]
    return [
        *({"remove_on_match": {"key_matcher": matcher}} for matcher in matchers),
        *({"remove": name} for name in exact),
    ]


def _routes(config: BootstrapConfig) -> Json:
    if config.pools:
        routes = [_pool_route(config, name) for name in config.pools]
        if config.route_by_model:
            routes += [*(_chosen_route(config, name) for name in config.pools), _undecided()]
        else:
            routes.append(_nowhere(config.pools))
    else:
        routes = [_route(config, POOL, "/")]
    if config.welcome is not None:
        welcome = _answer("welcome", {"path": "/"}, 200, config.welcome)
        routes.insert(0, {**welcome, **_ext_proc_settings(disabled=True)})
    host = {"name": "pool", "domains": ["*"], "routes": routes}
    return {"name": "ingress", "virtual_hosts": [host]}


def _pool_route(config: BootstrapConfig, name: str) -> Json:
    """Build the route of one pool; the picker sees the path before the rewrite."""
    # No header of the request, which a client could choose.
    named = {"grpc_initial_metadata": [{"key": POOL_METADATA, "value": name}]}
    route = _route(config, name, f"/{name}/")
    route["route"]["prefix_rewrite"] = "/"
    return {**route, **_ext_proc_settings(overrides=named)}


def _chosen_route(config: BootstrapConfig, name: str) -> Json:
    """Build the route that is found once the picker has chosen this pool and cleared the route."""
    route = {**_route(config, name, "/"), "name": f"{name}-by-model"}
    route["match"]["headers"] = [{"name": POOL_METADATA, "string_match": {"exact": name}}]
    return route


def _undecided() -> Json:
    """Route requests that the picker has yet to read, and those that it could not."""
    text = "The endpoint picker did not choose a pool"
    return _answer("by-model", {"prefix": "/"}, 503, text)


def _nowhere(pools: Sequence[str]) -> Json:
    """Answer requests that name no pool; the picker does not see them."""
    known = ", ".join(f"/{name}/" for name in pools)
    text = f"There is no pool at this path; they are below {known}"
    route = _answer("nowhere", {"prefix": "/"}, 404, text)
    return {**route, **_ext_proc_settings(disabled=True)}


def _answer(name: str, match: Json, status: int, text: str) -> Json:
    response = {"status": status, "body": {"inline_string": text}}
    return {"name": name, "match": match, "direct_response": response}


def _ext_proc_settings(**settings: object) -> Json:
    typed = packed(f"{_FILTERS}.http.ext_proc.v3.ExtProcPerRoute", **settings)
    return {"typed_per_filter_config": {_EXT_PROC: typed}}


def _route(config: BootstrapConfig, cluster: str, prefix: str) -> Json:
    return {
        "name": cluster,
        "match": {"prefix": prefix},
        "route": {
            "cluster": cluster,
            # An answer may stream for as long as tokens come; only silence ends it.
            "timeout": "0s",
            "idle_timeout": seconds(config.limits.stream_idle_timeout_seconds),
            "retry_policy": _retry_policy(config),
        },
        # A retry needs the whole body: a longer one is served but never retried (measured).
        "request_body_buffer_limit": config.limits.request_buffer_bytes,
    }


def _retry_policy(config: BootstrapConfig) -> Json:
    """Retry elsewhere when an endpoint cannot be reached, disconnects before it answered, or
    answers 503 (it drains, its queue is full, its engine has died). Once response headers have
    arrived nothing is retried: tokens are never sent twice.
    """
    return {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": config.num_retries,
        "host_selection_retry_max_attempts": 8,
        "retry_host_predicate": [
            extension(
                "envoy.retry_host_predicates.previous_hosts",
                "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
            )
        ],
        "retry_back_off": {"base_interval": "0.01s", "max_interval": "0.25s"},
    }


def _processing_mode(config: BootstrapConfig) -> Json:
    duplex = "FULL_DUPLEX_STREAMED"
    return {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED" if config.buffer_request_body else duplex,
        # The full-duplex mode insists on trailers. In the buffered mode a request without a body
        # but with trailers would pass the picker unseen (measured).
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        # Each chunk of a stream would cost tens of µs in Envoy, and again in the picker.
        "response_body_mode": duplex if config.response_bodies is ResponseBodies.ALL else "NONE",
        # Without it Envoy closes the stream at the response headers, and the picker would count a
        # request as finished while its tokens are still streaming (measured).
        "response_trailer_mode": "SEND",
    }


def _ext_proc(config: BootstrapConfig) -> Json:
    subset = f"{DESTINATION_NAMESPACE}.subset_hint"
    return extension(
        _EXT_PROC,
        f"{_FILTERS}.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": PICKER}},
        failure_mode_allow=config.failure_mode_allow,
        message_timeout=seconds(config.effective_message_timeout_seconds),
        # The picker asks for more when a request has to wait its turn; nothing else is slow there.
        max_message_timeout=seconds(MAX_PATIENCE_SECONDS),
        processing_mode=_processing_mode(config),
        # The endpoint that has answered in the end: after a retry it is not the picked one, which
        # would otherwise count the success. Without an address there is none.
        response_attributes=["upstream.address", "upstream.request_attempt_count"],
        # The picker asks for the body of a response only to put a model's name back into it. In
        # full duplex Envoy would disregard the wish (measured).
        allow_mode_override=config.buffer_request_body
        and config.response_bodies is not ResponseBodies.ALL,
        metadata_options={
            "forwarding_namespaces": {"untyped": [DESTINATION_NAMESPACE, subset]},
            "receiving_namespaces": {"untyped": [DESTINATION_NAMESPACE]},  # Envoy drops any other
        },
    )


def _access_log(config: BootstrapConfig) -> list[Json]:
    reports = [access_log()] if config.response_bodies is ResponseBodies.USAGE else []
    if config.access_log_path is None:
        return reports
    named = "" if config.discovery is None else _ENDPOINT_NAME
    line = {"text_format_source": {"inline_string": f"{_ACCESS_LOG_LINE}{named}\n"}}
    return [
        *reports,
        extension(
            "envoy.access_loggers.file",
            "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            path=config.access_log_path,
            log_format=line,
        ),
    ]
