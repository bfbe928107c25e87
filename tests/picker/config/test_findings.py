"""One error in a configuration is one finding, without consequential ones."""

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml

from picker.config.build import BuildOptions, check_config
from picker.config.catalog import builtin_plugins
from picker.config.findings import Finding, Severity
from tests.support.picker.configured_requests import GOLDEN, golden

CASES = (
    "any_order_of_plugins",
    "composed_without_the_gate",
    "data_layer_written_out",
    "flow_control_every_policy",
    "inject_defaults_off_with_scorers",
    "published_gaie_chart_latency_predictor",
    "published_pd_multi_tier",
    "published_turn_priority_fairness",
)
FREE_KEYS = {"research", "production"}  # tenants
REGISTRY = builtin_plugins()


def findings(document: Any) -> list[Finding]:
    content = yaml.safe_dump(document, sort_keys=False).encode()
    return list(check_config(content, "c", REGISTRY, BuildOptions(allow_experimental=True)))


def keys(node: Any) -> Iterator[tuple[Any, str]]:
    for key, one in list(node.items()) if isinstance(node, dict) else enumerate(node):
        if isinstance(node, dict):
            yield node, key
        if isinstance(one, dict | list):
            yield from keys(one)


def misspelt(document: Any) -> Iterator[tuple[str, Any]]:
    for number, (_, key) in enumerate(keys(document)):
        changed = copy.deepcopy(document)
        node, _ = list(keys(changed))[number]
        pairs = [(f"{name}x" if name == key else name, value) for name, value in node.items()]
        node.clear()
        node.update(pairs)
        yield key, changed


def mistyped(document: Any) -> Iterator[tuple[str, Any]]:
    for index, plugin in enumerate(document["plugins"]):
        for field in msgspec.structs.fields(REGISTRY.get(plugin["type"]).parameters):
            changed = copy.deepcopy(document)
            parameters = changed["plugins"][index].setdefault("parameters", {})
            parameters[field.encode_name] = 5 if field.type in (str, bool) else "useless"
            yield f"{plugin['type']}.{field.encode_name}", changed


@pytest.mark.parametrize("case", [case for case in CASES if case in GOLDEN])
@pytest.mark.parametrize("change", [misspelt, mistyped])
def test_one_error_is_one_finding(case: str, change: Any) -> None:
    document = yaml.safe_load(golden(case))
    before = {one.message for one in findings(document)}
    for name, changed in change(document):
        found = findings(changed)
        errors = [one for one in found if one.severity is Severity.ERROR]
        if not errors and (change is mistyped or name in FREE_KEYS):
            continue  # the changed value is valid too
        added = [one for one in found if one.message not in before]
        moved = [one for one in added if one.severity is Severity.WARNING]
        assert len(errors) == 1, (name, [str(one) for one in found])
        assert not moved, (name, [str(one) for one in moved])
