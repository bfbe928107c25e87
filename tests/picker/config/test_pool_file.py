"""Endpoints, objectives and rewrites of one file; invalid entries are skipped and reported."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from picker.config.findings import MAX_FINDINGS, Severity
from picker.config.pool_file import PoolFile, read_policies, read_pool_file
from picker.errors import ConfigError
from picker.pool.endpoints_file import MAX_FILE_BYTES
from picker.pool.policies import Objective, RewriteRule, RewriteTarget, RuleSet

API = "llm-d.ai/v1alpha2"
ENDPOINTS = "endpoints: [{name: a, address: 10.0.0.1, port: 8000}]\n"
POOL = {"poolRef": {"name": "pool"}}
TARGETS = [{"modelRewrite": "t"}]


def read(*documents: str | dict[str, Any]) -> PoolFile:
    texts = [one if isinstance(one, str) else yaml.safe_dump(one) for one in documents]
    return read_pool_file("---\n".join([ENDPOINTS, *texts]).encode(), "f", "pool")


def objective(name: str = "o", spec: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    head = {"apiVersion": API, "kind": "InferenceObjective", "metadata": {"name": name}}
    return head | {"spec": POOL | {"priority": 1} if spec is None else spec} | others


def rewrite(*rules: dict[str, Any], name: str = "r", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "InferenceModelRewrite",
        "metadata": {"name": name, **metadata},
        "spec": POOL | {"rules": list(rules)},
    }


def rule(*models: str, targets: Sequence[dict[str, Any]] = TARGETS) -> dict[str, Any]:
    matches = [{"model": {"value": model}} for model in models]
    return {"matches": matches, "targets": list(targets)} if models else {"targets": list(targets)}


def lines_of(found: PoolFile, severity: Severity) -> list[str]:
    return [str(one) for one in found.findings if one.severity is severity]


def test_a_file_may_have_documents_of_every_kind() -> None:
    text = """\
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: critical, creationTimestamp: 2026-01-01T00:00:00Z, labels: {a: b}}
spec:
  poolRef: {name: pool}
  priority: 100
---
endpoints: [{name: a, address: 10.0.0.1, port: 8000}]
---
---
{"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": [
  {"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceModelRewrite",
   "metadata": {"name": "canary", "namespace": "prod",
                "creationTimestamp": "1970-01-01T00:00:09Z"},
   "spec": {"poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool",
                        "name": "pool"},
            "rules": [{"matches": [{"model": {"type": "Exact", "value": "m"}},
                                   {"model": {"value": "n"}}],
                       "targets": [{"modelRewrite": "v1", "weight": 1},
                                   {"modelRewrite": "v2", "weight": 1000000}]},
                      {"targets": [{"modelRewrite": "v1"}]}]}},
  {"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": "batch"},
   "spec": {"poolRef": {"name": "pool"}, "priority": -1}}]}
