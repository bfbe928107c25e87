"""The shape of an `EndpointPickerConfig`, field for field as the reference picker reads it.

Frozen; unknown fields are errors. `None` means "not written", so that `config.build` can
distinguish a default from a choice. What a field means is decided there, which of them are
supported in `config.unsupported`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from picker.pool.object_parts import Int32

API_VERSION = "llm-d.ai/v1alpha1"
API_VERSIONS = (API_VERSION, "llm-d.ai/v1")  # any of them may have any key
DEPRECATED_API_VERSION = "inference.networking.x-k8s.io/v1alpha1"
KIND = "EndpointPickerConfig"

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of every part of the configuration."""


class PluginSpec(Section, frozen=True):
    """One plugin instance; `name` defaults to `type`."""

    type: Name
    name: str | None = None
    parameters: dict[str, Any] | None = None


class PluginRef(Section, frozen=True):
    """Names an entry of `plugins`."""

    plugin_ref: Name


class ProfilePlugin(Section, frozen=True):
    """A plugin's part in a scheduling profile; `weight` concerns scorers only."""

    plugin_ref: Name
    weight: float | None = None


class SchedulingProfile(Section, frozen=True):
    """Filters, scorers and a picker, in order."""

    name: Name
    plugins: tuple[ProfilePlugin, ...] = ()


class SourceSpec(Section, frozen=True):
    """A data source and what is read out of it."""

    plugin_ref: Name
    extractors: tuple[PluginRef, ...] = ()


class Discovery(Section, frozen=True):
    """Where endpoints and replicas are found; `pluginRef` is the older place of `endpoints`."""

    plugin_ref: Name | None = None
    endpoints: PluginRef | None = None
    peers: PluginRef | None = None


class CrossReplica(Section, frozen=True):
    """The exchange between replicas."""

    syncer_plugin_ref: str | None = None
    sync_interval: str | None = None
    publish_timeout: str | None = None


class DataLayer(Section, frozen=True):
    """Where the picker's knowledge of endpoints comes from.

    `discovery.endpoints`, `discovery.peers` and `cross_replica` are the later places of
    `discovery.pluginRef`, `peer_discovery` and the keys `crossReplica…`.
    """

    inject_defaults: bool | None = None
    sources: tuple[SourceSpec, ...] = ()
    discovery: Discovery | None = None
    peer_discovery: PluginRef | None = None
    cross_replica: CrossReplica | None = None
    cross_replica_syncer_plugin_ref: str | None = None
    cross_replica_sync_interval: str | None = None
    cross_replica_publish_timeout: str | None = None


class PriorityBandTemplate(Section, frozen=True):
    """Limits and policies of a band; its time to live goes before the one for all bands."""

    max_bytes: int | str | None = None
    max_requests: int | str | None = None
    default_request_ttl: str | None = msgspec.field(default=None, name="defaultRequestTTL")
    fairness_policy_ref: str | None = None
    ordering_policy_ref: str | None = None


class PriorityBand(PriorityBandTemplate, frozen=True, kw_only=True):
    """The band of one priority."""

    priority: Int32


class FlowControl(Section, frozen=True):
    """Queueing in front of the pool. `max_memory` is not of the reference."""

    max_bytes: int | str | None = None
    max_requests: int | str | None = None
    max_memory: int | str | None = None
    default_request_ttl: str | None = msgspec.field(default=None, name="defaultRequestTTL")
    no_endpoint_request_ttl: str | None = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: PriorityBandTemplate | None = None
    default_negative_priority_band: PriorityBandTemplate | None = None
    priority_bands: tuple[PriorityBand, ...] = ()
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: PluginRef | None = None
    enable_eviction: bool | None = None


class RequestHandler(Section, frozen=True):
    """How request bodies are understood, and what is forwarded to model servers beside them."""

    parsers: tuple[PluginRef, ...] = ()
    propagate_priority: bool | None = None


class EndpointPickerConfig(Section, frozen=True):
    """The whole document."""

    api_version: Name
    kind: Name
    feature_gates: tuple[str, ...] = ()
    plugins: tuple[PluginSpec, ...] = ()
    scheduling_profiles: tuple[SchedulingProfile, ...] = ()
    data_layer: DataLayer | None = None
    flow_control: FlowControl | None = None
    request_handler: RequestHandler | None = None
    saturation_detector: PluginRef | None = None
    parser: PluginRef | None = None
