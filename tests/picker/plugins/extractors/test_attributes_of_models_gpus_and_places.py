"""Attributes of endpoints: models, GPU load and location."""

from __future__ import annotations

import pytest

from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel, Topology
from picker.scrape.sources import EndpointExtractor, ExtractError, Extraction, Extractor, Scrape
from picker.types import Endpoint
from tests.support.picker.plugin_scenes import configured

POD = Endpoint("pod-rank-1", "10.0.0.1", 8001, rank_index=1)


def models(page: bytes) -> Extraction:
    extractor = configured("models-data-extractor")
    assert isinstance(extractor, Extractor)
    return extractor.extract(Scrape(page, POD, 0.0))


def gpu(page: bytes) -> Extraction:
    extractor = configured("dcgm-extractor")
    assert isinstance(extractor, Extractor)
    return extractor.extract(Scrape(page, POD, 0.0))


def test_models_are_listed_in_order() -> None:
    """Missing values, and values of another type, are empty."""
    page = b"""{"object": "list", "data": [
        {"id": "base", "object": "model", "created": 7, "owned_by": "vllm", "parent": null},
        {"id": "lora", "object": 5, "created": true, "parent": "base"},
        {"object": "model"}, "text"]}"""
    findings = models(page)
    assert findings.metrics is None
    assert findings.attributes[MODELS_ATTRIBUTE] == (
        ServedModel("base", "model", 7, "vllm", ""),
        ServedModel("lora", "", 0, "", "base"),
    )
    assert findings.problems == ("2 models without an id",)


@pytest.mark.parametrize("page", [b"", b"{", b"[]", b"{}", b'{"data": {}}', b"\xff", b"[" * 9999])
def test_another_body_than_a_list_of_models_is_an_error(page: bytes) -> None:
    with pytest.raises(ExtractError, match="list of models"):
        models(page)


def test_the_busiest_gpu_of_the_pod_counts() -> None:
    """Samples without a pod belong to the endpoint as well; impossible values are ignored."""
    page = b"""DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="pod"} 40
DCGM_FI_DEV_GPU_UTIL{gpu="1",pod="other"} 90
DCGM_FI_DEV_GPU_UTIL{gpu="2"} 35
DCGM_FI_DEV_GPU_UTIL{gpu="3"} 4000
DCGM_FI_DEV_GPU_UTIL{gpu="4"} NaN
"""
    assert gpu(page).attributes == {"GPUUtilization/dcgm-extractor": 0.4}


def test_a_page_without_the_pods_gpus_is_an_error() -> None:
    with pytest.raises(ExtractError, match="DCGM_FI_DEV_GPU_UTIL"):
        gpu(b'DCGM_FI_DEV_GPU_UTIL{pod="other"} 90\n')


def topology(endpoint: Endpoint, **parameters: str) -> object:
    extractor = configured("topology-extractor", parameters, "where")
    assert isinstance(extractor, EndpointExtractor)
    return extractor.describe(endpoint)["Topology/where"]


def test_a_location_is_read_from_labels() -> None:
    """By the usual names, or those of the parameters; unknown tiers are empty."""
    labels = {
        "kubernetes.io/hostname": "h",
        "topology.kubernetes.io/rack": "r",
        "topology.kubernetes.io/zone": "z",
        "nvl": "domain",
    }
    endpoint = Endpoint("a", "10.0.0.1", 1, labels=labels)
    assert topology(endpoint) == Topology("h", "r", "z", "")
    assert topology(endpoint, rack="nvl", hostname="none") == Topology("", "domain", "z", "")


def test_the_node_address_replaces_a_missing_hostname() -> None:
    endpoint = Endpoint("a", "10.0.0.1", 1, node_address="10.9.0.1")
    assert topology(endpoint) == Topology("10.9.0.1")
