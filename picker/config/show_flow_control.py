"""The part of `config show` that is about flow control: its settings, with nothing left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from picker.config.build import Assembly
from picker.config.load import LoadedConfig
from picker.config.schema import FlowControl
from picker.config.source import Path
from picker.flowcontrol.settings import BandSettings, FlowControlSettings

# (where it is shown, what it is, where it may be written).
Put: TypeAlias = Callable[[Path, str | int | bool, Path], None]
_SECTION: Path = ("flowControl",)
_DETECTOR: Path = ("saturationDetector", "pluginRef")


def put_flow_control(put: Put, loaded: LoadedConfig, assembly: Assembly) -> None:
    """The saturation detector, and while flow control is on everything else of it too."""
    section = loaded.config.flow_control or FlowControl()
    if assembly.flow_control is not None:
        names = {id(one.plugin): one.name for one in assembly.instances.values()}
        _put_settings(put, section, assembly.flow_control, names)
    if assembly.detector is not None:
        source = _DETECTOR if section.saturation_detector is None else (*_SECTION, *_DETECTOR)
        put((*_SECTION, *_DETECTOR), assembly.detector.name, source)


def _put_settings(
    put: Put, section: FlowControl, settings: FlowControlSettings, names: Mapping[int, str]
) -> None:
    def one(key: str, value: str | int | bool, written: str | None = None) -> None:
        put((*_SECTION, key), value, (*_SECTION, written or key))

    one("maxBytes", settings.max_bytes or 0)
    one("maxRequests", settings.max_requests or 0)
    one("defaultRequestTTL", _duration(settings.request_ttl_seconds))
    is_said = section.no_endpoint_request_ttl is not None
    source = "noEndpointRequestTTL" if is_said else "defaultRequestTTL"
    one("noEndpointRequestTTL", _duration(settings.no_endpoint_ttl_seconds), source)
    default, negative = (*_SECTION, "defaultPriorityBand"), "defaultNegativePriorityBand"
    _put_band(put, default, default, settings.default_band, names)
    is_said = section.default_negative_priority_band is not None
    source_band = (*_SECTION, negative) if is_said else default
    _put_band(put, (*_SECTION, negative), source_band, settings.default_negative_band, names)
    for index, (priority, band) in enumerate(settings.bands.items()):
        at = (*_SECTION, "priorityBands", index)
        put((*at, "priority"), priority, (*at, "priority"))
        _put_band(put, at, at, band, names)
    one("usageLimitPolicyPluginRef", names[id(settings.usage_limits)])
    one("enableEviction", settings.eviction is not None)


def _put_band(
    put: Put, at: Path, written: Path, band: BandSettings, names: Mapping[int, str]
) -> None:
    for key, value in (
        ("maxBytes", band.max_bytes),
        ("maxRequests", band.max_requests),
        ("fairnessPolicyRef", names[id(band.fairness)]),
        ("orderingPolicyRef", names[id(band.ordering)]),
    ):
        put((*at, key), value, (*written, key))


def _duration(seconds: float | None) -> str:
    """As Go writes it, in seconds: `60s`, `0.5s`; 0s never ends."""
    return "0s" if seconds is None else f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
