"""Prompts run elsewhere, asked for, or in tiers: token for token what one engine says."""

import dataclasses
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.depth import by_depth, some
from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.model.tiny_llama import tiny_llama
from tests.support.worker.draft_bench import tiny_head
from tests.support.worker.kv_engines import (
    NATIVE,
    NGRAM,
    NUM_BLOCKS,
    Engine,
    requests,
    tokens,
    until,
)
from tests.support.worker.step_driver import outputs as outputs_of
from worker.config import (
    EngineConfig,
    KvOffloadingConfig,
    KvTransferConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.process.build import GIB, build_core
from worker.errors import ConfigError
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.loading import HeadNetwork, ModelNetwork
from worker.executor.kv_cache import allocate
from worker.executor.model_runner import ModelRunner
from worker.executor.start import build_executor
from worker.models.llama import LlamaModel
from worker.sim.config import SimConfig
from worker.sim.runner import SimExecutor, SimLimits
from worker.types import KvPeer, KvSource, SamplingParams


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
        ({"dtype": torch.float8_e4m3fn}, {"dtype": torch.float8_e4m3fn}),
    ],
)
def test_two_engines_answer_as_one(
    engines: Callable[..., Engine], here: dict[str, Any], there: dict[str, Any]
) -> None:
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


FEW = {"num_blocks": 24, "num_seqs": 4}


def asked_of_few() -> list[AddRequest]:
    return requests(20, stem_sizes=(40,) * 6, own=12)


HOWS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"chunk": 7},
    {"speculative": NGRAM},
    {"speculative": NGRAM, "overlap": True, "chunk": 16, "block_size": 8, "num_blocks": 12},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float8_e4m3fn},
]


@pytest.mark.parametrize(("how", "num_slots"), [(HOWS[0], 400), *((how, 12) for how in HOWS)])
def test_tiers_answer_as_one_large_cache(
    engines: Callable[..., Engine], tmp_path: Path, how: dict[str, Any], num_slots: int
) -> None:
    asked = asked_of_few()
    alone = {**how, "num_blocks": 2000}
    expected = tokens(engines(**alone).run(*asked))
    engine = engines(**{**FEW, **how}, num_slots=num_slots, path=tmp_path)
    assert tokens(engine.run(*asked, settles=True)) == expected
    stats = engine.stats
    assert 0 < stats.scheduler.external_cache_hits <= stats.scheduler.external_cache_queries
    assert (stats.tiers.num_disk_failures, stats.tiers.disk_bytes_written > 0) == (
        0,
        num_slots == 12,
    )
    from_tiers = stats.scheduler.prompt_tokens_host + stats.scheduler.prompt_tokens_disk
    assert from_tiers == stats.scheduler.prompt_tokens_external > 0


def drafting(method: str, num_blocks: int) -> tuple[ModelRunner, SpeculativeConfig]:
    """Return a runner whose drafter is a random head, or the target itself as a draft model."""
    target = tiny_llama()
    network = ModelNetwork(target) if method == "draft_model" else HeadNetwork(tiny_head(target))
    drafter = CachedDrafter(lambda _: network, network, target, (num_blocks, 4), "gumbel")
    sizes = (num_blocks, 4, target.config, torch.float32, target.device)
    runner = ModelRunner(target, lambda: target, lambda: allocate(*sizes), drafter)
    return runner, SpeculativeConfig(method, 3, "m", enable_adaptive_verification=False)


def assert_drafts_fit(engine: Engine, method: str) -> None:
    """The target's own drafts stand if it has read the right tokens at every position, but for
    rounding.
    """
    counts = engine.stats.speculation
    assert counts.num_draft_tokens > 50
    if method == "draft_model":
        assert counts.num_accepted_tokens > 0.95 * counts.num_draft_tokens


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafters_on_the_device_continue_what_tiers_have(
    engines: Callable[..., Engine], tmp_path: Path, method: str
) -> None:
    asked = asked_of_few()
    expected = tokens(engines(num_blocks=2000).run(*asked))
    runner, speculative = drafting(method, 24)
    how = {"runner": runner, "speculative": speculative}
    engine = engines(**FEW, **how, num_slots=12, path=tmp_path)
    assert tokens(engine.run(*asked, settles=True)) == expected
    assert engine.stats.scheduler.prompt_tokens_external > 0
    assert_drafts_fit(engine, method)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafters_on_the_device_continue_prompts_that_ran_elsewhere(
    engines: Callable[..., Engine], method: str
) -> None:
    asked = requests(24, seed=6)
    expected = tokens(engines().run(*asked))
    runner, speculative = drafting(method, NUM_BLOCKS)
    second = engines(runner=runner, speculative=speculative)
    assert both_legs(engines(), second, asked) == expected
    assert second.stats.transfers.num_failed == 0
    assert_drafts_fit(second, method)


