"""Drives a scheduler step by step with tokens of the test's choice instead of a model."""

from collections.abc import Iterator, Sequence
from typing import Any

from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, RequestOutput, StepOutputs
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import Draw, ModelOutput, SamplingParams, SchedulerOutput

END = 0


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    branches: Sequence[str] = (),
    **params: Any,
) -> AddRequest:
    sampling = SamplingParams(**{"max_tokens": 4, **params})
    return AddRequest(request_id, list(prompt), sampling, 0.0, priority, cache_salt, list(branches))


def scheduler(
    num_blocks: int = 64, block_size: int = 4, speculation: Speculation | None = None, **limits: Any
) -> Scheduler:
    cache = CacheConfig(num_blocks, block_size, enable_partial_hits=False)
    return Scheduler(cache, SchedulerConfig(**limits), (END,), [speculation])


def plan(step: SchedulerOutput | None) -> dict[int, int]:
    return {s.seq_id: s.num_tokens for s in step.sequences}


def drawn(tokens: dict[int, int | tuple[int, ...]]) -> ModelOutput:
    """Return one token for each sequence id, one for each of its answers, or a run of them."""
    draws = {
        seq_id: tuple(Draw(t) for t in ((token,) if isinstance(token, int) else token))
        for seq_id, token in tokens.items()
    }
    return ModelOutput(draws)


def result_of(step: SchedulerOutput, tokens: dict[int, int | tuple[int, ...]]) -> ModelOutput:
    return drawn(
        {s.seq_id: tokens.get(s.seq_id, (1,) * len(s.samples)) for s in step.sequences if s.samples}
    )


def advance(
    engine: Scheduler, tokens: dict[int, int | tuple[int, ...]] | None = None, now: float = 0.0
) -> tuple[dict[int, int], list[RequestOutput]]:
    step = engine.schedule(now)
    planned = plan(step)
    engine.check_integrity()
    outputs = engine.update(step, result_of(step, tokens or {}), now)
    engine.check_integrity()
    return planned, outputs


def steps(core: EngineCore) -> Iterator[StepOutputs]:
    while core.has_work:
        if (reported := core.step()) is not None:
            yield reported


def outputs(core: EngineCore) -> list[RequestOutput]:
    return [output for step in steps(core) for output in step.outputs]
