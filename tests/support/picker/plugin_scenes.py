"""Candidates, requests and plugins for the tests of plugins, each by one call."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

import msgspec

from picker.config.catalog import builtin_plugins
from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.framework.attributes import PEER_ENDPOINT_KEY, Attributes
from picker.framework.disaggregation import DECODE_ROLES, ENCODE_ROLES, PREFILL_ROLES, ROLE_LABEL
from picker.framework.flow import QueuedRequest
from picker.framework.interfaces import Flight
from picker.framework.services import NO_SERVICES, Services
from picker.plugins.filters.label_filters import LabelValueFilter
from picker.scheduling.scheduler import Profile, Scheduler
from picker.types import (
    Api,
    Candidate,
    Candidates,
    Endpoint,
    EndpointMetrics,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    SchedulingResult,
    ScoredEndpoint,
)

_SEQUENCES = count(1)
_ROLES = {"decode": DECODE_ROLES, "prefill": PREFILL_ROLES, "encode": ENCODE_ROLES}


def candidate(
    name: str = "w", *, inflight: int = 0, known: bool = True, **metrics: Any
) -> Candidate:
    endpoint = Endpoint(name, "10.0.0.1", 8000)
    return Candidate(endpoint, EndpointMetrics(**metrics) if known else None, inflight)


def placed(
    name: str = "w",
    labels: dict[str, str] | None = None,
    *,
    address: str = "10.0.0.1",
    port: int = 8000,
    **fields: Any,
) -> Candidate:
    fields.setdefault("metrics", EndpointMetrics())
    return Candidate(Endpoint(name, address, port, labels=labels or {}), **fields)


def request_for(
    api: Api = Api.RAW, payload: dict[str, Any] | None = None, **fields: Any
) -> InferenceRequest:
    body = ParsedBody(api, "m", payload=payload, cache_salt=fields.pop("salt", ""))
    headers, model = fields.pop("headers", {}), fields.pop("model", "m")
    return InferenceRequest("r", headers, body, "m", model, **fields)


_TYPES = builtin_plugins()


def configured(
    type_name: str,
    parameters: Mapping[str, Any] | None = None,
    name: str = "",
    services: Services = NO_SERVICES,
) -> Any:
    plugin = _TYPES.get(type_name)
    decoded = msgspec.convert(parameters or {}, plugin.parameters)
    return plugin.make(name or type_name, decoded, services)


def required_texts(type_name: str) -> dict[str, str]:
    """Some text for each parameter that the type requires."""
    fields = msgspec.structs.fields(_TYPES.get(type_name).parameters)
    return {one.encode_name: "pool" for one in fields if one.required}


def types_of(contract: type) -> list[str]:
    """List the types with this contract that need no more parameters than some texts."""
    found = []
    for row in _TYPES:
        with suppress(ValueError, msgspec.ValidationError):
            if isinstance(configured(row.name, required_texts(row.name)), contract):
                found.append(row.name)
    return found


def scores(
    name: str,
    candidates: Candidates,
    attributes: Attributes | None = None,
    parameters: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> list[float]:
    scorer, request = configured(name, parameters), request_for(model="a", headers=headers or {})
    return list(scorer.score(request, candidates, attributes or Attributes()))


def queued(
    flow: str = "f", *, at: float = 0.0, tokens: int = 0, ttl: float | None = None, **fields: Any
) -> QueuedRequest:
    request = request_for(fairness_id=flow, **fields)
    return QueuedRequest(request, next(_SEQUENCES), at, tokens=tokens, ttl_seconds=ttl)


def decided(**profiles: Candidates) -> SchedulingResult:
    """Each profile picked these endpoints, best first; the first profile is primary."""
    made = {
        name: ProfileResult(tuple(ScoredEndpoint(one, 1.0) for one in picked))
        for name, picked in profiles.items()
    }
    primary = next(iter(profiles))
    return SchedulingResult(tuple(one.endpoint for one in profiles[primary]), primary, made)


def flight() -> Flight:
    return Flight(request_for(), SchedulingResult((placed().endpoint,), "default"), Attributes())


def passed(
    plugin: Any,
    candidates: Candidates,
    attributes: Attributes | None = None,
    *,
    request: InferenceRequest | None = None,
    rng: Random | None = None,
) -> list[str]:
    answer = plugin.filter(
        request or request_for(), candidates, attributes or Attributes(), rng or Random(1)
    )
    return [one.endpoint.name for one in answer]


# Decisions with a real scheduler, and deciders that say what they are made to say.


class AllPicker:
    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        return scored


class SetDecider:
    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.shown: list[str | None] = []

    def should_run(self, request: Any, picked: Candidate | None, attributes: Any) -> bool:
        self.shown.append(None if picked is None else picked.endpoint.name)
        return self.answer


class Watch:
    def __init__(self, profile: str, runs: list[tuple[str, str | None]]) -> None:
        self._profile, self._runs = profile, runs

    def filter(self, request: Any, candidates: Any, attributes: Attributes, rng: Any) -> Any:
        peer = attributes.get(PEER_ENDPOINT_KEY)
        self._runs.append((self._profile, None if peer is None else peer.endpoint.name))
        return candidates


def pool_of(*names: str) -> list[Candidate]:
    return [
        placed(f"{role}{index}", {ROLE_LABEL: role}, address=f"10.0.0.{index}")
        for index, role in enumerate(names)
    ]


def schedule(
    handler: Any,
    profiles: Sequence[str],
    candidates: Candidates,
    request: InferenceRequest | None = None,
) -> tuple[SchedulingResult, list[tuple[str, str | None]]]:
    """A profile filters by the role of its name."""
    runs: list[tuple[str, str | None]] = []
    made = [
        Profile(
            name,
            BoundPlugin(AllPicker()),
            (
                BoundPlugin(Watch(name, runs)),
                BoundPlugin(LabelValueFilter(ROLE_LABEL, _ROLES.get(name.removeprefix("my-"), ()))),
            ),
        )
        for name in profiles
    ]
    bound, asked = BoundPlugin(handler), request or request_for()
    scheduler = Scheduler(made, bound, bound)
    return scheduler.schedule(asked, candidates, Attributes(), Random(1), PluginSteps()), runs