"""
    found = read_pool_file(text.encode(), "f", "pool")
    assert found.findings == ()
    assert [one.key for one in found.contents.endpoints] == ["default/a"]
    assert found.contents.rules == RuleSet(
        (Objective("critical", 100), Objective("batch", -1)),
        (
            RewriteRule(
                "canary",
                (RewriteTarget("v1", 1), RewriteTarget("v2", 1_000_000)),
                frozenset({"m", "n"}),
                created_at_seconds=9.0,
            ),
            RewriteRule("canary", (RewriteTarget("v1"),), created_at_seconds=9.0, position=1),
        ),
    )


@pytest.mark.parametrize(
    "document",
    [
        objective(spec=POOL | {"priority": 2**31 - 1}),
        objective(spec=POOL | {"priority": -(2**31)}),
        objective(spec=POOL | {"priority": 0}),
        objective(spec=POOL | {"priority": 1.0}),
        objective(spec=POOL | {"priority": None}),
        objective(spec=POOL),
        objective(spec={"poolRef": {"name": "pool", "group": None, "kind": None}}),
        objective("a.b-c"),
        objective("x" * 253),
        objective(status={}),
        objective(status={"conditions": []}),
        objective(
            status={
                "conditions": [
                    {
                        "type": "Ready",
                        "status": "Unknown",
                        "reason": "Pending",
                        "message": "Waiting for controller",
                        "lastTransitionTime": "1970-01-01T00:00:00Z",
                    }
                ]
                * 8
            }
        ),
        objective(
            metadata={
                "name": "o",
                "namespace": "n",
                "uid": "u",
                "generation": 2,
                "resourceVersion": "7",
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
                "managedFields": [{"manager": "kubectl"}],
            }
        ),
        rewrite(rule()),
        rewrite(rule("m")),
        rewrite({"matches": [], "targets": TARGETS}),
        rewrite({"matches": None, "targets": TARGETS}),
        rewrite({"matches": [{"model": {"type": None, "value": "m"}}], "targets": TARGETS}),
        rewrite(rule(targets=[{"modelRewrite": "t", "weight": 1}])),
        rewrite(rule(targets=[{"modelRewrite": "t", "weight": 1_000_000}])),
        rewrite(rule(targets=[{"modelRewrite": "t", "weight": None}])),
        rewrite(*(rule(f"m{n}") for n in range(20)), rule()),
    ],
)
def test_a_valid_object_is_accepted(document: dict[str, Any]) -> None:
    found = read(document)
    assert found.findings == ()
    rules = found.contents.rules
    assert len(rules.objectives) + len({one.name for one in rules.rewrites}) == 1


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (objective(spec=POOL | {"priority": 2**31}), "spec.priority: InferenceObjective 'o': "),
        (
            objective(spec=POOL | {"priority": -(2**31) - 1}),
            "expected a whole number from -2147483648 to 2147483647, got -2147483649",
        ),
        (
            objective(spec=POOL | {"priority": 10**30}),
            "expected a whole number from -2147483648 to 2147483647, got 1e+30",
        ),
        (objective(spec=POOL | {"priority": "1"}), "expected a whole number, got a string"),
        (objective(spec=POOL | {"priority": 1.5}), "expected a whole number"),
        (objective(spec=POOL | {"priority": True}), "expected a whole number, got true or false"),
        (objective(spec=POOL | {"prioritty": 1}), "unknown key; did you mean 'priority'?"),
        (objective(spec={"priority": 1}), "the key 'poolRef' is missing"),
        (objective(spec={"poolRef": {}}), "spec.poolRef: InferenceObjective 'o': the key 'name'"),
        (objective(spec={"poolRef": {"name": ""}}), "must not be empty"),
        (objective(spec={"poolRef": {"name": "pool", "group": "A_"}}), "spec.poolRef.group"),
        (objective(spec={"poolRef": {"name": "pool", "kind": "9x"}}), "spec.poolRef.kind"),
        (objective(spec={"poolRef": "pool"}), "expected a mapping, got a string"),
        (objective(spec=None, metadata={}), "metadata: the key 'name' is missing"),
        (objective("Bad_Name"), "metadata.name: InferenceObjective 'Bad_Name': expected a string"),
        (objective("o\n"), r"metadata.name: InferenceObjective 'o\n': expected a string"),
        (objective(metadata={"name": "o", "namespace": "n\n"}), "metadata.namespace: "),
        (objective(spec={"poolRef": {"name": "pool", "kind": "K\n"}}), "spec.poolRef.kind"),
        (objective("x" * 254), "expected a string of length <= 253"),
        (objective(metadata={"name": "o", "nam": 1}), "metadata.nam: "),
        (objective(metadata={"name": "o", "creationTimestamp": "now"}), "creationTimestamp"),
        (objective(metadata={"name": "o", "creationTimestamp": "2026-01-01T00:00:00"}), "timezone"),
        (objective(extra=1), "extra: InferenceObjective 'o': unknown key"),
        (objective(apiVersion="v1"), "'v1' is unknown; allowed: llm-d.ai/v1alpha2"),
        (objective(apiVersion=None), "the key 'apiVersion' is missing"),
        (objective(kind="InferenceObjectiv"), "is unknown; did you mean 'InferenceObjective'?"),
        (objective(kind="Deployment"), "the kind 'Deployment' is unknown; allowed: Inference"),
        (objective(kind=["List"]), "expected an object with a known kind"),
        (objective(kind=7), "expected an object with a known kind"),
        (rewrite({"targets": []}), "spec.rules[0].targets: InferenceModelRewrite 'r': expected"),
        (rewrite(rule(targets=[{}])), "the key 'modelRewrite' is missing"),
        (
            rewrite(rule(targets=[{"modelRewrite": "t", "weight": 0}])),
            "expected a whole number >= 1",
        ),
        (rewrite(rule(targets=[{"modelRewrite": "t", "weight": 1_000_001}])), "<= 1000000"),
        (rewrite(rule(targets=[{"modelRewrite": "t", "split": 1}])), "targets[0].split"),
        (
            rewrite(rule("")),
            "spec.rules[0].matches[0].model.value: InferenceModelRewrite 'r': must",
        ),
        (rewrite({"matches": [{}], "targets": TARGETS}), "the key 'model' is missing"),
        (rewrite({"matches": [{"model": None}], "targets": TARGETS}), "the key 'model' is missing"),
        (
            rewrite({"matches": [{"model": {"type": "Regex", "value": "m"}}], "targets": TARGETS}),
            "'Regex'; allowed: Exact",
        ),
        (rewrite() | {"spec": POOL}, "spec: InferenceModelRewrite 'r': the key 'rules' is missing"),
        (rewrite() | {"spec": POOL | {"rules": {}}}, "expected a list, got a mapping"),
    ],
)
def test_an_invalid_object_is_skipped_and_reported(document: dict[str, Any], error: str) -> None:
    found = read(document, objective("good"))
    assert [one.name for one in found.contents.rules.objectives] == ["good"]
    assert found.contents.rules.rewrites == ()
    assert len(found.contents.endpoints) == 1
    errors = lines_of(found, Severity.ERROR)
    assert any(error in line for line in errors), errors
    assert all(line.startswith("f:") for line in errors)
    assert found.contents.num_skipped == 1
    assert found.contents.skipped == tuple(errors)


def test_an_error_has_its_line_its_object_and_a_fix() -> None:
    text = f"""\
{ENDPOINTS}---
apiVersion: {API}
kind: InferenceObjective
metadata: {{name: critical}}
spec:
  poolRef: {{name: pool}}
  priorty: 100
