"""models-data-extractor: the models that an endpoint serves."""

import pytest

from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.scrape.sources import ExtractError, Extraction, Extractor, Scrape
from picker.types import Endpoint
from tests.support.picker.plugin_scenes import configured

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
