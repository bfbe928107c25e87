"""DCGM: the page of the exporter, and the GPU load of an endpoint."""

import pytest

from picker.scrape.sources import ExtractError, Extraction, Extractor, PageLocation, Scrape
from picker.types import Endpoint
from tests.support.picker.plugin_scenes import configured

POD = Endpoint("pod-rank-1", "10.0.0.1", 8001, rank_index=1)


def gpu(page: bytes) -> Extraction:
    extractor = configured("dcgm-extractor")
    assert isinstance(extractor, Extractor)
    return extractor.extract(Scrape(page, POD, 0.0))


def test_the_busiest_gpu_of_the_pod_counts() -> None:
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


def test_the_exporter_is_at_its_usual_port() -> None:
    assert configured("dcgm-data-source").location == PageLocation("http", "/metrics", 9400)


def test_an_exporter_on_the_node_needs_the_node() -> None:
    where = configured("dcgm-data-source", {"useNodeAddress": True}).location
    assert where.address(Endpoint("a", "10.0.0.1", 1, node_address="10.9.0.1")) == "10.9.0.1:9400"
    assert where.address(Endpoint("a", "10.0.0.1", 1, node_address="fd00::1")) == "[fd00::1]:9400"
    assert where.address(Endpoint("a", "10.0.0.1", 1)) is None
