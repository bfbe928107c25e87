"""Whole engines on a made-up model, whose KV moves over real sockets."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_llama import GPU_IF_ANY, TINY, tiny_llama

from worker.config import CacheConfig, KvTransferConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.remote_kv import RemoteKv
from worker.engine.scheduler import Scheduler
from worker.engine.speculation import Speculation
from worker.engine.tiers import Tiers
from worker.executor.kv_cache import allocate
from worker.executor.model_runner import ModelRunner
from worker.kv.content import KvShape
from worker.kv.disk import BlockFiles
from worker.kv.tcp import TcpConnector
from worker.models.llama import LlamaModel
from worker.types import EngineStats, FinishReason, KvPeer, SamplingParams

NUM_BLOCKS = 256
NGRAM = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)


class Engine:
    """A whole engine on a model of random weights."""

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
        num_slots: int = 0,
        path: Path | None = None,
        **transfer: Any,
    ) -> None:
        num_blocks = num_blocks or NUM_BLOCKS * 4 // block_size
        if runner is None:
            used = model or tiny_llama(device=GPU_IF_ANY)
            sizes = (num_blocks, block_size, used.config, dtype, used.device)
            runner = ModelRunner(used, lambda: used, lambda: allocate(*sizes))
        name, *shape = runner.kv_shape
        self.connector = TcpConnector(
            KvTransferConfig(**{"kv_port": 0, "engine_id": f"{id(self)}", **transfer}),
            key,
            KvShape("tiny", name, *shape),
            runner.read_kv((0,), 1).nbytes,
        )
        remote = RemoteKv(self.connector, runner.read_kv, block_size)
        speculation = None
        if speculative is not None:
            drafter = build_drafter(speculative)
            speculation = Speculation(speculative, drafter, drafter is None, TINY.vocab_size)
        self.scheduler = Scheduler(
            CacheConfig(num_blocks, block_size, record_evictions=num_slots > 0),
            SchedulerConfig(max_num_batched_tokens=chunk, max_model_len=256),
            speculation=speculation,
            remote=remote,
        )
        if num_slots:
            size = runner.read_kv((0,), block_size).nbytes
            disk = None if path is None else BlockFiles(path, "tiny", size)
            memory = runner.host_memory(num_slots * size)
            self.scheduler.add_tiers(
                lambda root, record: Tiers(memory, size, root, "lru", record, disk, 10_000)
            )
        self.core = EngineCore(self.scheduler, runner, time.monotonic, overlap)

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def run(self, *requests: AddRequest) -> dict[str, list[RequestOutput]]:
        """To the end of all; what each was told."""
        for request in requests:
            self.core.add(request)
        told: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        deadline = time.monotonic() + 120
        while self.core.has_work:
            assert time.monotonic() < deadline
            step = self.core.step()
            self.scheduler.check_integrity()
            for output in [] if step is None else step.outputs:
                told[output.request_id].append(output)
            if self.core.is_compiling:
                time.sleep(0.001)
        assert self.scheduler.blocks.usage == 0.0
        return told

    @contextmanager
    def serving(self) -> Iterator[KvPeer]:
        """Steps on a thread whenever there is something to do, as the process does; how others ask
        it.
        """
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


def requests(count: int, seed: int = 0) -> list[AddRequest]:
    """Prompts of every length, many of which begin alike; greedy and sampled."""
    rng = random.Random(seed)
    stems = [[rng.randrange(61) for _ in range(size)] for size in (0, 3, 8, 21, 40)]
    return [
        AddRequest(
            f"r{n}",
            [*rng.choice(stems), *(rng.randrange(61) for _ in range(rng.randrange(1, 30)))],
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


def tokens(told: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    """What each answer says; every one has ended, and once."""
    for outputs in told.values():
        assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
    return {name: [t for o in outputs for t in o.token_ids] for name, outputs in told.items()}
