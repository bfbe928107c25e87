"""What the gatherers have seen. What was not looked at is None or empty, and nobody judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.doctor.cluster_facts import ClusterFacts
from fleet.doctor.envoy_document import EnvoySetup
from picker.admin.views import ConfigView, EndpointView
from picker.flowcontrol.views import QueuesView


@dataclass(frozen=True, slots=True)
class HostSeen:
    """An endpoint of a cluster, as Envoy sees it; `ailments` are Envoy's words."""

    address: str
    ailments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvoyFacts:
    """One Envoy. `hosts` are those of each cluster, known only of one that runs; `problem` says
    why it could not be looked at.
    """

    source: str
    setup: EnvoySetup = field(default_factory=EnvoySetup)
    hosts: Mapping[str, tuple[HostSeen, ...]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PickerFacts:
    """One picker. `problem` says why nothing else is known.

    `readiness` is the text of `/readyz`; `ahead_seconds` how far its clock is ahead of this one's;
    `metrics` are the samples of its series without labels, and of those with labels their sum.
    `files` are those that it has open and the limit, `words` its command line, both known of one
    on this machine. `peer_calls` counts its calls to replicas by how they ended.
    """

    url: str
    problem: str | None = None
    is_ready: bool = True
    readiness: str = ""
    endpoints: tuple[EndpointView, ...] = ()
    queues: QueuesView = field(default_factory=QueuesView)
    config: ConfigView | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    ahead_seconds: float | None = None
    files: tuple[int, int] | None = None
    words: tuple[str, ...] = ()
    peer_calls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker, as it answers the doctor.

    `problem`: nobody answers. `metrics_names` are the names of all its series, None when `/metrics`
    is no metrics page; `metrics_kind` is what that page says it is. `expected` are the names by
    which the picker reads its load. `models` None: `/v1/models` is no such list.
    """

    address: str
    problem: str | None = None
    health_status: int = 200
    metrics_kind: str = ""
    metrics_names: frozenset[str] | None = frozenset()
    expected: tuple[str, ...] = ()
    models: tuple[str, ...] | None = ()
    version: str | None = None


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a TLS port shows; `days_left` is negative once it is over."""

    address: str
    problem: str | None = None
    days_left: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it."""

    picker: PickerFacts | None = None
    envoys: tuple[EnvoyFacts, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()
    cluster: ClusterFacts | None = None
