"""`kv_transfer_params`: what is asked, what is answered, and what is refused in one sentence."""

import re
from typing import Any

import pytest

from worker.api.schema.kv_transfer import (
    KvPeerFields,
    KvTransfer,
    kv_peer,
    kv_peer_answer,
    kv_transfer,
    kv_transfer_answer,
)
from worker.api.schema.requests import CompletionRequest
from worker.config import KvAddress
from worker.errors import RequestError
from worker.types import KvOffer, KvPeer, KvSource

SOURCE = KvSource("10.0.0.1", 14579, "e", "r-1", 33)
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DECODE = kv_transfer_answer(KvOffer(SOURCE, (4, 2, 9), 1e9))


def asked(
    given: Any, role: str | None = "kv_both", streams: bool = False, prompts: int = 1, **more: Any
) -> Any:
    request = CompletionRequest(prompt="", kv_transfer_params=given, stream=streams, **more)
    return kv_transfer(request, role, [33] * prompts)


def test_the_answer_to_a_prefill_is_what_a_decode_is_sent() -> None:
    assert asked(PREFILL) == KvTransfer(keeps=True)
    assert asked(DECODE, streams=True) == KvTransfer(source=SOURCE)
    assert DECODE["remote_block_ids"] == [[4, 2, 9]]
    assert (DECODE["do_remote_prefill"], DECODE["do_remote_decode"]) == (True, False)


def test_fields_of_other_connectors_are_ignored() -> None:
    more = {**DECODE, "remote_port": 14579.0, "dcp_size": 1, "transfer_id": "x"}
    assert asked(more) == KvTransfer(source=SOURCE)


@pytest.mark.parametrize("given", [None, {}, {"do_remote_decode": False}])
def test_nothing_asked_is_nothing_done(given: Any) -> None:
    assert asked(given) == KvTransfer()


@pytest.mark.parametrize(
    ("given", "how", "field", "message"),
    [
        (PREFILL, {"role": None}, "", "--kv-transfer-config"),
        (PREFILL, {"role": "kv_consumer"}, ".do_remote_decode", "kv_producer or kv_both"),
        (DECODE, {"role": "kv_producer"}, ".do_remote_prefill", "kv_consumer or kv_both"),
        (PREFILL, {"streams": True}, ".do_remote_decode", "stream false"),
        (PREFILL, {"prompts": 2}, "", "one prompt"),
        ({**DECODE, "do_remote_decode": True}, {}, "", "one request does one"),
        ({"a": 1}, {}, "", "asks for nothing"),
        ({**DECODE, "remote_port": 0}, {}, ".remote_port", "[1, 65535], got 0"),
        ({**DECODE, "remote_port": "x"}, {}, "", "remote_port"),
        ({**DECODE, "remote_num_tokens": None}, {}, ".remote_num_tokens", "number of tokens"),
        ({**DECODE, "remote_host": None}, {}, ".remote_host", "printable"),
        ({**DECODE, "remote_host": "a\nb"}, {}, ".remote_host", "printable"),
        ({**DECODE, "remote_engine_id": ""}, {}, ".remote_engine_id", "printable"),
        ({**DECODE, "remote_request_id": "x" * 513}, {}, ".remote_request_id", "512"),
    ],
)
def test_each_mistake_is_named(given: Any, how: Any, field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(given, **how)
    assert caught.value.param == f"kv_transfer_params{field}"
    assert message in caught.value.message
    assert caught.value.status == 400


ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 7, "bootstrap_room": 5}


def test_both_workers_are_sent_to_the_same_room() -> None:
    stored = asked(None, "kv_producer", streams=True, **ROOM)
    taken = asked(None, "kv_consumer", streams=True, **ROOM).source
    assert stored == KvTransfer(keeps=True, name="room 5")
    assert taken == KvSource("10.0.0.1", 7, None, "room 5", 33)
    default = asked(None, "kv_consumer", **{**ROOM, "bootstrap_port": None}).source
    assert default.port == 8998


