"""A worker in virtual time serves like a real one, without waiting."""

from __future__ import annotations

import pytest
from virtual_worker import VirtualWorker

from worker.config import CacheConfig, SchedulerConfig, SimConfig
from worker.engine.messages import AddRequest
from worker.types import FinishReason, SamplingParams

SIM = SimConfig(
    prefill_tokens_per_second=100.0, decode_base_seconds=1.0, decode_per_sequence_seconds=0.0
)


def worker() -> VirtualWorker:
    """One with room for two requests at a time."""
    return VirtualWorker(SIM, SchedulerConfig(max_num_seqs=2), CacheConfig(16, 16))


def ask(name: str, arrival: float, num_prompt: int = 10, num_output: int = 3) -> AddRequest:
    """A request whose answer runs to its limit."""
    prompt = [300 + int(name)] * num_prompt
    return AddRequest(name, prompt, SamplingParams(num_output, ignore_eos=True), arrival)


def test_requests_are_served_at_the_times_of_the_model() -> None:
    """A prompt takes its tokens' time, every further token a step; idle time is jumped over."""
    virtual = worker()
    virtual.submit(ask("1", 0.0))
    virtual.submit(ask("2", 100.0))
    first, second = virtual.run()
    assert (first.first_token_seconds, first.finished_seconds) == pytest.approx((0.1, 2.1))
    assert (second.first_token_seconds, second.finished_seconds) == pytest.approx((100.1, 102.1))
    assert second.reason is FinishReason.LENGTH
    assert (len(second.token_ids), second.num_prompt) == (3, 10)
    assert virtual.busy_seconds == pytest.approx(4.2)
    assert virtual.num_steps == 6
    assert virtual.stats.kv_cache_usage == 0


def test_a_prefix_served_before_is_not_computed_again() -> None:
    """The prefix cache of the production engine shortens the second prompt."""
    virtual = worker()
    for name, arrival in (("1", 0.0), ("1", 10.0)):
        request = ask(name, arrival, num_prompt=50)
        virtual.submit(AddRequest(f"{arrival}", request.prompt_token_ids, request.params, arrival))
    first, second = virtual.run()
    assert first.num_cached == 0
    assert second.num_cached == 49
    assert second.first_token_seconds == pytest.approx(10.01)


def test_a_run_can_stop_and_go_on() -> None:
    """What has not ended by then is still there."""
    virtual = worker()
    virtual.submit(ask("1", 0.0, num_output=3))
    virtual.submit(ask("2", 0.0, num_output=9))
    assert [one.request_id for one in virtual.run(until_seconds=4.0)] == ["1"]
    assert [one.request_id for one in virtual.run()] == ["2"]
    assert virtual.run() == []


def test_requests_come_in_order_of_arrival() -> None:
    """A clock does not run backwards."""
    virtual = worker()
    virtual.submit(ask("1", 5.0))
    with pytest.raises(ValueError, match="order of arrival"):
        virtual.submit(ask("2", 4.0))
