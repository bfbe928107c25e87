"""Filters by label: label-selector-filter, by-label-selector, by-label and the filters by role."""

from typing import Any

import pytest

from tests.support.picker.plugin_scenes import configured, passed, placed

ROLES = (
    "encode",
    "prefill",
    "decode",
    "encode-prefill",
    "prefill-decode",
    "encode-prefill-decode",
    "both",
    "encode-decode",
    "Decode",
    "",
)


@pytest.mark.parametrize("plugin", ["label-selector-filter", "by-label-selector"])
def test_a_selector_filter_passes_the_selected_endpoints(plugin: str) -> None:
    candidates = [
        placed("h100-new", {"gpu": "h100", "age": "new"}),
        placed("bare"),
        placed("a100", {"gpu": "a100"}),
        placed("h100", {"gpu": "h100"}),
    ]
    by_gpu = configured(plugin, {"matchLabels": {"gpu": "h100"}})
    assert passed(by_gpu, candidates) == ["h100-new", "h100"]
    young = {"matchExpressions": [{"key": "age", "operator": "DoesNotExist"}]}
    assert passed(configured(plugin, young), candidates) == ["bare", "a100", "h100"]
    assert len(passed(configured(plugin), candidates)) == 4
    assert passed(configured(plugin, {"matchLabels": {"gpu": "b200"}}), candidates) == []
    assert passed(by_gpu, []) == []


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"validValues": ["a"]}, ["a"]),
        ({"validValues": ["a", "b"]}, ["a", "b"]),
        ({"validValues": ["a"], "allowsNoLabel": True}, ["a", "bare"]),
        ({"allowsNoLabel": True}, ["bare"]),
        ({"validValues": [""]}, ["blank"]),
        ({"validValues": ["z"]}, []),
    ],
)
def test_by_label_passes_the_listed_values(parameters: dict[str, Any], expected: list[str]) -> None:
    candidates = [
        placed("a", {"k": "a"}),
        placed("b", {"k": "b"}),
        placed("bare", {"other": "a"}),
        placed("blank", {"k": ""}),
    ]
    assert passed(configured("by-label", {"label": "k", **parameters}), candidates) == expected


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ("decode-filter", {"decode", "prefill-decode", "both", "encode-prefill-decode", "bare"}),
        (
            "prefill-filter",
            {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"},
        ),
        ("encode-filter", {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_a_role_filter_passes_the_endpoints_that_can_run_its_stage(
    plugin: str, expected: set[str]
) -> None:
    candidates = [placed(role or "blank", {"llm-d.ai/role": role}) for role in ROLES]
    candidates.append(placed("bare", {"app": "llm"}))
    assert set(passed(configured(plugin), candidates)) == expected
