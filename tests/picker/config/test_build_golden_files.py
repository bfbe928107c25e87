"""Configurations become exactly what their golden twins say, or fail with exactly that message.

`name.in.yaml` is a configuration, `name.out.yaml` what it means. To accept a changed meaning, run
with `POINTSMAN_UPDATE_GOLDEN=1` and review the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker.config.build import Assembly, BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.config.schema import PLUGIN_TYPES
from picker.decisions.steps import BoundPlugin
from picker.errors import ConfigError
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.metrics.picker_metrics import PickerMetrics
from picker.telemetry.detectors import MeasuredDetector

FOLDER = Path(__file__).parents[2] / "golden" / "config"
CASES = sorted(path.name.removesuffix(".in.yaml") for path in FOLDER.glob("*.in.yaml"))


def inner(bound: Any) -> Any:
    """The plugin at an extension point; a detector measures itself."""
    if isinstance(bound, MeasuredDetector):
        bound = bound.bound
    return bound.plugin if isinstance(bound, BoundPlugin) else bound


def meaning(assembly: Assembly) -> dict[str, Any]:
    """An assembly in words."""
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
    """What flow control is to do, in words."""

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


def outcome(path: Path) -> dict[str, Any]:
    """What a configuration means, or all that is wrong with it."""
    options = BuildOptions(allow_experimental="experimental_refused" not in path.name)
    try:
        loaded = load_config(path.read_bytes(), path.name)
        return meaning(build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0, options))
    except ConfigError as error:
        return {"errors": str(error).splitlines()}


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_means_what_its_golden_twin_says(case: str) -> None:
    found = outcome(FOLDER / f"{case}.in.yaml")
    twin = FOLDER / f"{case}.out.yaml"
    if os.environ.get("POINTSMAN_UPDATE_GOLDEN"):
        twin.write_text(yaml.safe_dump(found, sort_keys=False, width=100, allow_unicode=True))
    assert found == yaml.safe_load(twin.read_text())


def test_every_plugin_type_stands_in_a_case() -> None:
    """By each of its names; and what counts as missing is not there."""
    text = "".join((FOLDER / f"{case}.in.yaml").read_text() for case in CASES)
    written = set(re.findall(r"type: ([a-z0-9-]+)", text))
    assert builtin_plugins().names - written == set()
    assert builtin_plugins().names & set(PLUGIN_TYPES) == set()


def test_there_are_golden_cases() -> None:
    """A moved folder must not pass silently."""
    assert len(CASES) > 30
