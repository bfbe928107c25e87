"""The last steps before a request leaves: hooks, headers, the body, what the proxy is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from picker.errors import Code, RefusedError
from picker.framework.interfaces import Flight, PreRequest
from picker.requestcontrol.headers import DESTINATION_NAMESPACE, DESTINATION_SCORES
from picker.requestcontrol.plugin_log import PLUGIN_FAILED, PluginLog
from picker.requestcontrol.rewrite import changes, with_members
from picker.types import InferenceRequest, Metadata, ParsedBody, SchedulingResult

_NO_METADATA: Metadata = MappingProxyType({})


def tell_hooks(hooks: Sequence[PreRequest], flight: Flight, log: PluginLog) -> dict[str, str]:
    """The headers that the hooks want set; of two that set the same one, the later one does.

    All hooks run. One refusal alone is the answer; any other failure is ours (500).
    """
    headers: dict[str, str] = {}
    failed: list[Exception] = []
    for hook in hooks:
        try:
            wanted = hook.pre_request(flight.request, flight.result, flight.attributes)
        except RefusedError as refusal:
            failed.append(refusal)
        except Exception as error:
            log.exception(hook, error, "the request is refused")
            failed.append(error)
        else:
            if wanted:
                headers.update(wanted)
    if not failed:
        return headers
    if len(failed) == 1 and isinstance(failed[0], RefusedError):
        raise failed[0]
    reasons = "; ".join(
        error.message if isinstance(error, RefusedError) else PLUGIN_FAILED for error in failed
    )
    raise RefusedError(Code.INTERNAL, f"the request could not be prepared: {reasons}")


def outgoing_body(body: bytes, parsed: ParsedBody, request: InferenceRequest) -> bytes | None:
    """The body that leaves instead of `body`; None: that one, byte for byte.

    `parsed` is what the parser made of `body`. It changes when the model does, or when a plugin has
    replaced members of the payload; never where the payload is what stands in a frame.
    """
    before, after = parsed.payload, request.body.payload
    if before is None or after is None or not parsed.can_rewrite:
        return None
    changed: Mapping[str, object] = {}
    removed: Sequence[str] = ()
    if after is not before:
        changed, removed = changes(before, after)
    if request.target_model != parsed.model:
        changed = {**changed, "model": request.target_model}
    if not changed and not removed:
        return None
    return with_members(body, changed, removed)


def endpoint_scores(result: SchedulingResult) -> Metadata:
    """What the proxy is told of the scores: each endpoint that the primary profile scored."""
    primary = result.profiles.get(result.primary_profile)
    if primary is None or not primary.scored:
        return _NO_METADATA
    scores = {one.candidate.endpoint.host_port: one.score for one in primary.scored}
    return {DESTINATION_NAMESPACE: {DESTINATION_SCORES: scores}}
