"""The shape of an `EndpointPickerConfig`, field for field as the reference picker reads it, and the
parts of it that this picker does not support: these are refused with a reason, never ignored.

`None` means "not written", so that `config.build` can distinguish a default from a choice.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from picker.config.findings import Findings
from picker.pool.object_parts import Int32

API_VERSION = "llm-d.ai/v1alpha1"
API_VERSIONS = (API_VERSION, "llm-d.ai/v1")  # each may have all keys
DEPRECATED_API_VERSION = "inference.networking.x-k8s.io/v1alpha1"
KIND = "EndpointPickerConfig"

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"): ...


class PluginSpec(Section, frozen=True):
    type: Name
    name: str | None = None
    parameters: dict[str, Any] | None = None


class PluginRef(Section, frozen=True):
    plugin_ref: Name


class ProfilePlugin(Section, frozen=True):
    plugin_ref: Name
    weight: float | None = None


class SchedulingProfile(Section, frozen=True):
    name: Name
    plugins: tuple[ProfilePlugin, ...] = ()


class SourceSpec(Section, frozen=True):
    plugin_ref: Name
    extractors: tuple[PluginRef, ...] = ()


class Discovery(Section, frozen=True):
    """Discovery of endpoints and replicas; `pluginRef` is the older place for `endpoints`."""

    plugin_ref: Name | None = None
    endpoints: PluginRef | None = None
    peers: PluginRef | None = None


class CrossReplica(Section, frozen=True):
    syncer_plugin_ref: str | None = None
    sync_interval: str | None = None
    publish_timeout: str | None = None


class DataLayer(Section, frozen=True):
    """`discovery.endpoints`, `discovery.peers` and `cross_replica` are the later places for
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
    """Limits and policies of a band; its time to live overrides the one for all bands."""

    max_bytes: int | str | None = None
    max_requests: int | str | None = None
    default_request_ttl: str | None = msgspec.field(default=None, name="defaultRequestTTL")
    fairness_policy_ref: str | None = None
    ordering_policy_ref: str | None = None


class PriorityBand(PriorityBandTemplate, frozen=True, kw_only=True):
    priority: Int32


class FlowControl(Section, frozen=True):
    """Queueing in front of the pool. The reference has no `max_memory`."""

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
    parsers: tuple[PluginRef, ...] = ()
    propagate_priority: bool | None = None


class EndpointPickerConfig(Section, frozen=True):
    """The document; all paths of findings begin here."""

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


FLOW_CONTROL_GATE = "flowControl"
STANDBY_GATE = "haPopulateNonLeaderDatastore"  # standbys follow the pool too
# Type → reason of the refusal.
PLUGIN_TYPES: Mapping[str, str] = MappingProxyType(
    {"k8s-notification-source": "not supported yet: Kubernetes is not there"}
)
# Gate → its default.
GATES: Mapping[str, bool] = MappingProxyType({FLOW_CONTROL_GATE: False, STANDBY_GATE: True})

# The spellings of Go's `strconv.ParseBool`, which reads the gates of the reference.
_ON = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_OFF = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def check_supported(config: EndpointPickerConfig, findings: Findings) -> None:
    """Report every gate and section without the expected effect."""
    _check_gates(config, findings)
    if config.data_layer is not None:
        _check_data_layer(config.data_layer, findings)


def _check_data_layer(layer: DataLayer, findings: Findings) -> None:
    discovery, replicas = layer.discovery or Discovery(), layer.cross_replica or CrossReplica()
    if discovery.endpoints is not None and discovery.plugin_ref is not None:
        text = "has no effect beside dataLayer.discovery.endpoints"
        findings.warn(("dataLayer", "discovery", "pluginRef"), text)
    for path, peers in (
        (("peerDiscovery",), layer.peer_discovery),
        (("discovery", "peers"), discovery.peers),
    ):
        if peers is not None:
            text = "has no effect: replicas are found by --peers and --peer-service"
            findings.warn(("dataLayer", *path), text)
    for path, syncer in (
        (("crossReplicaSyncerPluginRef",), layer.cross_replica_syncer_plugin_ref),
        (("crossReplica", "syncerPluginRef"), replicas.syncer_plugin_ref),
    ):
        if syncer is not None:
            text = "leave it out: with --peers or --peer-service replicas exchange all they know"
            findings.error(("dataLayer", *path), text)
    for path, timeout in (
        (("crossReplicaPublishTimeout",), layer.cross_replica_publish_timeout),
        (("crossReplica", "publishTimeout"), replicas.publish_timeout),
    ):
        if timeout is not None:
            text = "has no effect: replicas exchange messages over open streams"
            findings.warn(("dataLayer", *path), text)


def gate_settings(config: EndpointPickerConfig) -> Mapping[str, bool]:
    """Return the value of every gate: the last valid entry counts."""
    settings = dict(GATES)
    for entry in config.feature_gates:
        name, value = _entry(entry)
        if name in GATES and value in _ON | _OFF:
            settings[name] = value in _ON
    return settings


def _check_gates(config: EndpointPickerConfig, findings: Findings) -> None:
    for index, entry in enumerate(config.feature_gates):
        path = ("featureGates", index)
        name, value = _entry(entry)
        if name not in GATES:
            findings.unknown(path, f"unknown gate '{name}'", name, GATES)
        elif value not in _ON | _OFF:
            text = f"'{value}' is neither true nor false"
            findings.error(path, text, (f"{name}=true", f"{name}=false"))
    _check_flow_control(config, gate_settings(config)[FLOW_CONTROL_GATE], findings)


def _entry(text: str) -> tuple[str, str]:
    """Split an entry into gate and value; a gate without a value is on."""
    name, is_set, value = text.partition("=")
    return name, value if is_set else "true"


def _check_flow_control(config: EndpointPickerConfig, is_on: bool, findings: Findings) -> None:
    section = config.flow_control
    # After errors the gate may only seem to be off.
    if section is None or is_on or findings.has_errors:
        return
    for field, key in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
        value = getattr(section, field)
        if key != "saturationDetector" and value is not None and value != ():
            text = "has no effect while the gate 'flowControl' is off"
            findings.warn(("flowControl", key), text)
