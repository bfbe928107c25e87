"""A small pool under many clients: none starves, none is preempted again and again."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker.step_driver import END
from worker.config import CacheConfig, SchedulerConfig
from worker.engine import policies
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import Draw, ModelOutput, SamplingParams, SchedulerOutput

Make = Callable[..., AddRequest]


@dataclass
class Client:
    since: int
    length: int
    received: int = 0


class Clients:
    def __init__(self, engine: Scheduler, rng: Random, count: int, total: int) -> None:
        self.engine = engine
        self.rng = rng
        self.count = count
        self.left = total
        self.open: dict[str, Client] = {}
        self.waits: list[int] = []
        self.preemptions: list[int] = []
        self.num_aborted = 0
        self.num_sent = 0
        self.stems = [[rng.randrange(1, 50_000) for _ in range(64)] for _ in range(4)]

    def send(self, now: int) -> None:
        rng = self.rng
        while len(self.open) < self.count and self.left:
            longest = rng.choice([10, 30, 80, 200, 500, 900])
            own = [
                rng.randrange(1, 50_000) for _ in range(rng.randrange(longest // 2, longest + 1))
            ]
            prompt = (rng.choice(self.stems) if rng.random() < 0.5 else []) + own
            name = str(self.num_sent)
            # The engine does not know how long the answer will be.
            params = SamplingParams(max_tokens=3000)
            assert not self.engine.add(AddRequest(name, prompt, params, 0.0))
            self.open[name] = Client(now, min(600, int(rng.expovariate(1 / 80)) + 1))
            self.num_sent += 1
            self.left -= 1

    def give_up(self) -> None:
        if self.open and self.rng.random() < 0.01:
            name = self.rng.choice(sorted(self.open))
            assert self.engine.abort(name) is not None
            del self.open[name]
            self.num_aborted += 1

    def answer(self, step: SchedulerOutput, names: dict[int, str], now: int) -> None:
        sampled = {}
        for sequence in step.sequences:
            if sequence.samples:
                client = self.open.get(names[sequence.seq_id])
                last = client is None or client.received + 1 >= client.length
                sampled[sequence.seq_id] = (Draw(END if last else 1),)
        for output in self.engine.update(step, ModelOutput(sampled), float(now)):
            client = self.open[output.request_id]
            client.received += 1
            if client.received == 1:
                self.waits.append(now - client.since)
            if output.finish_reason is not None:
                self.preemptions.append(output.num_preemptions)
                del self.open[output.request_id]


@pytest.mark.parametrize("victim", ["recompute-cost", "last"])
def test_32_clients_in_200_blocks(victim: str) -> None:
    engine = Scheduler(
        CacheConfig(200, 16),
        SchedulerConfig(max_num_batched_tokens=512, max_model_len=3000, victim=victim),
        (END,),
    )
    clients = Clients(engine, Random(7), count=32, total=400)
    now = 0
    while clients.open or clients.left:
        clients.send(now)
        clients.give_up()
        step = engine.schedule(float(now))
        now += 1
        if step is not None:
            names = {s.seq_id: str(s.seq_id) for s in step.sequences}
            clients.answer(step, names, now)
        if now % 50 == 0:
            engine.check_integrity()
    assert engine.stats().scheduler.num_preemptions > 50
    assert len(clients.preemptions) + clients.num_aborted == 400
    assert max(clients.preemptions) <= policies.MAX_PREEMPTIONS
    # An answer takes 80 steps on average and the pool holds 8 requests: the fair wait is about
    # 32 / 8 × 80 steps.
    assert max(clients.waits) < 4 * 320
    assert engine.blocks.num_free == 200


@examples(60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    max_bypasses=st.integers(0, 5),
    waiting_order=st.sampled_from(policies.WAITING_ORDERS),
    victim=st.sampled_from(sorted(policies.VICTIM_POLICIES)),
    size=st.integers(1, 30),
    seed=st.integers(0, 1 << 32),
)
def test_no_request_starves_behind_an_endless_stream(
    make_request: Make, max_bypasses: int, waiting_order: str, victim: str, size: int, seed: int
) -> None:
    """However many small or well cached requests keep coming, any one request has its answer after
    a bounded number of steps.
    """
    rng = Random(seed)
    limits = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_bypasses=max_bypasses,
        waiting_order=waiting_order,
        victim=victim,
        in_batch_prefix_tokens=4,
    )
    engine = Scheduler(CacheConfig(8, 4), limits, (END,))
    waits_for = None
    for now in range(400):
        if engine.num_waiting < 6:
            prompt = [rng.randrange(1, 3)] * rng.randrange(1, 9)
            engine.add(make_request(f"{now}", prompt, max_tokens=rng.randrange(1, 9)))
        if now == 20:
            waits_for = f"patient {now}"
            engine.add(make_request(waits_for, [9] * size, max_tokens=2))
        step = engine.schedule(0.0)
        assert step is not None
        draws = {s.seq_id: (Draw(1),) for s in step.sequences if s.samples}
        for output in engine.update(step, ModelOutput(draws), 0.0):
            assert output.num_preemptions <= policies.MAX_PREEMPTIONS
            if output.request_id == waits_for and output.finish_reason is not None:
                return
    raise AssertionError("it waits for ever")
