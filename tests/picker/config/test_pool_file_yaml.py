"""YAML in endpoints files beyond lists and mappings: duplicates, merges, sets."""

import pytest

from picker.config.findings import Severity
from picker.config.pool_file import PoolFile, read_pool_file
from picker.errors import ConfigError

ENDPOINTS = "endpoints: [{name: a, address: 10.0.0.1, port: 8000}]\n"
OBJECTIVE = """\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: o}
spec: {poolRef: {name: pool}}
"""


def errors(found: PoolFile) -> list[str]:
    return [str(one) for one in found.findings if one.severity is Severity.ERROR]


def test_an_endpoint_with_a_duplicate_key_is_skipped() -> None:
    text = """\
endpoints:
- {name: a, address: 10.0.0.1, port: 80, address: 10.0.0.2}
- {name: b, address: 10.0.0.3, port: 80, labels: {role: x, role: y}}
- &c {name: c, address: 10.0.0.4, port: 80}
- {<<: *c, name: d}
"""
    found = read_pool_file(text.encode(), "f", "pool")
    assert [one.name for one in found.contents.endpoints] == ["c", "d"]
    assert found.contents.num_skipped == 2
    assert errors(found) == [
        "f:2:3: endpoints[0]: 'a': duplicate key 'address' in line 2, first in line 2",
        "f:3:3: endpoints[1]: 'b': duplicate key 'role' in line 3, first in line 3",
    ]


def test_a_second_list_in_one_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="f:2:1: a second list of endpoints"):
        read_pool_file(2 * ENDPOINTS.encode(), "f", "pool")


def test_merged_keys_cannot_expand_an_endpoint_beyond_the_limit() -> None:
    """Here a few hundred bytes expand to half a million keys."""
    lines = ["x0: &x0 {a: 1, b: 1}"]
    for level in range(1, 7):
        merged = ", ".join([f"*x{level - 1}"] * 8)
        lines.append(f"x{level}: &x{level} {{<<: [{merged}]}}")
    text = "\n".join([*lines, "endpoints: [{<<: *x6}]"])
    with pytest.raises(ConfigError, match="aliases make more than 200000 values of it"):
        read_pool_file(text.encode(), "f", "pool")


def test_an_object_that_is_a_yaml_set_is_skipped() -> None:
    documents = (ENDPOINTS, "!!set {kind, metadata}\n", OBJECTIVE)
    found = read_pool_file("---\n".join(documents).encode(), "f", "pool")
    assert errors(found) == ["f:3:1: expected a mapping, got set"]
    assert len(found.contents.rules.objectives) == 1
