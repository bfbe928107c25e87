"""Drafts of the device: what reading for them costs, and what there is room for."""

import random
from dataclasses import dataclass, field

import pytest

from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import Drafts, Draw, ModelOutput, SamplingParams, SchedulerOutput

STEP, TOKEN, ROUND, ROW = 0.1, 0.001, 0.01, 0.0004  # seconds


@dataclass
class Device:
    """Runs steps in virtual time: drafts are accepted by chance `acceptance`."""

    acceptance: float
    seconds: float = 0.0
    drafted: int = 0
    verified: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    read: dict[int, int] = field(default_factory=dict)

    def run(self, engine: Scheduler) -> None:
        while (step := engine.schedule(self.seconds)) is not None:
            result = self.execute(step)
            spent = STEP + TOKEN * step.num_tokens
            self.seconds += spent + result.drafting_seconds + result.catch_up_seconds
            engine.update(step, result, self.seconds)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        rows_left = max(64, 2 * step.num_tokens)
        sampled: dict[int, tuple[Draw, ...]] = {}
        drafts: dict[int, Drafts] = {}
        rows = 0
        for share in step.sequences:
            self.verified += share.num_drafts
            if not share.samples:
                continue
            stood = 0
            while stood < share.num_drafts and self.rng.random() < self.acceptance:
                stood += 1
            sampled[share.seq_id] = tuple(Draw(t) for t in [*share.drafts[:stood], 7])
            if share.num_to_draft:
                end = share.start + len(share.token_ids) - share.num_drafts + stood + 1
                behind = end - self.read.get(share.seq_id, 0) - share.num_to_draft - 2
                now = min(max(0, behind), rows_left - rows)
                rows += now
                if now < behind:
                    self.read[share.seq_id] = self.read.get(share.seq_id, 0) + now
                    continue
                self.read[share.seq_id] = end
                count = share.num_to_draft
                drafts[share.seq_id] = Drafts(end, (5,) * count, (0.5,) * count)
        rounds = [len(one.token_ids) for one in drafts.values()]
        self.drafted += sum(rounds)
        seconds = ROUND * max(rounds, default=0)
        return ModelOutput(
            sampled, drafts=drafts, drafting_seconds=seconds, catch_up_seconds=ROW * rows
        )


def engine_of(num: int, is_speculating: bool, shape: tuple[int, int], **limits: int) -> Scheduler:
    """Return the steps of `count` requests of `shape` (tokens of the prompt, of the answer)."""
    config = SpeculativeConfig("draft_model", 4)
    speculation = Speculation(config, None, True, 50_000) if is_speculating else None
    cache = CacheConfig(4000, 16, enable_prefix_caching=False)
    engine = Scheduler(cache, SchedulerConfig(**limits), (0,), [speculation])
    num_prompt, num_outputs = shape
    params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    for number in range(num):
        engine.add(AddRequest(str(number), [1 + number] * num_prompt, params, 0.0))
    return engine


@pytest.mark.parametrize(
    ("acceptance", "num_prompt", "least"), [(0.7, 20, 1.5), (0.7, 1500, 1.3), (0.0, 1500, 0.97)]
)
def test_a_prompt_that_is_read_first_does_not_hide_what_drafts_win(
    acceptance: float, num_prompt: int, least: float
) -> None:
    seconds = []
    for is_speculating in (False, True):
        device = Device(acceptance)
        device.run(engine_of(10, is_speculating, (num_prompt, 100), max_num_seqs=1))
        seconds.append(device.seconds)
    assert seconds[0] / seconds[1] >= least


@pytest.mark.parametrize("budget", [8, 9, 11])
def test_no_drafts_are_made_that_the_next_step_cannot_verify(budget: int) -> None:
    device = Device(1.0)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": budget}
    device.run(engine_of(8, True, (3, 300), **limits))
    assert device.drafted - device.verified <= max(8, 0.05 * device.drafted)
    assert (device.drafted > 0) == (budget > 8)
