"""One HTTP listener that cleans a request, asks the picker, and forwards."""

from __future__ import annotations

from collections.abc import Sequence

from envoy.config.accesslog.v3 import accesslog_pb2
from envoy.config.common.mutation_rules.v3 import mutation_rules_pb2
from envoy.config.core.v3 import (
    base_pb2,
    grpc_service_pb2,
    protocol_pb2,
    substitution_format_string_pb2,
)
from envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from envoy.config.route.v3 import route_components_pb2, route_pb2
from envoy.extensions.access_loggers.file.v3 import file_pb2
from envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2, processing_mode_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.extensions.http.early_header_mutation.header_mutation.v3 import header_mutation_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.type.matcher.v3 import string_pb2

from fleet.envoy.clusters import PICKER, POOL
from fleet.envoy.local_replies import local_reply_config
from fleet.envoy.proto import address, boolean, extension, packed, seconds, uint32
from fleet.envoy.settings import (
    CONTROL_PREFIXES,
    DESTINATION_NAMESPACE,
    POOL_METADATA,
    ROUTING_HEADERS,
    ROUTING_PREFIXES,
    BootstrapConfig,
)

MAX_PATIENCE_SECONDS = 3600.0  # that the picker may extend the wait for its answer to
_ConnectionManager = http_connection_manager_pb2.HttpConnectionManager
_ProcessingMode = processing_mode_pb2.ProcessingMode
_ACCESS_LOG_LINE = (
    "%START_TIME% %REQ(:METHOD)% %REQ(:PATH)% %RESPONSE_CODE% %RESPONSE_FLAGS% "
    "%RESPONSE_CODE_DETAILS% %UPSTREAM_HOST% attempts=%UPSTREAM_REQUEST_ATTEMPT_COUNT% "
    "%DURATION%ms %REQ(X-REQUEST-ID)%"
)
_EXT_PROC = "envoy.filters.http.ext_proc"
_ENDPOINT_NAME = " endpoint=%UPSTREAM_METADATA(pointsman:name)%"  # as the picker reports it


def listener(config: BootstrapConfig) -> listener_pb2.Listener:
    chain = listener_components_pb2.FilterChain(
        filters=[
            listener_components_pb2.Filter(
                name="envoy.filters.network.http_connection_manager",
                typed_config=packed(_connection_manager(config)),
            )
        ]
    )
    return listener_pb2.Listener(
        name="ingress",
        address=address(config.listen),
        # Two proxies on one port would share its connections silently.
        enable_reuse_port=boolean(False),
        per_connection_buffer_limit_bytes=uint32(1024 * 1024),
        filter_chains=[chain],
    )


def _connection_manager(config: BootstrapConfig) -> http_connection_manager_pb2.Any:
    limits = config.limits
    manager = _ConnectionManager(
        stat_prefix="ingress",
        server_name="pointsman",
        use_remote_address=boolean(True),
        generate_request_id=boolean(True),
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        normalize_path=boolean(True),
        merge_slashes=True,
        path_with_escaped_slashes_action=_ConnectionManager.UNESCAPE_AND_REDIRECT,
        max_request_headers_kb=uint32(limits.max_request_headers_kib),
        request_headers_timeout=seconds(limits.request_headers_timeout_seconds),
        request_timeout=seconds(limits.request_timeout_seconds),
        stream_idle_timeout=seconds(limits.stream_idle_timeout_seconds),
        drain_timeout=seconds(1.0),
        common_http_protocol_options=protocol_pb2.HttpProtocolOptions(
            idle_timeout=seconds(limits.stream_idle_timeout_seconds),
            max_headers_count=uint32(limits.max_request_headers),
            headers_with_underscores_action=protocol_pb2.HttpProtocolOptions.REJECT_REQUEST,
        ),
        # The picker decides a WebSocket (vLLM's /v1/realtime) at the headers.
        upgrade_configs=[_ConnectionManager.UpgradeConfig(upgrade_type="websocket")],
        # `curl --http1.0`, `ab` and old health checks; such a request may have no Host.
        http_protocol_options=protocol_pb2.Http1ProtocolOptions(
            accept_http_10=True, default_host_for_http_10="pointsman"
        ),
        http2_protocol_options=protocol_pb2.Http2ProtocolOptions(
            allow_connect=True,  # which a WebSocket over HTTP/2 begins with
            max_concurrent_streams=uint32(limits.max_concurrent_streams),
            initial_stream_window_size=uint32(65_536),
            initial_connection_window_size=uint32(1_048_576),
        ),
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                header_mutation_pb2.HeaderMutation(mutations=_strip(config)),
            )
        ],
        route_config=_routes(config),
        local_reply_config=local_reply_config(),
        http_filters=[_ext_proc(config), _router()],
    )
    if config.access_log_path is not None:
        named = "" if config.discovery is None else _ENDPOINT_NAME
        manager.access_log.append(_access_log(config.access_log_path, _ACCESS_LOG_LINE + named))
    return manager


