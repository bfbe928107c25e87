"""Extractors: engines of endpoints and of the configuration, and the models of an endpoint."""

import pytest

from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.scrape.sources import ExtractError, Extraction, Extractor, Scrape
from picker.types import Endpoint
from tests.support.picker.plugin_scenes import configured

PAGE = b"""\
vllm:num_requests_waiting 1
vllm:num_requests_running 1
vllm:kv_cache_usage_perc 0.1
sglang:num_queue_reqs 2
sglang:num_running_reqs 2
sglang:token_usage 0.2
mine_waiting{kind="a"} 3
mine_waiting{kind="b"} 4
mine_info{size="8",count="80"} 1
mine_power 250
their_info{block_size="16",num_gpu_blocks="90",size="8",count="80"} 1
"""
MINE = {
    "name": "mine",
    "queuedRequestsSpec": "mine_waiting{kind=b}",
    "cacheInfoSpec": "mine_info",
    "cacheBlockSizeLabelName": "size",
    "cacheNumBlocksLabelName": "count",
    "customMetrics": [{"attributeKey": "Power", "metricSpec": "mine_power"}],
}


def made(**parameters: object) -> Extractor:
    plugin = configured("core-metrics-extractor", parameters)
    assert isinstance(plugin, Extractor)
    return plugin


def read(extractor: Extractor, **labels: str) -> Extraction:
    renamed = {name.replace("_", "-"): value for name, value in labels.items()}
    engine = renamed.pop("engine", None)
    if engine is not None:
        renamed["llm-d.ai/engine-type"] = engine
    return extractor.extract(Scrape(PAGE, Endpoint("w", "10.0.0.1", 1, labels=renamed), 0.0))


def waiting(findings: Extraction) -> int:
    assert findings.metrics is not None
    return findings.metrics.waiting_requests


def test_the_label_chooses_the_engine() -> None:
    extractor = made()
    assert waiting(read(extractor)) == 1
    assert waiting(read(extractor, engine="sglang")) == 2
    assert waiting(read(extractor, engine="else")) == 1
    assert waiting(read(made(defaultEngine="sglang"))) == 2


def test_the_label_is_configurable() -> None:
    extractor = made(engineLabelKey="runs")
    assert waiting(read(extractor, runs="sglang")) == 2
    assert waiting(read(extractor, engine="sglang")) == 1


def test_a_configured_engine_adds_to_the_built_in_ones() -> None:
    extractor = made(engineConfigs=[MINE])
    findings = read(extractor, engine="mine")
    assert findings.metrics is not None
    assert (findings.metrics.waiting_requests, findings.metrics.running_requests) == (4, None)
    assert (findings.metrics.block_size_tokens, findings.metrics.num_kv_blocks) == (8, 80)
    assert findings.attributes == {"Power/core-metrics-extractor": 250.0}
    assert waiting(read(extractor)) == 1


@pytest.mark.parametrize(
    ("names", "geometry"),
    [
        ({}, (16, 90)),
        ({"cacheBlockSizeLabelName": "size"}, (8, 90)),
        ({"cacheNumBlocksLabelName": "count"}, (16, 80)),
        ({"cacheBlockSizeLabelName": "", "cacheNumBlocksLabelName": "count"}, (16, 80)),
    ],
)
def test_the_labels_of_the_cache_are_those_of_vllm_unless_named(
    names: dict[str, str], geometry: tuple[int, int]
) -> None:
    mine = {
        "name": "mine",
        "queuedRequestsSpec": "mine_waiting",
        "cacheInfoSpec": "their_info",
        **names,
    }
    metrics = read(made(engineConfigs=[mine]), engine="mine").metrics
    assert (metrics.block_size_tokens, metrics.num_kv_blocks) == geometry


def test_a_built_in_engine_can_be_redefined() -> None:
    extractor = made(engineConfigs=[MINE | {"name": "vllm"}])
    assert waiting(read(extractor)) == 4


POD = Endpoint("pod-rank-1", "10.0.0.1", 8001, rank_index=1)


def models(page: bytes) -> Extraction:
    extractor = configured("models-data-extractor")
    assert isinstance(extractor, Extractor)
    return extractor.extract(Scrape(page, POD, 0.0))


def test_models_are_listed_in_order() -> None:
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
