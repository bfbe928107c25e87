"""Engines with few blocks and tiers below them: token for token what one with many blocks says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import save_checkpoint
from tiny_llama import GPU_IF_ANY, TINY, tiny_llama

from worker.config import (
    CacheConfig,
    EngineConfig,
    KvOffloadingConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.messages import AddRequest
from worker.engine.process import GIB, build_core
from worker.engine.scheduler import Scheduler
from worker.engine.speculation import Speculation
from worker.engine.tiers import Tiers
from worker.errors import ConfigError
from worker.executor.kv_cache import allocate
from worker.executor.model_runner import ModelRunner
from worker.kv.disk import BlockFiles
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.cpu.native import open_kernels
from worker.types import EngineStats, SamplingParams

NATIVE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
NGRAM = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)
SEED = "a seed"


class Engine:
    """A whole engine on a model of random weights; with `num_slots` 0 it has no tiers."""

    def __init__(
        self,
        num_slots: int = 0,
        path: Path | None = None,
        *,
        num_blocks: int = 24,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
        speculative: SpeculativeConfig | None = None,
        overlap: bool = False,
        model: LlamaModel | None = None,
    ) -> None:
        model = model or tiny_llama(device=GPU_IF_ANY)
        sizes = (num_blocks, block_size, model.config, dtype, model.device)
        runner = ModelRunner(model, lambda: model, lambda: allocate(*sizes))
        speculation = None
        if speculative is not None:
            drafter = build_drafter(speculative)
            speculation = Speculation(speculative, drafter, drafter is None, TINY.vocab_size)
        self.scheduler = Scheduler(
            CacheConfig(num_blocks, block_size, hash_seed=SEED, record_evictions=num_slots > 0),
            SchedulerConfig(max_num_batched_tokens=chunk, max_model_len=96, max_num_seqs=4),
            speculation=speculation,
        )
        size = runner.read_kv((0,), block_size).nbytes
        if num_slots:
            disk = None if path is None else BlockFiles(path, "tiny", size, lambda: 0.0)
            memory = runner.host_memory(num_slots * size)
            self.scheduler.add_tiers(
                lambda root, record: Tiers(memory, size, root, "lru", record, disk, 10_000)
            )
        self.core = EngineCore(self.scheduler, runner, time.monotonic, overlap)

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def run(self, requests: list[AddRequest]) -> dict[str, list[int]]:
        """To the end of all; what each was told."""
        for request in requests:
            self.core.add(request)
        told: dict[str, list[int]] = {request.request_id: [] for request in requests}
        deadline = time.monotonic() + 120
        while self.core.has_work:
            assert time.monotonic() < deadline
            step = self.core.step()
            self.scheduler.check_integrity()
            for output in [] if step is None else step.outputs:
                told[output.request_id] += output.token_ids
            if self.core.is_compiling:
                time.sleep(0.001)
        assert self.scheduler.blocks.usage == 0.0
        return told

    def settle(self) -> None:
        """Until what is being written is on disk."""
        tiers = self.scheduler.tiers
        assert tiers is not None
        deadline = time.monotonic() + 60
        while tiers._writing:
            assert time.monotonic() < deadline
            tiers.look()


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes engines, and ends them."""
    with ExitStack() as stack:

        def make(*args: Any, **how: Any) -> Engine:
            engine = Engine(*args, **how)
            stack.callback(engine.core.shutdown)
            return engine

        yield make


@pytest.fixture(scope="module")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """One whose layers run natively, with keys that lie across in its cache."""
    kernels = open_kernels(1)
    if kernels is None:
        pytest.skip("the native kernels are not built")
    path = tmp_path_factory.mktemp("native")
    save_checkpoint(path, NATIVE)
    model = load_model(path, torch.float32, torch.device("cpu"), 256, kernels=kernels)
    assert model.native is not None
    return model