@pytest.mark.timeout(900)
def test_tiers_of_ranks_answer_as_one_large_cache(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    save_checkpoint(tmp_path / "model", NATIVE)
    asked = asked_of_few()
    how = {"draft_sample_method": "gumbel", "enable_adaptive_verification": False}
    drafts = SpeculativeConfig("draft_model", 3, str(tmp_path / "model"), **how)

    def executor(size: int, num_blocks: int, **changes: Any) -> Any:
        config = EngineConfig(
            "torch",
            str(tmp_path / "model"),
            "float32",
            block_size=4,
            num_blocks_override=num_blocks,
            scheduler=SchedulerConfig(max_model_len=96),
            attention_backend="torch",
            device="cpu",
            tensor_parallel_size=size,
            **changes,
        )
        return build_executor(config)[0]

    expected = tokens(engines(runner=executor(1, 2000), num_blocks=2000).run(*asked))
    runner = executor(2, 24, speculative=drafts)
    engine = engines(**FEW, runner=runner, num_slots=12, path=tmp_path / "kv", speculative=drafts)
    assert tokens(engine.run(*asked, settles=True)) == expected
    stats = engine.stats
    assert stats.tiers.disk_bytes_written > 0
    assert stats.scheduler.prompt_tokens_external > 0
    assert_drafts_fit(engine, "draft_model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_tiers_answer_as_one_large_cache(
    engines: Callable[..., Engine], tmp_path: Path, native_model: LlamaModel, dtype: torch.dtype
) -> None:
    """Its keys are transposed in the cache, unlike those of the tiers below it."""
    asked = asked_of_few()
    how = {"model": native_model, "dtype": dtype, "block_size": 8}
    expected = tokens(engines(**how, num_blocks=1000).run(*asked))
    engine = engines(**how, num_blocks=12, num_seqs=4, num_slots=12, path=tmp_path)
    assert tokens(engine.run(*asked, settles=True)) == expected
    assert engine.stats.scheduler.external_cache_hits > 0


def test_a_restart_has_what_was_on_disk(engines: Callable[..., Engine], tmp_path: Path) -> None:
    asked = asked_of_few()
    expected = tokens(engines(num_blocks=2000).run(*asked))
    first = engines(**FEW, num_slots=12, path=tmp_path)
    first.run(*asked, settles=True)
    first.core.shutdown()
    again = engines(**FEW, num_slots=400, path=tmp_path)
    while not again.stats.tiers.disk_blocks:
        again.core.step()
    files = sorted((tmp_path / "tiny.0").glob("*.kv"))
    assert again.stats.tiers.disk_blocks == len(files)
    assert tokens(again.run(*asked)) == expected
    assert again.stats.tiers.disk_bytes_read > 0
    assert again.stats.tiers.num_disk_failures == 0
    again.core.shutdown()
    for number, file in enumerate(files):
        whole = bytearray(file.read_bytes())
        whole[-1] ^= 1
        file.write_bytes(whole if number % 2 else whole[: len(whole) // 2])
    damaged = engines(**FEW, num_slots=400, path=tmp_path)
    while not damaged.stats.tiers.disk_blocks:  # until all files were looked at
        damaged.core.step()
    assert tokens(damaged.run(*asked)) == expected
    assert damaged.stats.tiers.disk_bytes_read == 0
    assert damaged.stats.tiers.num_disk_failures > len(files) // 2


def test_without_a_disk_answers_are_the_same(
    engines: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asked_of_few()
    expected = tokens(engines(num_blocks=2000).run(*asked))
    engine = engines(**FEW, num_slots=12, path=tmp_path)
    answers = tokens(engine.run(*asked[:10]))
    engine.settle()
    shutil.rmtree(tmp_path)
    answers |= tokens(engine.run(*asked[10:]))
    engine.settle()
    assert answers == expected
    files = {*(tmp_path / "tiny.0").glob("*.kv")}
    assert 0 < len(files) == engine.stats.tiers.disk_blocks
    assert 0 < len(caplog.records) < 5


def test_a_wrong_setting_is_found_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Nothing is at `model_path` here, so loading would fail first."""
    (tmp_path / "file").write_text("")
    scheduler = SchedulerConfig(max_model_len=64)
    none = EngineConfig("torch", str(tmp_path / "none"), "float32", scheduler=scheduler)
    offloading = KvOffloadingConfig(1.0, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"^--kv-offloading-path .*give a directory"):
        build_core(dataclasses.replace(none, kv_offloading=offloading))
    transfer = KvTransferConfig(engine_id="e", key_file=str(tmp_path / "no_key"), kv_port=0)
    with pytest.raises(ConfigError, match="key_file"):
        build_core(dataclasses.replace(none, kv_transfer=transfer))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        transfer = KvTransferConfig(engine_id="e", kv_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="kv_port"):
            build_core(dataclasses.replace(none, kv_transfer=transfer))


def test_a_worker_is_built_with_tiers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_checkpoint(tmp_path / "model", NATIVE)
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4

    def start(num_slots: float, num_on_disk: float, **fields: Any) -> EngineCore:
        host, disk = num_slots * block_bytes / GIB, num_on_disk * block_bytes / GIB
        return build_core(
            EngineConfig(
                "torch",
                str(tmp_path / "model"),
                "float32",
                num_blocks_override=8,
                num_threads=1,
                scheduler=SchedulerConfig(max_model_len=64),
                kv_offloading=KvOffloadingConfig(host, str(tmp_path / "kv"), disk),
                **fields,
            )
        )[0]

    for seed in ("x", "y", "x"):
        core = start(6, 8, prefix_caching_hash_seed=seed)
        for number in range(6):
            params = SamplingParams(max_tokens=1, temperature=0.0)
            core.add(AddRequest(f"{number}", [number] * 50, params, 0.0))
        outputs_of(core)
        core.shutdown()
    names = sorted(path.name for path in (tmp_path / "kv").iterdir())
    assert len(names) == 2
    assert all(name.endswith(".0") for name in names)
    for sizes, flag in (((0.5, 8), "size"), ((6, 0.5), "disk-size")):
        with pytest.raises(ConfigError, match=f"--kv-offloading-{flag} "):
            start(*sizes)
    with pytest.raises(ConfigError, match="memory that are available"):
        start(1e12, 8)
