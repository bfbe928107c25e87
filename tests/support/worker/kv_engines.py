"""Whole engines on a made-up model, whose KV moves over real sockets."""

import random
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model.tiny_llama import GPU_IF_ANY, TINY, tiny_llama
from worker.config import CacheConfig, KvTransferConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.cache.tiers import Tiers
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.remote_kv import RemoteKv
from worker.engine.features.speculation import Speculation
from worker.engine.features.tiered_cache import TieredCache
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.kv_cache import KvPool, allocate
from worker.executor.model_runner import ModelRunner
from worker.kv.content import KvShape
from worker.kv.disk import BlockFiles, DiskRead, StoredBlock
from worker.kv.tcp import TcpConnector
from worker.models.llama import LlamaModel
from worker.types import EngineStats, FinishReason, KvPeer, SamplingParams

NUM_BLOCKS = 256
NGRAM = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)
PATIENT = {"kv_port": 0, "kv_lease_duration": 600.0, "kv_transfer_timeout": 120.0}
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
}  # a model whose layers run natively


class SeenFiles(BlockFiles):
    _begun: tuple[DiskRead, ...] = ()

    @property
    def has_read(self) -> bool:
        return all(read.is_finished or read.is_closed for read in self._begun)

    def read(self, blocks: Sequence[StoredBlock], start: int, end: int) -> DiskRead:
        read = super().read(blocks, start, end)
        self._begun += (read,)
        return read


class Engine:
    def __init__(
        self,
        *,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
        speculative: SpeculativeConfig | None = None,
        overlap: bool = False,
        key: bytes = b"k",
        model: LlamaModel | None = None,
        runner: Any = None,
        num_blocks: int | None = None,
        num_seqs: int = 128,
        num_slots: int = 0,
        path: Path | None = None,
        make_pool: Callable[[Any], KvPool] | None = None,
        **transfer: Any,
    ) -> None:
        num_blocks = num_blocks or NUM_BLOCKS * 4 // block_size
        if runner is None:
            used = model or tiny_llama(device=GPU_IF_ANY)
            sizes = (num_blocks, block_size, used.config, dtype, used.device)
            runner = ModelRunner(used, lambda: used, lambda: allocate(*sizes))
        name, *shape = runner.kv_shape
        self.pool = None if make_pool is None else make_pool(runner)
        self.connector = TcpConnector(
            KvTransferConfig(**{**PATIENT, "engine_id": f"{id(self)}", **transfer}),
            key,
            KvShape("tiny", name, *shape),
            runner.read_kv((0,), 1).nbytes,
            pool=self.pool,
        )
        remote = RemoteKv(self.connector, runner.read_kv, block_size, pool=self.pool)
        speculation = None
        if speculative is not None:
            drafter = build_drafter(speculative)
            speculation = Speculation(speculative, drafter, drafter is None, TINY.vocab_size)
        tiers = None
        if num_slots:
            size = runner.read_kv((0,), block_size).nbytes
            disk = None if path is None else SeenFiles(path, "tiny", size, lambda: 0.0)
            memory = runner.host_memory(num_slots * size)
            tiers = TieredCache(
                lambda root, record: Tiers(memory, size, root, "lru", record, disk, 10_000)
            )
        self.scheduler = Scheduler(
            CacheConfig(num_blocks, block_size, record_evictions=num_slots > 0),
            SchedulerConfig(chunk, num_seqs, max_model_len=256),
            features=[remote, tiers, speculation],
        )
        self.core = EngineCore(self.scheduler, runner, time.monotonic, overlap)

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    @property
    def num_computed(self) -> int:
        counted = self.stats.scheduler
        return counted.prompt_tokens - counted.prompt_tokens_cached

    def run(self, *requests: AddRequest, settles: bool = False) -> dict[str, list[RequestOutput]]:
        """Run all requests to their ends. With `settles`, no step is faster than the disk."""
        for request in requests:
            self.core.add(request)
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        while self.core.has_work:
            step = self.core.step()
            self.scheduler.check_integrity()
            for output in [] if step is None else step.outputs:
                outputs.setdefault(output.request_id, []).append(output)
            if settles:
                self.settle()
            if self.core.is_compiling:
                time.sleep(0.001)
        assert self.scheduler.blocks.usage == 0.0
        return outputs

    def settle(self) -> None:
        tiers = self.scheduler._kv.tiers
        disk = tiers._disk

        def is_settled() -> bool:
            tiers.look()
            return not tiers._writing and (not isinstance(disk, SeenFiles) or disk.has_read)

        until(is_settled)

    @contextmanager
    def serving(self) -> Iterator[KvPeer]:
        """Step on a thread whenever there is something to do, as the process does."""
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                if not self.core.has_work:
                    select.select([self.core.bell], [], [], 0.1)
                self.core.step()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield KvPeer("127.0.0.1", self.connector.port)
        finally:
            stop.set()
            thread.join()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def send_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError("none to spare")

    monkeypatch.setattr("os.memfd_create", refuse)


def requests(
    count: int, seed: int = 0, stem_sizes: Sequence[int] = (0, 3, 8, 21, 40), own: int = 30
) -> list[AddRequest]:
    """Return prompts of every length, many with the same beginning, that end with fewer than `own`
    tokens of their own; greedy and sampled.
    """
    rng = random.Random(seed)
    stems = [[rng.randrange(61) for _ in range(size)] for size in stem_sizes]
    return [
        AddRequest(
            f"r{n}",
            [*rng.choice(stems), *(rng.randrange(61) for _ in range(rng.randrange(1, own)))],
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


def tokens(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    for answer in outputs.values():
        assert [o.finish_reason for o in answer if o.finish_reason] == [FinishReason.LENGTH]
    return {name: [t for o in answer for t in o.token_ids] for name, answer in outputs.items()}
