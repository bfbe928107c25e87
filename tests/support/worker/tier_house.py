"""A small engine with tiers below it, in which every answer is checked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.support.worker import engine_walk as walks
from tests.support.worker.made_up_disk import MadeUpDisk
from tests.support.worker.paged_executor import TOKEN_BYTES, VOCABULARY, PagedExecutor
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.engine.cache.tiers import Tiers
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.speculation import Speculation
from worker.engine.features.tiered_cache import TieredCache
from worker.engine.messages import AddRequest, Command
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import SamplingParams

SIZE = 4  # tokens of a block


def tiers_below(cache: CacheConfig, num_slots: int) -> tuple[CacheConfig, TieredCache | None]:
    """Return the cache with `num_slots` of the host's memory below it; none without prefixes."""
    has_tiers = num_slots > 0 and cache.enable_prefix_caching
    size = cache.block_size * TOKEN_BYTES
    memory = memoryview(bytearray(num_slots * size))
    tiers = TieredCache(lambda root, record: Tiers(memory, size, root, "lru", record))
    return dataclasses.replace(cache, record_evictions=has_tiers), tiers if has_tiers else None


class House:
    def __init__(
        self,
        cache: CacheConfig | None = None,
        limits: SchedulerConfig | None = None,
        *,
        num_slots: int = 64,
        disk: MadeUpDisk | None = None,
        policy: str = "lru",
        pipe: str = "inline",
        speculative: SpeculativeConfig | None = None,
        num_on_disk: int = 64,
    ) -> None:
        cache = cache or CacheConfig(8, SIZE, enable_partial_hits=False, record_events=True)
        self._size = cache.block_size
        self.executor = PagedExecutor(cache.block_size)
        speculation = None
        if speculative is not None:
            speculation = Speculation(speculative, build_drafter(speculative), False, VOCABULARY)
        size = cache.block_size * TOKEN_BYTES
        memory = memoryview(bytearray(num_slots * size))
        tiers = TieredCache(
            lambda root, record: Tiers(memory, size, root, policy, record, disk, num_on_disk)
        )
        self.scheduler = Scheduler(
            dataclasses.replace(cache, record_evictions=True),
            limits or SchedulerConfig(max_num_batched_tokens=SIZE),
            (walks.END,),
            [tiers, speculation],
        )
        pipeline = walks.PIPELINES[pipe](self.executor)
        self.core = EngineCore(self.scheduler, self.executor, lambda: 0.0, pipeline=pipeline)
        self.events: list[CacheEvent] = []
        self.num_orphans = 0  # announced blocks with unknown parents

    def ask(self, prompt: Sequence[int], name: str = "a", **fields: Any) -> int:
        params = SamplingParams(max_tokens=2, ignore_eos=True, seed=3)
        request = AddRequest(name, list(prompt), params, 0.0, **fields)
        self.core.add(request)
        outputs = []
        for _ in range(200):
            step = self.core.step() if self.core.has_work else None
            self.events += self.core.take_events()
            self.scheduler.check_integrity()
            outputs += [] if step is None else step.outputs
            if outputs and outputs[-1].finish_reason is not None:
                break
        tokens = [token for output in outputs for token in output.token_ids]
        assert (tokens, outputs[-1].finish_reason) == walks.alone(request, 0, 64)
        return outputs[-1].num_cached_tokens

    def tiers_of(self, tokens: Sequence[int]) -> dict[str, int]:
        """Count the blocks of a prompt in each tier, up to the first block missing in all."""
        found: dict[str, int] = {}
        chain: list[Any] = []
        self.scheduler._kv._hasher.extend(chain, tokens, len(tokens) // self._size)
        held = {block.block_hash for block in self.scheduler.blocks.cached_blocks()}
        tiers = self.scheduler._kv.tiers
        for content in chain:
            here = {"gpu": content.digest in held, "cpu": bool(tiers.find([content]))}
            here["storage"] = tiers._on_disk.find(content) is not None
            if not any(here.values()):
                break
            for name in (name for name, is_there in here.items() if is_there):
                found[name] = found.get(name, 0) + 1
        return found

    def command(self, command: Command) -> None:
        self.core.command(command)
        self.core.step()
        self.events += self.core.take_events()
        assert [reply.ok for reply in self.core.take_replies()] == [True]

    def mirror(self) -> dict[str, set[bytes]]:
        held: dict[str, set[bytes]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        for event in self.events:
            if isinstance(event, CacheCleared):
                held = {medium: set() for medium in held}
            elif isinstance(event, BlocksStored):
                is_known = any(event.parent in have for have in held.values())
                self.num_orphans += not (event.parent is None or is_known)
                held[event.medium] |= {block.digest for block in event.blocks}
            elif isinstance(event, BlockRemoved):
                held[event.medium].discard(event.digest)
        return held


def prompt(number: int, num_tokens: int = 17) -> list[int]:
    return [1 + number // 6, 1 + number % 6, *[1] * (num_tokens - 2)]
