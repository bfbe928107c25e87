"""A whole engine around an executor of the test, run until every request has its answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.adapters import Adapters, AdapterSlots
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import Executor, Ticket
from worker.types import SchedulerOutput

Outputs = dict[str, list[RequestOutput]]
NUM_SLOTS = 2  # of adapters


def torch_config(path: Path, **changes: Any) -> EngineConfig:
    """The torch engine in float32, with 32 blocks and at most 256 tokens in a sequence."""
    limits = SchedulerConfig(max_model_len=256)
    config = EngineConfig("torch", str(path), "float32", num_blocks_override=32, scheduler=limits)
    return replace(config, **changes)


@dataclass(frozen=True)
class Way:
    """The set-up of an engine; `drafts` are those of a lookup, or of a `drafter` on the device."""

    num_blocks: int = 200
    budget: int = 512
    batch: int = 32
    overlap: bool = False
    drafts: int = 0
    block_size: int = 8
    preempts: bool = False
    drafter: SpeculativeConfig | None = None


class Lent(Executor):
    """Another executor, which outlives the engine that it is lent to."""

    def __init__(
        self, executor: Executor, check: Callable[[SchedulerOutput], object] = lambda _: None
    ) -> None:
        self._executor, self._check = executor, check

    def submit(self, step: SchedulerOutput) -> Ticket:
        self._check(step)
        return self._executor.submit(step)


def outputs_of(
    core: EngineCore,
    asked: Sequence[AddRequest],
    at_once: int | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> Outputs:
    """Add all requests, or some `at_once` before every step; return their outputs by id."""
    waiting = list(asked)
    found: Outputs = {name: [] for r in asked for name in (r.request_id, *r.branch_ids)}
    while core.has_work or waiting:
        for request in waiting[:at_once]:
            core.add(request)
        waiting = waiting[len(waiting) if at_once is None else at_once :]
        report = core.step()  # None also while a thread reads an adapter
        after_step()
        for output in report.outputs if report is not None else ():
            found[output.request_id].append(output)
    return found


def tokens_of(outputs: Outputs) -> dict[str, list[int]]:
    for each in outputs.values():
        assert all(output.error is None for output in each)
    return {
        name: [token for output in each for token in output.token_ids]
        for name, each in outputs.items()
    }


def run_way(executor: Executor, way: Way, asked: Sequence[AddRequest]) -> Outputs:
    speculation = None
    if way.drafts:
        config = way.drafter or SpeculativeConfig(
            "ngram", way.drafts, prompt_lookup_min=1, enable_adaptive_verification=False
        )
        speculation = Speculation(config, build_drafter(config), way.drafter is not None)
    limits = SchedulerConfig(way.budget, way.batch, 1000)
    cache = CacheConfig(way.num_blocks, way.block_size)
    adapters = Adapters(AdapterSlots(NUM_SLOTS, 2 * NUM_SLOTS, executor.read_adapter))
    scheduler = Scheduler(cache, limits, features=[adapters, speculation])
    core = EngineCore(scheduler, Lent(executor), lambda: 0.0, way.overlap)
    found = outputs_of(core, asked)
    core.shutdown()
    stats = scheduler.stats()
    assert bool(stats.scheduler.num_preemptions) == way.preempts
    counts = stats.speculation
    used = counts.num_draft_tokens if way.drafter else counts.num_accepted_tokens
    assert bool(used) == bool(way.drafts)
    return found
