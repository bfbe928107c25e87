"""A prompt run by one engine and continued by another: token for token what one engine says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.depth import by_depth, some
from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.worker.kv_engines import NATIVE, NGRAM, NUM_BLOCKS, Engine, requests, tokens
from tests.support.worker.step_driver import outputs as outputs_of
from worker.config import EngineConfig, SchedulerConfig, SimConfig
from worker.engine.messages import AddRequest, RequestOutput
from worker.executor.start import build_executor
from worker.models.llama import LlamaModel
from worker.sim.runner import SimExecutor, SimLimits
from worker.types import KvSource, SamplingParams


def prefill(request: AddRequest) -> AddRequest:
    params = msgspec.convert(
        {**msgspec.to_builtins(request.params), "max_tokens": 1}, SamplingParams
    )
    return msgspec.structs.replace(request, params=params, keeps_kv=True)


def decode(request: AddRequest, reported: list[RequestOutput]) -> AddRequest:
    offer = reported[-1].kv_offer
    return msgspec.structs.replace(request, kv_source=offer.source)


def both_legs(first: Engine, second: Engine, asked: list[AddRequest], batch: int = 8) -> Any:
    answers = {}
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        reported = first.run(*map(prefill, some))
        tokens(reported)
        answers |= tokens(second.run(*(decode(r, reported[r.request_id]) for r in some)))
    return answers


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {}),
        ({"overlap": True}, {"overlap": True}),
        ({"chunk": 7}, {"chunk": 5}),
        ({}, {"speculative": NGRAM}),
        ({"speculative": NGRAM, "block_size": 8}, {"block_size": 16}),
        ({"block_size": 16}, {"block_size": 2}),
        ({"dtype": torch.bfloat16}, {"dtype": torch.bfloat16}),
    ],
)
def test_two_engines_answer_as_one(
    engines: Callable[..., Engine], here: dict[str, Any], there: dict[str, Any]
) -> None:
    """The first engine computes each prompt, the second less than a block of it."""
    asked = requests(12)
    alone = engines(dtype=here.get("dtype", torch.float32))
    expected = tokens(alone.run(*asked))
    first, second = engines(**here), engines(**there)
    assert both_legs(first, second, asked) == expected
    size = there.get("block_size", 4)
    stats = second.stats
    assert stats.transfers.num_failed == 0
    assert len(asked) <= second.num_computed <= len(asked) * size
    assert 0 < stats.scheduler.external_cache_hits <= stats.scheduler.external_cache_queries
    assert first.stats.scheduler.prompt_tokens == sum(len(r.prompt_token_ids) for r in asked)
    assert stats.transfers.bytes_received > 0


def test_many_requests_at_once(engines: Callable[..., Engine]) -> None:
    asked = requests(by_depth(60, 200), seed=1)
    expected = tokens(engines().run(*asked))
    first, second = engines(overlap=True), engines(overlap=True)
    assert both_legs(first, second, asked, batch=len(asked)) == expected
    assert second.stats.transfers.num_failed == 0


def test_decodes_wait_for_their_prefills(engines: Callable[..., Engine]) -> None:
    """Both are asked at once, as SGLang's routers do: a decode holds no block until its KV is
    there, and computes one block at most.
    """
    asked = [r for r in requests(12, seed=2) if len(r.prompt_token_ids) > 4]
    expected = tokens(engines().run(*asked))
    first, second = engines(), engines()
    reported: dict[str, list[RequestOutput]] = {request.request_id: [] for request in asked}
    for request in asked:
        size, port = len(request.prompt_token_ids), first.connector.port
        source = KvSource("127.0.0.1", port, None, request.request_id, size)
        second.core.add(msgspec.structs.replace(request, kv_source=source))
    while first.connector._server.num_waiting < len(asked):
        step = second.core.step()
        assert step is None or not step.num_scheduled_tokens
        assert second.scheduler.blocks.usage == 0.0
    for request in asked:
        first.run(msgspec.structs.replace(prefill(request), kv_name=request.request_id))
    for output in outputs_of(second.core):
        reported[output.request_id].append(output)
    assert tokens(reported) == expected
    assert second.stats.transfers.num_failed == 0
    assert second.num_computed <= len(asked) * 4


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16]))
def test_native_engines_answer_as_one(
    engines: Callable[..., Engine], native_model: LlamaModel, dtype: torch.dtype
) -> None:
    """Their blocks have different sizes, so keys lie differently in each."""
    asked = requests(12, seed=3)
    how = {"model": native_model, "dtype": dtype}
    expected = tokens(engines(**how).run(*asked))
    second = engines(**how, block_size=16)
    assert both_legs(engines(**how, block_size=8), second, asked) == expected
    assert second.stats.scheduler.external_cache_hits > 0


@pytest.mark.parametrize("mode", ["echo", "random"])
def test_simulators_answer_as_one(engines: Callable[..., Engine], mode: str) -> None:
    """An echo is read from the cache, so it also shows what has moved."""

    def engine(block_size: int) -> Engine:
        config = SimConfig(mode=mode, time_scale=0.0, num_words=40, first_word_id=5, vocab_size=61)
        limits = SimLimits(NUM_BLOCKS * 4 // block_size, block_size)
        runner = SimExecutor(config, lambda *_: None, limits, moves_kv=True)
        return engines(runner=runner, block_size=block_size, chunk=9)

    asked = requests(40, seed=5)
    expected = tokens(engine(4).run(*asked))
    first, second = engine(8), engine(4)
    assert both_legs(first, second, asked) == expected
    assert second.stats.transfers.num_failed == 0
    assert second.num_computed <= 4 * len(asked)


@pytest.mark.full
@pytest.mark.timeout(900)  # ranks that share a core wait for each other at every layer
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_ranks_and_one_process_answer_as_one(
    engines: Callable[..., Engine], sizes: tuple[int, int], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, NATIVE)

    def engine(size: int) -> Engine:
        config = EngineConfig(
            "torch",
            str(tmp_path),
            "float32",
            block_size=4,
            num_blocks_override=NUM_BLOCKS,
            scheduler=SchedulerConfig(max_model_len=256),
            attention_backend="torch",
            device="cpu",
            tensor_parallel_size=size,
        )
        return engines(runner=build_executor(config)[0], overlap=True)

    asked = requests(100 * sizes[0], seed=4)
    expected = tokens(engine(1).run(*asked))
    first, second = map(engine, sizes)
    assert both_legs(first, second, asked, batch=50) == expected
    assert second.stats.transfers.num_failed == 0
    assert second.num_computed <= 4 * len(asked)


@pytest.mark.parametrize("when", ["before", "kept", "gone", "other key", "other tokens"])
def test_without_the_first_the_second_computes(engines: Callable[..., Engine], when: str) -> None:
    asked = requests(12, seed=2)
    expected = tokens(engines().run(*asked))
    first = engines(kv_buffer_size=20_000 if when == "gone" else 1e9)
    second = engines(key=b"x" if when == "other key" else b"k")
    reported = first.run(*map(prefill, asked))
    legs = []
    for request in asked:
        offer = reported[request.request_id][-1].kv_offer
        source = KvSource("127.0.0.1", 1, "e", "r", 5) if offer is None else offer.source
        legs.append(msgspec.structs.replace(request, kv_source=source))
    if when == "before":
        first.core.shutdown()
    if when == "other tokens":
        legs = [
            msgspec.structs.replace(leg, kv_source=other.kv_source)
            for leg, other in zip(legs, [*legs[1:], legs[0]], strict=True)
        ]
    assert tokens(second.run(*legs)) == expected
    stats = second.stats
    if when != "kept":
        assert stats.transfers.num_failed > 0
    if when not in ("kept", "gone"):
        assert stats.scheduler.external_cache_hits == 0
