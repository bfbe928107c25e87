"""mm-embeddings-cache-producer: an endpoint has encoded the items that it was sent."""

import pytest

from picker.contrib.mm_embeddings import MmEmbeddingsCacheParameters, MmEmbeddingsCacheProducer
from picker.framework.attributes import Attributes, EncoderMatch, encoder_matches_key
from picker.types import Candidate, InferenceRequest, MultiModalFeature
from tests.support.picker.plugin_scenes import candidate, configured, decided, request_for, scores

NAME = "mm-embeddings-cache-producer"


def request_with(items: str) -> InferenceRequest:
    features = tuple(MultiModalFeature("image", item, 0, 225) for item in items)
    return request_for(features=(features,))


POOL = [candidate(name) for name in "abc"]


def _found(
    producer: MmEmbeddingsCacheProducer, request: InferenceRequest, pool: list[Candidate]
) -> EncoderMatch | None:
    attributes = Attributes()
    assert producer.produce(request, pool, attributes) is request
    return attributes.get(encoder_matches_key(NAME))


def _send(
    producer: MmEmbeddingsCacheProducer, request: InferenceRequest, *picked: Candidate
) -> None:
    producer.pre_request(request, decided(default=picked), Attributes())


def _producer(megabytes: int = 4096) -> MmEmbeddingsCacheProducer:
    parameters = MmEmbeddingsCacheParameters(cache_size_in_mb_per_server=megabytes)
    return MmEmbeddingsCacheProducer(NAME, parameters)


def test_items_are_found_where_they_were_sent() -> None:
    producer = _producer()
    assert _found(producer, request_with("xyxz"), POOL) == EncoderMatch(3.0, {})
    _send(producer, request_with("xy"), POOL[0], POOL[1])
    _send(producer, request_with("z"), POOL[1])
    kinds = {"default/a": {"image": 2}, "default/b": {"image": 3}}
    expected = EncoderMatch(3.0, {"default/a": 2.0, "default/b": 3.0}, kinds)
    assert _found(producer, request_with("xyxz"), POOL) == expected
    assert _found(producer, request_with("w"), POOL) == EncoderMatch(1.0, {})


def test_a_request_without_items_has_no_match() -> None:
    producer = _producer()
    assert _found(producer, request_with(""), POOL) is None
    _send(producer, request_with(""), POOL[0])
    assert _found(producer, request_with("x"), POOL) == EncoderMatch(1.0, {})


def test_the_memory_of_an_endpoint_is_bounded() -> None:
    producer = _producer(5)
    for items in ("x", "y", "x", "z"):
        _send(producer, request_with(items), POOL[0])
    expected = EncoderMatch(3.0, {"default/a": 2.0}, {"default/a": {"image": 2}})
    assert _found(producer, request_with("xyz"), POOL) == expected
    assert _found(producer, request_with("y"), POOL) == EncoderMatch(1.0, {})


def test_endpoints_that_left_are_forgotten() -> None:
    producer = _producer()
    _send(producer, request_with("x"), POOL[0])
    producer.endpoint_removed("default/a")
    producer.endpoint_removed("default/never")
    assert _found(producer, request_with("x"), POOL) == EncoderMatch(1.0, {})


def test_the_size_is_named_as_in_the_reference() -> None:
    producer = configured(NAME, {"cacheSizeInMBPerServer": 2})
    for items in "xy":
        _send(producer, request_with(items), POOL[0])
    assert producer.remembered(POOL[0].key) == ("y",)


def test_long_hashes_are_remembered_by_their_digests() -> None:
    """Clients may send the hashes themselves."""
    producer = _producer()
    items = tuple(MultiModalFeature("image", letter * 100_000, 0, 1) for letter in "pqr")
    request = request_for(features=(items,))
    _send(producer, request, POOL[0])
    found = _found(producer, request, POOL)
    assert found.matched == {"default/a": 3.0}
    assert sum(map(len, producer.remembered(POOL[0].key))) < 1000


def test_hashes_may_have_lone_surrogates() -> None:
    producer = _producer()
    one, other = (
        request_for(features=((MultiModalFeature("image", half * 500, 0, 1),),))
        for half in ("\ud800", "\ud801")
    )
    _send(producer, one, POOL[0])
    found = _found(producer, one, POOL)
    assert found.matched == {"default/a": 1.0}
    missed = _found(producer, other, POOL)
    assert missed.matched == {}


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        (None, [0.0, 0.0, 0.0]),
        (EncoderMatch(4.0, {"default/a": 1.0, "default/c": 4.0}), [0.25, 0.0, 1.0]),
        (EncoderMatch(0.0, {}), [0.0, 0.0, 0.0]),
    ],
)
def test_mm_embeddings_cache(match: EncoderMatch | None, expected: list[float]) -> None:
    attributes = Attributes({} if match is None else {encoder_matches_key("theirs"): match})
    parameters = {"producerName": "theirs"}
    assert scores("mm-embeddings-cache-scorer", POOL, attributes, parameters) == expected