def _strip(config: BootstrapConfig) -> list[mutation_rules_pb2.HeaderMutation]:
    """Remove headers of a request before anything, the route included, reads it."""
    prefixes: tuple[str, ...] = ROUTING_PREFIXES
    if not config.trust_control_headers:
        prefixes = CONTROL_PREFIXES + ROUTING_PREFIXES
    exact = [name for name in ROUTING_HEADERS if not name.startswith(prefixes)]
    if config.route_by_model:
        exact.append(POOL_METADATA)  # by which the picker chooses the route
    mutation = mutation_rules_pb2.HeaderMutation
    return [
        *(
            mutation(
                remove_on_match=mutation.RemoveOnMatch(
                    key_matcher=string_pb2.StringMatcher(prefix=prefix, ignore_case=True)
                )
            )
            for prefix in prefixes
        ),
        *(mutation(remove=name) for name in exact),
    ]


def _routes(config: BootstrapConfig) -> route_pb2.RouteConfiguration:
    if config.pools:
        routes = [_pool_route(config, name) for name in config.pools]
        if config.route_by_model:
            routes += [*(_chosen_route(config, name) for name in config.pools), _undecided()]
        else:
            routes.append(_nowhere(config.pools))
    else:
        routes = [_route(config, POOL, "/")]
    if config.welcome is not None:
        routes.insert(0, _welcome(config.welcome))
    host = route_components_pb2.VirtualHost(name="pool", domains=["*"], routes=routes)
    return route_pb2.RouteConfiguration(name="ingress", virtual_hosts=[host])


def _pool_route(config: BootstrapConfig, name: str) -> route_components_pb2.Route:
    """The picker sees the path before the rewrite."""
    named = base_pb2.HeaderValue(key=POOL_METADATA, value=name)
    overrides = ext_proc_pb2.ExtProcOverrides(grpc_initial_metadata=[named])
    route = _route(config, name, f"/{name}/")
    route.route.prefix_rewrite = "/"
    _set_ext_proc(route, ext_proc_pb2.ExtProcPerRoute(overrides=overrides))
    return route


def _chosen_route(config: BootstrapConfig, name: str) -> route_components_pb2.Route:
    """Route to the pool that the picker has chosen: it clears the route, and this one is found
    then.
    """
    route = _route(config, name, "/")
    route.name = f"{name}-by-model"
    route.match.headers.append(
        route_components_pb2.HeaderMatcher(name=POOL_METADATA, string_match={"exact": name})
    )
    return route


def _undecided() -> route_components_pb2.Route:
    """Route requests that the picker has yet to read, and those that it could not."""
    return route_components_pb2.Route(
        name="by-model",
        match=route_components_pb2.RouteMatch(prefix="/"),
        direct_response=route_components_pb2.DirectResponseAction(
            status=503, body={"inline_string": "The endpoint picker did not choose a pool"}
        ),
    )


def _nowhere(pools: Sequence[str]) -> route_components_pb2.Route:
    """Answer requests for no pool, which the picker does not see."""
    known = ", ".join(f"/{name}/" for name in pools)
    route = route_components_pb2.Route(
        name="nowhere",
        match=route_components_pb2.RouteMatch(prefix="/"),
        direct_response=route_components_pb2.DirectResponseAction(
            status=404,
            body={"inline_string": f"There is no pool at this path; they are below {known}"},
        ),
    )
    _set_ext_proc(route, ext_proc_pb2.ExtProcPerRoute(disabled=True))
    return route


def _welcome(text: str) -> route_components_pb2.Route:
    route = route_components_pb2.Route(
        name="welcome",
        match=route_components_pb2.RouteMatch(path="/"),
        direct_response=route_components_pb2.DirectResponseAction(
            status=200, body={"inline_string": text}
        ),
    )
    _set_ext_proc(route, ext_proc_pb2.ExtProcPerRoute(disabled=True))
    return route


