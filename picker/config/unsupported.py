"""Everything the reference picker knows that this one does not do yet, with the reason.

Refused, never ignored; this is the one place that decides. A plugin type that has a file is
supported whatever stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from picker.config.findings import Findings
from picker.config.schema import CrossReplica, DataLayer, Discovery, EndpointPickerConfig

FLOW_CONTROL_GATE = "flowControl"
STANDBY_GATE = "haPopulateNonLeaderDatastore"  # standbys know the pool, too
# Type → why a configuration with it is refused.
PLUGIN_TYPES: Mapping[str, str] = MappingProxyType(
    {"k8s-notification-source": "not supported yet: Kubernetes is not there"}
)
# Gate → its default.
GATES: Mapping[str, bool] = MappingProxyType({FLOW_CONTROL_GATE: False, STANDBY_GATE: True})

_ON = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_OFF = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def check_supported(config: EndpointPickerConfig, findings: Findings) -> None:
    """Report every gate and section that would not have the effect that it asks for."""
    _check_gates(config, findings)
    if config.request_handler is not None and config.request_handler.propagate_priority:
        text = "leave it out: a request's priority is not passed on to model servers yet"
        findings.error(("requestHandler", "propagatePriority"), text)
    if config.data_layer is not None:
        _check_data_layer(config.data_layer, findings)


def _check_data_layer(layer: DataLayer, findings: Findings) -> None:
    """Keys about replicas, each at its older and at its later place."""
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
    """Every gate as the configuration sets it: the last entry that makes sense counts."""
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
    """The gate and the value of one entry; a gate alone is on."""
    name, is_set, value = text.partition("=")
    return name, value if is_set else "true"


def _check_flow_control(config: EndpointPickerConfig, is_on: bool, findings: Findings) -> None:
    """Without its gate the section has no effect, but for the saturation detector. With errors the
    gate may only seem to be off.
    """
    section = config.flow_control
    if section is None or is_on or findings.has_errors:
        return
    for field, key in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
        value = getattr(section, field)
        if key != "saturationDetector" and value is not None and value != ():
            text = "has no effect while the gate 'flowControl' is off"
            findings.warn(("flowControl", key), text)