"""
    (error,) = lines_of(read_pool_file(text.encode(), "/etc/e.yaml", "pool"), Severity.ERROR)
    assert error == (
        "/etc/e.yaml:8:3: spec.priorty: InferenceObjective 'critical': unknown key; "
        "did you mean 'priority'?"
    )


@pytest.mark.parametrize(
    ("document", "warning", "counts"),
    [
        (
            objective(apiVersion="inference.networking.x-k8s.io/v1alpha2"),
            "is deprecated, use",
            True,
        ),
        (
            rewrite({"split": TARGETS}) | {"apiVersion": "inference.networking.x-k8s.io/v1alpha2"},
            "is deprecated, use",
            True,
        ),
        (objective(spec={"poolRef": {"name": "other"}}), "is for the InferencePool 'other'", False),
        (
            objective(spec={"poolRef": {"name": "pool", "group": "inference.networking.x-k8s.io"}}),
            "of inference.networking.x-k8s.io, not for this picker's 'pool'",
            False,
        ),
        (objective(spec={"poolRef": {"name": "pool", "kind": "Service"}}), "the Service", False),
        (rewrite(), "spec.rules: InferenceModelRewrite 'r': there are none", False),
        (rewrite({}, rule()), "spec.rules[0]: InferenceModelRewrite 'r': there are no", True),
        (
            rewrite(rule(targets=[{"modelRewrite": "t", "weight": 1}, {"modelRewrite": "u"}])),
            "spec.rules[0].targets[1]: InferenceModelRewrite 'r': is never drawn",
            True,
        ),
        (rewrite(rule(targets=[{"modelRewrite": ""}])), "is empty, so requests", True),
        (rewrite(rule("m", "n"), rule("n")), "spec.rules[1]: InferenceModelRewrite 'r': no", True),
        (rewrite(rule(), rule()), "spec.rules[1]: InferenceModelRewrite 'r': no request", True),
    ],
)
def test_a_doubtful_object_causes_a_warning(
    document: dict[str, Any], warning: str, counts: bool
) -> None:
    found = read(document)
    (line,) = lines_of(found, Severity.WARNING)
    assert warning in line
    assert lines_of(found, Severity.ERROR) == []
    assert found.contents.num_skipped == 0
    assert bool(found.contents.rules.objectives or found.contents.rules.rewrites) is counts
    assert found.contents.remarks == (line,)


def test_the_first_of_two_objects_with_one_name_counts() -> None:
    """Namespaces distinguish rewrites, but not objectives, which requests name without one."""
    found = read(
        objective("o", POOL | {"priority": 5}),
        objective(metadata={"name": "o", "namespace": "elsewhere"}),
        rewrite(rule("m")),
        rewrite(rule("n")),
        rewrite(rule("o"), namespace="elsewhere"),
    )
    assert found.contents.rules.objectives == (Objective("o", 5),)
    assert [one.models for one in found.contents.rules.rewrites] == [{"m"}, {"o"}]
    assert [line.split(": ", 3)[2:] for line in lines_of(found, Severity.ERROR)] == [
        ["InferenceObjective 'o'", "the name is already taken by an earlier one"],
        ["InferenceModelRewrite 'r'", "the name is already taken by an earlier one"],
    ]


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ("items: [5]", "items[0].kind: expected an object with a known kind"),
        ("items: [{kind: List, items: []}]", "items[0].kind: the kind 'List' is unknown"),
        ("items: {}", "items: expected a list, got a mapping"),
        ("item: []", "item: unknown key; did you mean 'items'?"),
        ("items: []\nmetadata: []", "metadata: expected a mapping"),
    ],
)
def test_an_error_in_a_list_is_reported(items: str, error: str) -> None:
    found = read(f"apiVersion: v1\nkind: List\n{items}\n", objective())
    assert any(error in line for line in lines_of(found, Severity.ERROR))
    assert len(found.contents.rules.objectives) == 1


def test_only_the_invalid_items_of_a_list_are_skipped() -> None:
    items = [objective("a"), objective("b", {}), objective("c")]
    found = read({"apiVersion": "v1", "kind": "List", "items": items})
    assert [one.name for one in found.contents.rules.objectives] == ["a", "c"]
    (error,) = lines_of(found, Severity.ERROR)
    assert "items[1].spec: InferenceObjective 'b': the key 'poolRef' is missing" in error


def test_endpoints_with_one_address_cause_a_warning_with_both_names() -> None:
    entries = "".join(
        f"- {{name: {name}, address: '{address}', port: {port}}}\n"
        for name, address, port in (
            ("a", "10.0.0.1", 8000),
            ("b", "10.0.0.1", 8001),
            ("c", "fd00::1", 8000),
            ("d", "fd00:0::1", 8000),
            ("e", "10.0.0.1", 8000),
        )
    )
    found = read_pool_file(f"endpoints:\n{entries}".encode(), "f", "pool")
    assert len(found.contents.endpoints) == 5
    assert [one.partition("'default/")[2] for one in lines_of(found, Severity.WARNING)] == [
        "d' and 'default/c' have the same address [fd00::1]:8000: one server counts as two",
        "e' and 'default/a' have the same address 10.0.0.1:8000: one server counts as two",
    ]


def test_a_duplicate_key_is_an_error() -> None:
    text = f"apiVersion: {API}\nkind: InferenceObjective\nkind: InferenceObjective\n"
    found = read(text, objective("good"))
    (error,) = lines_of(found, Severity.ERROR)
    assert error == "f:5:1: kind: duplicate key, first in line 4"
    assert len(found.contents.rules.objectives) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "f: expected a mapping with a list under the key 'endpoints'"),
        ("---\n---\n", "f: expected a mapping with a list"),
        ("[]", "f:1:1: expected a mapping with a list under the key 'endpoints'"),
        ("text", "f:1:1: expected a mapping with a list"),
        (f"{ENDPOINTS}---\nendpoint: []", "f:3:1: expected a mapping with a list"),
        (f"{ENDPOINTS}---\n{ENDPOINTS}", "f:3:1: a second list of endpoints"),
        (f"{ENDPOINTS}---\nkind: [", "not valid YAML"),
        (f"{ENDPOINTS}---\nkind: &a [*a]", "an alias contains itself"),
        (json.dumps(objective()), "f: no document lists endpoints; for a pool without any write"),
        ("\udc80", "not valid YAML"),
        ("kind: " + "[" * 9000 + "]" * 9000, "f: the file is nested too deeply"),
        ("#" * (MAX_FILE_BYTES + 1), "the file is larger than 1048576 bytes"),
    ],
)
def test_an_unusable_file_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_pool_file(text.encode(errors="surrogateescape"), "f", "pool")
    assert reason in str(error.value)


def test_aliases_cannot_expand_an_object_beyond_the_limit() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    text = f"{ENDPOINTS}---\nkind: InferenceObjective\nl0: &l0 [x]\n{levels}"
    with pytest.raises(ConfigError, match="aliases make more than 200000 values of it"):
        read_pool_file(text.encode(), "f", "pool")


def test_the_number_of_findings_is_limited() -> None:
    text = f"endpoints: [{'5, ' * 300}]\n" + f"---\nkind: InferenceObjective\nx: {'y' * 900}\n" * 99
    found = read_pool_file(text.encode(), "f", "pool")
    assert found.contents.num_skipped == 399
    assert len(found.findings) == MAX_FINDINGS + 1
    assert found.findings[-1].message == "there are further findings, which are not listed"
    assert max(len(str(one)) for one in found.findings) < 300


def test_a_file_of_policies_lists_no_endpoints() -> None:
    text = yaml.safe_dump_all([objective("a"), rewrite(rule())])
    found = read_policies(text.encode(), "f", "pool")
    assert [one.name for one in found.contents.rules.objectives] == ["a"]
    assert read_policies(b"", "f", "pool").contents.rules == RuleSet()
    for wrong in (ENDPOINTS, "x: 1", "[]"):
        with pytest.raises(ConfigError, match="f:1:1: expected objects with a kind: Inference"):
            read_policies(wrong.encode(), "f", "pool")


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
    assert lines_of(found, Severity.ERROR) == [
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
    found = read("!!set {kind, metadata}\n", objective())
    assert lines_of(found, Severity.ERROR) == ["f:3:1: expected a mapping, got set"]
    assert len(found.contents.rules.objectives) == 1