def requests(count: int, seed: int = 0) -> list[AddRequest]:
    """Prompts that begin with one of a few long stems, in random order; greedy and sampled."""
    rng = random.Random(seed)
    stems = [[rng.randrange(61) for _ in range(40)] for _ in range(6)]
    return [
        AddRequest(
            f"r{n}",
            [*rng.choice(stems), *(rng.randrange(61) for _ in range(rng.randrange(1, 12)))],
            SamplingParams(
                max_tokens=rng.randrange(1, 12),
                temperature=rng.choice([0.0, 0.9]),
                seed=rng.randrange(1000),
                ignore_eos=True,
            ),
            0.0,
        )
        for n in range(count)
    ]


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
    """With prefix hits on the device, in host memory and, where that is small, on disk."""
    asked = requests(20)
    alone = {**how, "num_blocks": 2000}
    expected = engines(**alone).run(asked)
    engine = engines(num_slots, tmp_path, **how)
    assert engine.run(asked) == expected
    stats = engine.stats
    assert 0 < stats.external_cache_hits <= stats.external_cache_queries
    assert (stats.num_disk_failures, stats.disk_bytes_written > 0) == (0, num_slots == 12)
    from_tiers = stats.prompt_tokens_host + stats.prompt_tokens_disk
    assert from_tiers == stats.prompt_tokens_external > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_tiers_answer_as_one_large_cache(
    engines: Callable[..., Engine], tmp_path: Path, native_model: LlamaModel, dtype: torch.dtype
) -> None:
    """Keys lie across in its cache, and as those of any engine below it."""
    asked = requests(20)
    how = {"model": native_model, "dtype": dtype, "block_size": 8}
    expected = engines(**how, num_blocks=1000).run(asked)
    engine = engines(12, tmp_path, **how, num_blocks=12)
    assert engine.run(asked) == expected
    assert engine.stats.external_cache_hits > 0


def test_a_restart_has_what_was_on_disk(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """Files are found, read and right; those that were damaged meanwhile cost a recompute."""
    asked = requests(20)
    expected = engines(num_blocks=2000).run(asked)
    first = engines(12, tmp_path)
    first.run(asked)
    first.settle()
    first.core.shutdown()
    again = engines(400, tmp_path)
    while not again.stats.disk_tier_blocks:
        again.core.step()
    files = sorted((tmp_path / "tiny.0").glob("*.kv"))
    assert again.stats.disk_tier_blocks == len(files)
    assert again.run(asked) == expected
    assert again.stats.disk_bytes_read > 0
    assert again.stats.num_disk_failures == 0
    again.core.shutdown()
    for number, file in enumerate(files):
        whole = bytearray(file.read_bytes())
        whole[-1] ^= 1
        file.write_bytes(whole if number % 2 else whole[: len(whole) // 2])
    damaged = engines(400, tmp_path)
    while not damaged.stats.disk_tier_blocks:  # until all files were looked at
        damaged.core.step()
    assert damaged.run(asked) == expected
    assert damaged.stats.disk_bytes_read == 0
    assert damaged.stats.num_disk_failures > len(files) // 2


def test_without_a_disk_answers_are_the_same(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """It goes away while the engine runs."""
    asked = requests(20)
    expected = engines(num_blocks=2000).run(asked)
    engine = engines(12, tmp_path)
    half = {name: expected[name] for name in (request.request_id for request in asked[:10])}
    assert engine.run(asked[:10]) == half
    for file in (tmp_path / "tiny.0").iterdir():
        file.unlink()
    (tmp_path / "tiny.0").rmdir()
    assert engine.run(asked[10:]) == {r.request_id: expected[r.request_id] for r in asked[10:]}
    assert engine.stats.num_disk_failures > 0


def test_a_worker_is_built_with_tiers(tmp_path: Path) -> None:
    """From its configuration: sizes are bytes, the directory is of the model and the seed."""
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
        while core.has_work:
            core.step()
        core.shutdown()
    names = sorted(path.name for path in (tmp_path / "kv").iterdir())
    assert len(names) == 2
    assert all(name.endswith(".0") for name in names)
    for sizes, flag in (((0.5, 8), "size"), ((6, 0.5), "disk-size")):
        with pytest.raises(ConfigError, match=f"--kv-offloading-{flag} "):
            start(*sizes)
    with pytest.raises(ConfigError, match="memory that are available"):
        start(1e12, 8)
