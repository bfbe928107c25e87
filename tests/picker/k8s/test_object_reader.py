"""Objects are read as those of one pool in one namespace, and as nothing else's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from picker.k8s.object_map import MalformedObjectError
from picker.k8s.object_reader import ObjectReader, PoolName

GROUP = "inference.networking.k8s.io"
POOL = PoolName("pool", "ours", GROUP)


class Errors:
    """A counter."""

    def __init__(self) -> None:
        self.count = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count more."""
        self.count += amount


@pytest.fixture
def reader() -> ObjectReader:
    """Reads what is about the pool."""
    return ObjectReader(POOL, Errors())


def raw(namespace: str, name: str = "pool", **rest: Any) -> msgspec.Raw:
    """An object of a namespace."""
    metadata = {"name": name, "namespace": namespace, "uid": "u", "resourceVersion": "1"}
    metadata |= rest.pop("metadata", {})
    return msgspec.Raw(msgspec.json.encode({"metadata": metadata, **rest}))


def pool_in(namespace: str) -> msgspec.Raw:
    """An InferencePool."""
    spec = {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}]}
    return raw(namespace, apiVersion=f"{GROUP}/v1", kind="InferencePool", spec=spec)


def test_a_namesake_in_another_namespace_is_another_pool(reader: ObjectReader) -> None:
    """Whatever path it came by."""
    assert reader.read_pool(pool_in("ours")) is not None
    assert reader.read_pool(pool_in("theirs")) is None


def test_objectives_and_rewrites_of_another_namespace_do_not_count(reader: ObjectReader) -> None:
    """Though they name a pool of the same name."""
    spec = {"poolRef": {"name": "pool"}, "priority": 3}
    version, kind = "llm-d.ai/v1alpha2", "InferenceObjective"
    for namespace, counts in (("ours", True), ("theirs", False)):
        given = raw(namespace, "high", apiVersion=version, kind=kind, spec=spec)
        assert (reader.read_objective(given) is not None) is counts
    spec = {"poolRef": {"name": "pool"}, "rules": [{"targets": [{"modelRewrite": "m"}]}]}
    kind = "InferenceModelRewrite"
    for namespace, counts in (("ours", True), ("theirs", False)):
        given = raw(namespace, "r", apiVersion=version, kind=kind, spec=spec)
        assert (reader.read_rewrite(given) is not None) is counts


def test_pods_of_another_namespace_do_not_count(reader: ObjectReader) -> None:
    """They are nobody's here."""
    assert reader.read_pod(raw("ours", "a")) is not None
    assert reader.read_pod(raw("theirs", "a")) is None


@pytest.mark.parametrize(
    ("metadata", "keeps"), [({}, True), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False)]
)
def test_a_malformed_pod_is_trusted_until_it_is_deleted(
    reader: ObjectReader, metadata: dict[str, str], keeps: bool
) -> None:
    """What it said last stays but for a deletion, which counts whatever else is wrong."""
    given = raw("ours", "a", metadata=metadata, status={"podIP": "nowhere"})
    with pytest.raises(MalformedObjectError) as raised:
        reader.read_pod(given)
    assert raised.value.keep_last_good is keeps