def _set_ext_proc(
    route: route_components_pb2.Route, settings: ext_proc_pb2.ExtProcPerRoute
) -> None:
    route.typed_per_filter_config[_EXT_PROC].CopyFrom(packed(settings))


def _route(config: BootstrapConfig, cluster: str, prefix: str) -> route_components_pb2.Route:
    action = route_components_pb2.RouteAction(
        cluster=cluster,
        # An answer may stream for as long as tokens come; only silence ends it.
        timeout=seconds(0),
        idle_timeout=seconds(config.limits.stream_idle_timeout_seconds),
        retry_policy=_retry_policy(config),
    )
    return route_components_pb2.Route(
        name=cluster,
        match=route_components_pb2.RouteMatch(prefix=prefix),
        route=action,
        request_body_buffer_limit={"value": config.limits.request_buffer_bytes},
    )


def _retry_policy(config: BootstrapConfig) -> route_components_pb2.RetryPolicy:
    """Retry elsewhere when an endpoint cannot be reached, disconnects before it answered, or
    answers 503 (it drains, its queue is full, its engine has died). Once response headers have
    arrived nothing is retried: tokens are never sent twice.
    """
    policy = route_components_pb2.RetryPolicy
    return policy(
        retry_on="connect-failure,refused-stream,reset,retriable-status-codes",
        retriable_status_codes=[503],
        num_retries=uint32(config.num_retries),
        host_selection_retry_max_attempts=8,
        retry_host_predicate=[
            policy.RetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=packed(previous_hosts_pb2.PreviousHostsPredicate()),
            )
        ],
        retry_back_off=policy.RetryBackOff(base_interval=seconds(0.01), max_interval=seconds(0.25)),
    )


def _processing_mode(config: BootstrapConfig) -> processing_mode_pb2.Any:
    mode = _ProcessingMode
    duplex = mode.FULL_DUPLEX_STREAMED
    return mode(
        request_header_mode=mode.SEND,
        request_body_mode=mode.BUFFERED if config.buffer_request_body else duplex,
        # The full-duplex mode insists on trailers. In the buffered mode a request without a body
        # but with trailers would pass the picker unseen (measured).
        request_trailer_mode=mode.SEND,
        response_header_mode=mode.SEND,
        response_body_mode=duplex if config.stream_response_body else mode.NONE,
        # Without it Envoy closes the stream at the response headers, and the picker would count a
        # request as finished while its tokens are still streaming (measured).
        response_trailer_mode=mode.SEND,
    )


def _ext_proc(config: BootstrapConfig) -> http_connection_manager_pb2.Any:
    processor = ext_proc_pb2.ExternalProcessor(
        grpc_service=grpc_service_pb2.GrpcService(
            envoy_grpc=grpc_service_pb2.GrpcService.EnvoyGrpc(cluster_name=PICKER)
        ),
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
        allow_mode_override=config.buffer_request_body and not config.stream_response_body,
        metadata_options=ext_proc_pb2.MetadataOptions(
            forwarding_namespaces=ext_proc_pb2.MetadataOptions.MetadataNamespaces(
                untyped=[DESTINATION_NAMESPACE, f"{DESTINATION_NAMESPACE}.subset_hint"]
            ),
            receiving_namespaces=ext_proc_pb2.MetadataOptions.MetadataNamespaces(
                untyped=[DESTINATION_NAMESPACE]
            ),
        ),
    )
    return http_connection_manager_pb2.HttpFilter(name=_EXT_PROC, typed_config=packed(processor))


def _router() -> http_connection_manager_pb2.Any:
    return http_connection_manager_pb2.HttpFilter(
        name="envoy.filters.http.router",
        typed_config=packed(router_pb2.Router(suppress_envoy_headers=True)),
    )


def _access_log(path: str, text: str) -> accesslog_pb2.AccessLog:
    line = substitution_format_string_pb2.SubstitutionFormatString(
        text_format_source={"inline_string": f"{text}\n"}
    )
    return accesslog_pb2.AccessLog(
        name="envoy.access_loggers.file",
        typed_config=packed(file_pb2.FileAccessLog(path=path, log_format=line)),
    )
