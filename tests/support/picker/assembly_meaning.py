"""The meaning of a configuration in plain values, to compare two of them."""

from collections.abc import Callable
from typing import Any

from picker.config.build import Assembly
from picker.decisions.steps import BoundPlugin
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.telemetry.detectors import MeasuredDetector


def inner(bound: Any) -> Any:
    if isinstance(bound, MeasuredDetector):
        bound = bound.bound
    return bound.plugin if isinstance(bound, BoundPlugin) else bound


def meaning(assembly: Assembly) -> dict[str, Any]:
    names = {id(one.plugin): one.name for one in assembly.instances.values()}

    def named(plugin: Any) -> str:
        return names[id(inner(plugin))]

    steps = ("processors", "screeners", "producers", "admitters", "hooks")
    steps += ("response_heads", "response_progress", "request_ends")
    pipeline, layer, settings = assembly.pipeline, assembly.data_layer, assembly.flow_control
    return {
        "handler": assembly.handler.name,
        "profiles": {
            name: {
                "filters": [named(one) for one in profile.filters],
                "scorers": {named(one): one.weight for one in profile.scorers},
                "picker": named(profile.picker),
            }
            for name, profile in assembly.profiles.items()
        },
        "parsers": [named(parser) for parser in pipeline.parsers.parsers],
        "saturation": named(pipeline.saturation) if pipeline.saturation else None,
        **{step: [named(one) for one in getattr(pipeline, step)] for step in steps},
        "observers": [named(one) for one in assembly.observers],
        "sources": {
            bound.source.name: [one.name for one in bound.extractors] for bound in layer.sources
        },
        "discovery": layer.discovery.name if layer.discovery else None,
        **({"flow control": flow_control(settings, named)} if settings else {}),
        "warnings": list(map(str, assembly.warnings)),
    }


def flow_control(settings: FlowControlSettings, named: Callable[[Any], str]) -> dict[str, Any]:
    def band(one: BandSettings) -> dict[str, Any]:
        policies = {"fairness": named(one.fairness), "ordering": named(one.ordering)}
        caps = {"bytes": one.max_bytes, "requests": one.max_requests}
        return {**caps, "ttl": one.request_ttl_seconds, **policies}

    return {
        "bytes": settings.max_bytes,
        "requests": settings.max_requests,
        "memory": settings.max_memory_bytes,
        "ttl without endpoints": settings.no_endpoint_ttl_seconds,
        "default band": band(settings.default_band),
        "default negative band": band(settings.default_negative_band),
        "bands": {priority: band(one) for priority, one in settings.bands.items()},
        "usage limits": named(settings.usage_limits),
        "detector": [named(settings.detector), settings.detector_name],
        "eviction": [named(one) for one in settings.eviction or ()],
    }
