"""`kv_transfer_params`: what is asked, what is answered, and what is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from worker.api.schema.kv_transfer import kv_transfer, kv_transfer_answer
from worker.errors import RequestError
from worker.types import KvOffer, KvSource

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


def asked(given: Any, role: str | None = "kv_both", streams: bool = False, prompts: int = 1) -> Any:
    return kv_transfer(given, role, streams=streams, num_prompts=prompts)


def test_the_answer_to_a_prefill_is_what_a_decode_is_sent() -> None:
    """With vLLM's names; block ids are in a list for each group of layers, of which we have one."""
    assert asked(PREFILL) == (True, None)
    assert asked(DECODE, streams=True) == (False, SOURCE)
    assert DECODE["remote_block_ids"] == [[4, 2, 9]]
    assert (DECODE["do_remote_prefill"], DECODE["do_remote_decode"]) == (True, False)


def test_what_others_add_is_theirs() -> None:
    """Fields of another engine's connector; numbers as floats."""
    more = {**DECODE, "remote_port": 14579.0, "dcp_size": 1, "transfer_id": "x"}
    assert asked(more) == (False, SOURCE)


@pytest.mark.parametrize("given", [None, {}, {"do_remote_decode": False}])
def test_nothing_asked_is_nothing_done(given: Any) -> None:
    assert asked(given) == (False, None)


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
        ({**DECODE, "remote_num_tokens": None}, {}, ".remote_num_tokens", "how many tokens"),
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
