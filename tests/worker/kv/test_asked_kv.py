"""KV asked of the caches of a peer: token for token what one engine says, whatever that does."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.worker.kv_engines import NGRAM, Engine, requests, tokens, until
from tests.support.worker.step_driver import outputs as outputs_of
from worker.engine.messages import AddRequest
from worker.types import KvPeer


def asking(asked: list[AddRequest], peer: KvPeer) -> list[AddRequest]:
    return [msgspec.structs.replace(request, kv_peer=peer) for request in asked]


def num_worth_asking(asked: list[AddRequest]) -> int:
    return sum(len(request.prompt_token_ids) > 4 for request in asked)


@pytest.mark.parametrize(
    ("count", "here", "there"),
    [
        (60, {"overlap": True}, {"overlap": True}),
        (16, {"block_size": 2}, {"block_size": 16}),
        (60, {"block_size": 16}, {"block_size": 4}),
        (16, {"speculative": NGRAM, "chunk": 7}, {"block_size": 8, "chunk": 5}),
        (16, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16}),
    ],
)
def test_kv_of_a_peer_is_not_computed(
    engines: Callable[..., Engine], count: int, here: dict[str, Any], there: dict[str, Any]
) -> None:
    """Less than a block of either size is computed of each prompt."""
    asked = requests(count, seed=6)
    alone = engines(dtype=here.get("dtype", torch.float32))
    expected = tokens(alone.run(*asked))
    taker, keeper = engines(**here), engines(**there)
    keeper.run(*asked)
    with keeper.serving() as peer:
        assert tokens(taker.run(*asking(asked, peer))) == expected
    stats = taker.stats
    assert stats.transfers.num_failed == 0
    most = here.get("block_size", 4) + there.get("block_size", 4)
    assert len(asked) <= taker.num_computed < len(asked) * most
    assert 0 < stats.scheduler.external_cache_hits <= stats.scheduler.external_cache_queries
    assert stats.scheduler.prompt_tokens_external == stats.scheduler.external_cache_hits
    assert stats.transfers.bytes_received > 0
    until(lambda: keeper.stats.transfers.bytes_sent == stats.transfers.bytes_received)


def test_a_peers_memory_and_disk_are_asked(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """The device holds the last few prompts alone, the host a few more, the disk the others."""
    asked = requests(30, seed=7)
    expected = tokens(engines().run(*asked))
    keeper = engines(num_blocks=32, num_slots=32, chunk=32, path=tmp_path / "kv")
    keeper.run(*asked, settles=True)
    assert keeper.stats.tiers.disk_blocks > 0
    taker = engines()
    with keeper.serving() as peer:
        assert tokens(taker.run(*asking(asked, peer))) == expected
    assert taker.stats.transfers.num_failed == 0
    assert keeper.stats.tiers.disk_bytes_read > 0
    assert taker.num_computed < len(asked) * 8


def test_blocks_that_are_evicted_meanwhile_do_no_harm(engines: Callable[..., Engine]) -> None:
    asked, others = requests(30, seed=8), requests(30, seed=9)
    expected = tokens(engines().run(*asked))
    keeper, taker = engines(num_blocks=32, num_slots=16, chunk=32), engines(chunk=16)
    keeper.run(*asked[:20])
    for request in others:
        keeper.core.add(msgspec.structs.replace(request, request_id=f"o{request.request_id}"))
    with keeper.serving() as peer:
        assert tokens(taker.run(*asking(asked, peer))) == expected
    assert keeper.stats.num_evictions > 0
    keeper.run()  # what it has not computed meanwhile
    keeper.scheduler.check_integrity()


@pytest.mark.parametrize("wrong", ["key", "consumer", "number format", "networks", "gone", "stuck"])
def test_a_peer_without_kv_costs_a_recompute(engines: Callable[..., Engine], wrong: str) -> None:
    asked = requests(8, seed=3)
    expected = tokens(engines().run(*asked))
    fields = {
        "key": {"key": b"x"},
        "consumer": {"kv_role": "kv_consumer"},
        "number format": {"dtype": torch.bfloat16},
    }
    keeper = engines(**fields.get(wrong, {}))
    keeper.run(*asked)
    networks = ("10.0.0.0/8",) if wrong == "networks" else None
    taker = engines(kv_peer_networks=networks, kv_transfer_timeout=0.3 if wrong == "stuck" else 120)
    with ExitStack() as stack:
        peer = KvPeer("127.0.0.1", keeper.connector.port)
        if wrong == "gone":
            keeper.core.shutdown()
        elif wrong != "stuck":  # whose engine computes all the time, or hangs
            stack.enter_context(keeper.serving())
        assert tokens(taker.run(*asking(asked, peer))) == expected
    stats = taker.stats
    assert stats.transfers.num_failed == num_worth_asking(asked)
    assert stats.scheduler.external_cache_hits == 0


def test_a_peer_that_dies_in_the_middle_costs_a_recompute(engines: Callable[..., Engine]) -> None:
    asked = requests(12, seed=4)
    expected = tokens(engines().run(*asked))
    keeper, taker = engines(), engines()
    keeper.run(*asked)
    for request in asking(asked, KvPeer("127.0.0.1", keeper.connector.port)):
        taker.core.add(request)
    while not keeper.connector.has_questions:
        taker.core.step()
    keeper.core.shutdown()
    reported: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for output in outputs_of(taker.core):
        reported[output.request_id] += output.token_ids
    assert reported == expected
    assert taker.stats.transfers.num_failed == num_worth_asking(asked)


def test_other_salts_and_tokens_are_not_found(engines: Callable[..., Engine]) -> None:
    asked = requests(6, seed=5)
    keeper, taker = engines(), engines()
    salted = [msgspec.structs.replace(request, cache_salt="a") for request in asked]
    keeper.run(*salted)
    with keeper.serving() as peer:
        taker.run(*asking(asked, peer))
        assert taker.stats.scheduler.external_cache_hits == 0
        assert taker.stats.transfers.num_failed == 0
        taker.run(*asking(salted, peer))
        assert taker.stats.scheduler.external_cache_hits > 0
