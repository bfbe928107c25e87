"""What a recording tells of a request, and what it keeps to itself."""

from __future__ import annotations

import tracemalloc

from picker.recording.requests import Digests, HeaderPrivacy, bounded, private_features, readable
from picker.types import Endpoint, MultiModalFeature

LONG = 100_000
POD = Endpoint("pod-1", "10.0.0.7", 8000, labels={"tier": "gold"})


def privacy() -> HeaderPrivacy:
    """With a pool and a profile."""
    made = HeaderPrivacy(Digests(b"key"))
    made.know_endpoints([POD])
    made.know_names(["fast"])
    return made


def test_credentials_are_digests_whatever_their_values() -> None:
    """Also where the value is a word that the pool knows."""
    told = privacy().of({"authorization": "Bearer abc", "cookie": "gold", "x-api-key": "fast"})
    assert all(value.startswith("digest:") for value in told.values())


def test_alike_values_stay_alike_and_others_apart() -> None:
    """Sessions are told apart by digests as well as by ids, within one run only."""
    one = privacy()
    first, second = one.of({"x-session-id": "s1"}), one.of({"x-session-id": "s1"})
    assert first == second
    assert one.of({"x-session-id": "s2"}) != first
    assert one.of({"other-header": "s1"})["other-header"] == first["x-session-id"]
    assert Digests().of("s1") != Digests().of("s1")
    assert one.of({"x-session-id": "  "}) == {"x-session-id": "  "}


def test_long_values_are_not_kept() -> None:
    """A client may send thousands of salts of a megabyte each; their digests are made anew."""
    tracemalloc.start()
    try:
        digests = Digests(b"key")
        made = {digests.of(f"{number}" * LONG) for number in range(10, 30)}
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == 20
    assert kept < LONG
    assert digests.of("10" * LONG) in made


def test_what_decisions_read_and_what_the_pool_says_stands_as_it_is() -> None:
    """Labels, addresses, profiles, tokens of endpoints, objectives; a path without its query."""
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


def test_what_an_endpoint_said_is_forgotten_when_it_leaves() -> None:
    """A label of nobody is a value like any other."""
    made = privacy()
    made.know_endpoints([], [POD])
    assert made.of({"x-tier": "gold"})["x-tier"].startswith("digest:")


def test_contents_of_media_are_told_apart_but_not_told() -> None:
    """Hashes of images could be looked up; offsets beyond all bounds are cut."""
    item = MultiModalFeature("image", "0123abcd", 2**70, 4)
    ((told,),) = private_features(((item,),), Digests(b"key"))
    assert told.content_hash.startswith("digest:")
    assert (told.modality, told.offset, told.length) == ("image", 2**62, 4)
    ((again,),) = private_features(((item,),), Digests(b"key"))
    assert again == told


def test_texts_that_no_file_can_hold_become_readable() -> None:
    """Halves of characters come from JSON of clients."""
    assert readable("a\ud800b") == "a?b"
    assert readable("häuser") == "häuser"
    assert bounded(-(2**70)) == -(2**62)
