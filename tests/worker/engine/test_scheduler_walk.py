"""Whatever the limits, every request gets the tokens it would get alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduler import Scheduler
from worker.types import FinishReason, SamplingParams

Follow = Callable[[Sequence[int], int], int]
END = 0


@dataclass
class Arrival:
    """A request, the step before which it comes, and the step before which it is aborted."""

    request: AddRequest
    at_step: int
    abort_at: int | None


@dataclass
class Received:
    """What the client of one request saw."""

    tokens: list[int] = field(default_factory=list)
    endings: list[RequestOutput] = field(default_factory=list)


def alone(request: AddRequest, limit: int, follow: Follow) -> tuple[list[int], FinishReason]:
    """The answer by the definition: no blocks, no batch, no cache."""
    context, params = list(request.prompt_token_ids), request.params
    outputs: list[int] = []
    while True:
        token = follow(context, params.seed)
        context.append(token)
        outputs.append(token)
        may_stop = len(outputs) >= params.min_tokens
        if may_stop and token == END and not params.ignore_eos:
            return outputs, FinishReason.STOP
        if may_stop and token in params.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) == params.max_tokens or len(context) == limit:
            return outputs, FinishReason.LENGTH


# Few distinct tokens and stems make shared prefixes common.
prompts = st.builds(
    lambda stem, tail: stem + tail,
    st.sampled_from([[], [1] * 5, [1] * 8, [1, 2, 1, 2, 1, 2, 1, 2, 1], [3] * 16]),
    st.lists(st.integers(1, 2), min_size=1, max_size=7),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    seed=st.integers(0, 2),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (6,)]),
)
arrivals = st.builds(
    Arrival,
    request=st.builds(
        AddRequest,
        request_id=st.uuids().map(str),
        prompt_token_ids=prompts,
        params=sampling,
        arrival_seconds=st.just(0.0),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        cache_salt=st.sampled_from([None, None, None, "x"]),
    ),
    at_step=st.integers(0, 12),
    abort_at=st.none() | st.integers(0, 20),
)
caches = st.builds(
    CacheConfig,
    num_blocks=st.integers(4, 20),
    block_size=st.sampled_from([1, 2, 4, 8]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    watermark=st.sampled_from([0.0, 0.0, 0.2]),
)
limits_of_a_step = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(16, 64),
    long_prefill_token_threshold=st.integers(0, 6),
)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    cache=caches,
    limits=limits_of_a_step,
    load=st.lists(arrivals, min_size=1, max_size=8, unique_by=lambda a: a.request.request_id),
)
def test_any_batch_answers_as_each_request_alone(
    paged_executor: Callable[[int], object],
    follow: Follow,
    cache: CacheConfig,
    limits: SchedulerConfig,
    load: list[Arrival],
) -> None:
    """Budgets, chunks, hits, preemption and aborts never change, lose or repeat a token."""
    scheduler = Scheduler(cache, limits, (END,))
    executor = paged_executor(cache.block_size)
    core = EngineCore(scheduler, executor, lambda: 0.0)
    received = {arrival.request.request_id: Received() for arrival in load}
    last_event = max(max(a.at_step, a.abort_at or 0) for a in load)
    for step in range(5000):
        for arrival in load:
            if arrival.at_step == step:
                core.add(arrival.request)
            if arrival.abort_at == step:
                core.abort([arrival.request.request_id])
        outputs = core.step()
        scheduler.check_integrity()
        assert scheduler.num_running <= limits.max_num_seqs
        if outputs is not None:
            assert outputs.num_scheduled_tokens <= limits.max_num_batched_tokens
            for output in outputs.outputs:
                seen = received[output.request_id]
                assert not seen.endings
                seen.tokens += output.token_ids
                if output.finish_reason is not None:
                    seen.endings.append(output)
        elif step > last_event:
            break
    else:
        raise AssertionError("the scheduler makes no progress")
    assert scheduler.blocks.num_free == cache.num_blocks
    assert scheduler.num_waiting == 0
    for arrival in load:
        check(arrival.request, received[arrival.request.request_id], scheduler, follow)


def check(request: AddRequest, seen: Received, scheduler: Scheduler, follow: Follow) -> None:
    """One ending each; the tokens are those of the definition, or its start when aborted."""
    (ending,) = seen.endings
    limit = scheduler.max_model_len
    if len(request.prompt_token_ids) >= limit:
        assert ending.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        assert seen.tokens == []
        return
    expected, reason = alone(request, limit, follow)
    if ending.finish_reason is FinishReason.ABORT:
        assert seen.tokens == expected[: len(seen.tokens)]
    else:
        assert (seen.tokens, ending.finish_reason) == (expected, reason)
