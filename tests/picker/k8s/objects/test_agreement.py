"""The reader follows what the definitions take, and nothing else: they cannot drift apart."""

from __future__ import annotations

from typing import Any

from crd_rules import CrdRules
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_objects import (
    LEFT_OUT,
    OBJECTIVE_RULES,
    POOL_RULES,
    REWRITE_RULES,
    legacy_pool,
    objective,
    pool,
    rewrite,
)
from nearly_valid_objects import LEGACY_POOLS, OBJECTIVES, POOLS, REWRITES, nearly

from picker.k8s.objects.definitions import LEGACY_POOL
from picker.k8s.objects.reading import read_policy, read_pool

LEGACY_POOL_RULES = CrdRules(LEGACY_POOL.document())


def is_out_of_schema(spec: dict[str, Any]) -> bool:
    """Whether a pool's reader is stricter than its schema: a selector that is empty, or has a null
    or something else that is no label.
    """
    selector = spec.get("selector")
    if isinstance(selector, dict) and "matchLabels" in selector:
        selector = selector["matchLabels"]
    return isinstance(selector, dict) and (not selector or None in selector.values())


@settings(max_examples=300, deadline=None)
@given(nearly(POOLS))
def test_pools_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    document = pool(**{"selector": LEFT_OUT, "targetPorts": LEFT_OUT} | spec)
    takes = not POOL_RULES.admit(document)[1]
    assert (read_pool(document).value is not None) is (takes and not is_out_of_schema(spec))


@settings(max_examples=150, deadline=None)
@given(nearly(LEGACY_POOLS))
def test_legacy_pools_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    left_out = dict.fromkeys(("selector", "targetPortNumber", "extensionRef"), LEFT_OUT)
    document = legacy_pool(**left_out | spec)
    takes = not LEGACY_POOL_RULES.admit(document)[1]
    assert (read_pool(document).value is not None) is (takes and not is_out_of_schema(spec))


@settings(max_examples=150, deadline=None)
@given(nearly(OBJECTIVES))
def test_objectives_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    document = objective() | {"spec": spec}
    takes = not OBJECTIVE_RULES.admit(document)[1]
    assert (read_policy(document).value is not None) is takes


@settings(max_examples=250, deadline=None)
@given(nearly(REWRITES))
def test_rewrites_are_followed_that_their_schema_takes(spec: dict[str, Any]) -> None:
    """No object is taken by one and refused by the other."""
    document = rewrite() | {"spec": spec}
    takes = not REWRITE_RULES.admit(document)[1]
    assert (read_policy(document).value is not None) is takes


LABEL_VALUE = st.from_regex(r"\A(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?\Z")
DNS_LABEL = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?\Z")


@settings(max_examples=100, deadline=None)
@given(
    selector=st.dictionaries(LABEL_VALUE.filter(bool), LABEL_VALUE, min_size=1, max_size=64),
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=8, unique=True),
    protocol=st.sampled_from(["http", "kubernetes.io/h2c"]),
    picker=st.none() | st.tuples(DNS_LABEL, st.integers(1, 65535)),
)
def test_valid_pools_come_through_unchanged(
    selector: dict[str, str], ports: list[int], protocol: str, picker: tuple[str, int] | None
) -> None:
    """What was said is what is read, and the schema takes it too."""
    reference = None if picker is None else {"name": picker[0], "port": {"number": picker[1]}}
    document = pool(
        selector={"matchLabels": selector},
        targetPorts=[{"number": port} for port in ports],
        appProtocol=protocol,
        endpointPickerRef=reference,
    )
    assert not POOL_RULES.admit(document)[1]
    reading = read_pool(document)
    assert reading.findings == ()
    assert reading.value is not None
    spec = reading.value.spec
    assert dict(spec.selector) == selector
    assert spec.target_ports == tuple(ports)
    assert spec.app_protocol == protocol
    assert (spec.picker and (spec.picker.name, spec.picker.port)) == picker
