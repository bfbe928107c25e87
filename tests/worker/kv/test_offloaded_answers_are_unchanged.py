"""Engines with few blocks and tiers below them: token for token what one with many blocks says."""

import dataclasses
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.worker.kv_engines import NATIVE, NGRAM, Engine, requests, tokens
from tests.support.worker.step_driver import outputs as outputs_of
from worker.config import EngineConfig, KvOffloadingConfig, KvTransferConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.process.build import GIB, build_core
from worker.errors import ConfigError
from worker.models.llama import LlamaModel
from worker.types import SamplingParams

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