@pytest.mark.parametrize(
    ("change", "how", "field", "message"),
    [
        ({}, {"role": None}, "bootstrap_room", "--kv-transfer-config"),
        ({}, {"role": "kv_both"}, "bootstrap_room", "kv_producer, where the prompt is run"),
        ({}, {"prompts": 2}, "bootstrap_room", "one prompt"),
        ({}, {"given": PREFILL}, "bootstrap_room", "does not go with kv_transfer_params"),
        ({"bootstrap_room": -1}, {}, "bootstrap_room", "in [0, 2^63), got -1"),
        ({"bootstrap_port": 0}, {}, "bootstrap_port", "in [1, 65535], got 0"),
        ({"bootstrap_host": None}, {}, "bootstrap_host", "printable characters"),
    ],
)
def test_a_wrong_room_is_refused_by_name(change: Any, how: Any, field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**{"given": None, "role": "kv_consumer", **ROOM, **change, **how})
    assert caught.value.param == field
    assert message in caught.value.message


HERE = KvAddress("10.0.0.1", 14579, 8000)
PULLS = {"remote_kv_source": {"remote_host": "10.0.0.2", "remote_port": 7777, "kv_request_id": "r"}}


def peer(
    resumed: Any = None,
    given: Any = None,
    header: str | None = None,
    role: str | None = "kv_both",
    address: KvAddress | None = HERE,
) -> KvPeer | None:
    fields = None if resumed is None else KvPeerFields(**resumed)
    return kv_peer(fields, given, header, role, address)


def test_the_most_specific_source_of_kv_wins() -> None:
    resumed = {"remote_host": "10.0.0.3", "remote_port": 5, "kv_request_id": "s"}
    assert peer(resumed, PULLS, "10.0.0.4:8001") == KvPeer("10.0.0.3", 5, "s")
    assert peer(None, PULLS, "10.0.0.4:8001") == KvPeer("10.0.0.2", 7777, "r")
    assert peer(None, PREFILL, "10.0.0.4:8001") == KvPeer("10.0.0.4", 14580)
    elsewhere = KvAddress("10.0.0.1", 14579, 8200, 14579)
    assert peer(header="[fd00::1]:8000", address=elsewhere) == KvPeer("fd00::1", 14579)
    assert peer(header="") is None
    assert asked(PULLS) == KvTransfer()


@pytest.mark.parametrize(("role", "address"), [(None, None), ("kv_producer", HERE)])
def test_a_worker_that_takes_no_kv_asks_no_peer(
    role: str | None, address: KvAddress | None
) -> None:
    assert peer({"remote_host": "x"}, None, "x", role, address) is None


def test_a_worker_says_how_it_is_asked_if_it_gives() -> None:
    said = kv_peer_answer("r-0", "kv_producer", HERE)
    assert peer(said) == KvPeer("10.0.0.1", 14579, "r-0")
    assert kv_peer_answer("r-0", "kv_consumer", HERE) is kv_peer_answer("r-0", None, None) is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        *(
            ({"header": text}, "x-kv-cache-source-host-port must be the IP")
            for text in ("host:80", "10.0.0.1", "10.0.0.1:80@x", "[::1%x]:80")
        ),
        *(
            ({"header": f"10.0.0.1:{port}"}, "x-kv-cache-source-host-port must be the IP")
            for port in (0, 65536)
        ),
        ({"resumed": {"remote_host": "host", "remote_port": 1}}, "resume.kv.remote_host"),
        ({"resumed": {"remote_host": "10.0.0.1"}}, "resume.kv.remote_port"),
        (
            {"resumed": {"remote_host": "::1", "remote_port": 1, "kv_request_id": "a\n"}},
            "resume.kv.kv_request_id",
        ),
        ({"given": {"remote_kv_source": {}}}, "kv_transfer_params.remote_kv_source.remote_host"),
    ],
)
def test_a_peer_that_is_none_is_refused(how: Any, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        peer(**how)
