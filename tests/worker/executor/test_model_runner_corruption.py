"""Keys and values that are not numbers ruin only the sequence that has them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from worker.errors import ModelError
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.sample import NOT_NUMBERS
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

PARAMS = SamplingParams(max_tokens=1, temperature=0.8, seed=3, logprobs=3)
NUM_BLOCKS = 12
PROMPTS = {1: [5, 9, 33, 21], 2: [17, 80, 3], 3: list(range(30, 55))}


class Bench:
    def __init__(self, checkpoint: Path) -> None:
        model = load_model(checkpoint, torch.float32, torch.device("cpu"))
        config = model.config
        self.embedding = model.embedding.weight
        shape = (config.num_layers, NUM_BLOCKS, 2, config.num_kv_heads, 16, config.head_dim)
        self.cache = torch.zeros(shape)
        self.runner = ModelRunner(model, self._refuse, lambda: self.cache)

    @staticmethod
    def _refuse() -> LlamaModel:
        raise ModelError("not asked for here")

    def run(
        self, *sequences: ScheduledSequence, copies: tuple[tuple[int, int], ...] = ()
    ) -> ModelOutput:
        return execute(self.runner, SchedulerOutput(0, sequences, copies))


@pytest.fixture
def bench(tiny_checkpoint: Path) -> Bench:
    return Bench(tiny_checkpoint)


def sequence(
    seq_id: int, tokens: Sequence[int], start: int, table: list[int], *, draws: bool = True
) -> ScheduledSequence:
    samples = (SampleSpec(PARAMS, start + len(tokens)),) if draws else ()
    return ScheduledSequence(seq_id, tokens, start, table, samples)


def prompts(tables: dict[int, list[int]]) -> list[ScheduledSequence]:
    return [sequence(seq_id, PROMPTS[seq_id], 0, table) for seq_id, table in tables.items()]


def decodes(tables: dict[int, list[int]]) -> list[ScheduledSequence]:
    return [
        sequence(seq_id, [seq_id], len(PROMPTS[seq_id]), table) for seq_id, table in tables.items()
    ]


TABLES = {1: [0, 1], 2: [2, 3], 3: [4, 5, 6]}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("plane", [0, 1])
def test_neighbours_of_a_corrupted_sequence_are_identical(
    bench: Bench, tiny_checkpoint: Path, value: float, plane: int
) -> None:
    bench.run(*prompts(TABLES))
    healthy = Bench(tiny_checkpoint)
    healthy.run(*prompts(TABLES))
    expected = healthy.run(*decodes(TABLES))
    bench.cache[1, 2, plane, 1, 2] = value
    output = bench.run(*decodes(TABLES))
    assert output.failed == {2: NOT_NUMBERS}
    assert output.sampled == {i: expected.sampled[i] for i in (1, 3)}


@pytest.mark.parametrize("draws", [True, False])
def test_blocks_of_a_failed_sequence_can_be_used_again(
    bench: Bench, tiny_checkpoint: Path, draws: bool
) -> None:
    """Slots behind the new owner's tokens hold no nan that a masked key would spread."""
    bench.run(*prompts(TABLES))
    bench.cache[:, 2] = torch.nan
    output = bench.run(sequence(2, [7, 8], 3, [2, 3], draws=draws))
    assert output.failed == {2: NOT_NUMBERS}
    reused = {1: [2, 3], 3: [3, 0, 1]}
    assert bench.cache[0, 2].isnan().any()
    healthy = Bench(tiny_checkpoint)
    for steps in (prompts, decodes):
        found = bench.run(*steps(reused))
        assert not found.failed
        assert found == healthy.run(*steps(reused))


def drafted(drafts: Sequence[int]) -> ScheduledSequence:
    samples = (SampleSpec(PARAMS, 4),)
    return ScheduledSequence(2, [2, *drafts], 3, [2, 3], samples, num_drafts=len(drafts))


def test_a_draft_the_model_cannot_take_spoils_nothing(bench: Bench, tiny_checkpoint: Path) -> None:
    """The draft is not drawn, although its keys were in the sequence's own block."""
    healthy = Bench(tiny_checkpoint)
    for each in (bench, healthy):
        each.run(*prompts({1: [0, 1], 2: [2, 3]}))
    bench.embedding[95] = torch.nan
    output = bench.run(drafted([95, 7]), *decodes({1: [0, 1]}))
    assert output == healthy.run(*decodes({2: [2, 3], 1: [0, 1]}))
    [draw] = output.sampled[2]
    for start in (4, 5, 6):
        step = sequence(2, [draw.token_id], start, [2, 3])
        output = bench.run(step)
        assert output == healthy.run(step)
        [draw] = output.sampled[2]


def test_blocks_reserved_but_not_reached_are_not_read(bench: Bench, tiny_checkpoint: Path) -> None:
    """A table may be longer than its sequence, and block 0 may belong to any sequence."""
    healthy = Bench(tiny_checkpoint)
    bench.cache[:, [0, 5, 6, 7]] = torch.nan
    tables = {1: [1, 5, 6, 7], 2: [2]}
    for steps in (prompts, decodes):
        assert bench.run(*steps(tables)) == healthy.run(*steps(tables))


def test_a_copied_block_is_as_bad_as_its_source(bench: Bench, tiny_checkpoint: Path) -> None:
    """The good head of a block serves a partial hit although its tail is spoiled."""
    bench.run(*prompts(TABLES))
    bench.cache[:, 0, :, :, 3:] = torch.nan  # all but the first three tokens of sequence 1
    assert bench.run(*decodes({1: [0, 1]})).failed == {1: NOT_NUMBERS}
    follower = sequence(9, [40, 41], 3, [8])
    output = bench.run(follower, copies=((0, 8),))
    healthy = Bench(tiny_checkpoint)
    healthy.run(*prompts({1: [0, 1]}))
    assert output == healthy.run(follower, copies=((0, 8),))
    assert 9 in output.sampled


def test_sharers_of_a_corrupted_prefix_fail_too(bench: Bench) -> None:
    bench.run(*prompts({3: [4, 5]}))
    bench.cache[0, 4, 1, 0, 3] = torch.nan
    shared = [sequence(7, [1], 16, [4, 8]), sequence(8, [2], 16, [4, 9])]
    assert bench.run(*shared).failed == {7: NOT_NUMBERS, 8: NOT_NUMBERS}
    assert bench.run(*shared).failed == {7: NOT_NUMBERS, 8: NOT_NUMBERS}
