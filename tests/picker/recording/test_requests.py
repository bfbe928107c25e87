"""Privacy of recorded requests: plain text and digests."""

import tracemalloc

from picker.recording.requests import Digests, HeaderPrivacy, bounded, private_features, readable
from picker.types import Endpoint, MultiModalFeature

LONG = 100_000
POD = Endpoint("pod-1", "10.0.0.7", 8000, labels={"tier": "gold"})


def privacy() -> HeaderPrivacy:
    made = HeaderPrivacy(Digests(b"key"))
    made.know_endpoints([POD])
    made.know_names(["fast"])
    return made


def test_credentials_are_always_digests() -> None:
    recorded = privacy().of({"authorization": "Bearer abc", "cookie": "gold", "x-api-key": "fast"})
    assert all(value.startswith("digest:") for value in recorded.values())


def test_equal_values_have_equal_digests_within_one_run() -> None:
    one = privacy()
    first, second = one.of({"x-session-id": "s1"}), one.of({"x-session-id": "s1"})
    assert first == second
    assert one.of({"x-session-id": "s2"}) != first
    assert one.of({"other-header": "s1"})["other-header"] == first["x-session-id"]
    assert Digests().of("s1") != Digests().of("s1")
    assert one.of({"x-session-id": "  "}) == {"x-session-id": "  "}


def test_digests_of_long_values_are_not_cached() -> None:
    """A client may send thousands of salts of a megabyte each."""
    tracemalloc.start()
    try:
        digests = Digests(b"key")
        made = {digests.of(f"{number}" * LONG) for number in range(10, 30)}
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == 20
    assert used < LONG
    assert digests.of("10" * LONG) in made


def test_public_values_and_headers_of_decisions_are_plain_text() -> None:
    plain = {
        "x-tier": "gold",
        "x-profile": " fast ",
        "test-epp-endpoint-selection": "10.0.0.7,10.0.0.7",
        "x-session-token": "ZGVmYXVsdC9wb2QtMQ==",
        "x-slo-ttft-ms": "250",
        "x-llm-d-inference-fairness-id": "tenant",
        ":method": "POST",
        "prefer": "if-available",
    }
    assert privacy().of(plain) == plain
    assert privacy().of({":path": "/v1/completions?key=abc"}) == {":path": "/v1/completions"}


def test_the_labels_of_an_endpoint_that_left_are_not_public() -> None:
    made = privacy()
    made.know_endpoints([], [POD])
    assert made.of({"x-tier": "gold"})["x-tier"].startswith("digest:")


def test_hashes_of_media_are_digests() -> None:
    """Hashes could be looked up, and offsets must fit the range of JSON readers."""
    item = MultiModalFeature("image", "0123abcd", 2**70, 4)
    ((recorded,),) = private_features(((item,),), Digests(b"key"))
    assert recorded.content_hash.startswith("digest:")
    assert (recorded.modality, recorded.offset, recorded.length) == ("image", 2**62, 4)
    ((again,),) = private_features(((item,),), Digests(b"key"))
    assert again == recorded


def test_lone_surrogates_are_replaced() -> None:
    assert readable("a\ud800b") == "a?b"
    assert readable("häuser") == "häuser"
    assert bounded(-(2**70)) == -(2**62)
