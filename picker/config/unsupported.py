"""What the schema knows but this program does not do yet. Refused, never ignored."""

from __future__ import annotations

from picker.config.load import Path, Source
from picker.config.schema import EndpointPickerConfig
from picker.errors import ConfigError

_ON = {"1", "t", "T", "TRUE", "true", "True"}
_OFF = {"0", "f", "F", "FALSE", "false", "False"}
# Gate → the only setting that is true of this program.
_GATES = {"flowControl": False, "haPopulateNonLeaderDatastore": True}


def refuse_unsupported(config: EndpointPickerConfig, source: Source) -> None:
    """Raise `ConfigError` for the first section that would have no effect."""
    layer = config.data_layer
    found: list[tuple[Path, bool]] = [
        (("flowControl",), config.flow_control is not None),
        (("saturationDetector",), config.saturation_detector is not None),
    ]
    if layer is not None:
        found += [
            (("dataLayer", "peerDiscovery"), layer.peer_discovery is not None),
            (
                ("dataLayer", "crossReplicaSyncerPluginRef"),
                layer.cross_replica_syncer_plugin_ref is not None,
            ),
            (
                ("dataLayer", "crossReplicaSyncInterval"),
                layer.cross_replica_sync_interval is not None,
            ),
        ]
        if layer.inject_defaults is False and not layer.sources:
            text = "false without a source leaves the scorers without metrics: not supported yet"
            raise source.error(("dataLayer", "injectDefaults"), text)
    for path, is_set in found:
        if is_set:
            raise source.error(path, "not supported yet")


def check_feature_gates(config: EndpointPickerConfig, source: Source) -> None:
    """Raise `ConfigError` for an unknown gate, a bad value, or a gate whose feature is not here."""
    settings: dict[str, bool] = {}
    for index, entry in enumerate(config.feature_gates):
        path = ("featureGates", index)
        name, _, value = entry.partition("=")
        if name not in _GATES:
            raise source.error(path, f"unknown gate '{name}', allowed: {', '.join(_GATES)}")
        settings[name] = _truth(value or "true", path, source)
        if settings[name] is not _GATES[name]:
            raise source.error(path, f"'{entry}' is not supported yet")


def _truth(text: str, path: Path, source: Source) -> bool:
    if text not in _ON | _OFF:
        error: ConfigError = source.error(path, f"'{text}' is neither true nor false")
        raise error
    return text in _ON
