"""Shards contain the target's own text, and an interruption does not change them."""

import random
from pathlib import Path

import torch

from tests.support.model.tiny_llama import states_of
from worker.models.llama import LlamaModel
from worker.training.conversations import Continuation, Conversation, Given
from worker.training.store import TrainingSample, read_samples, shard_indices, shard_path
from worker.training.writing import TextWriter

PREFIX = (5, 6)
END = 60


def talk(index: int, turns: int = 2) -> Conversation:
    rng = random.Random(index)
    yield Given(PREFIX)
    for turn in range(turns):
        yield Given(tuple(rng.randrange(60) for _ in range(rng.randint(1, 4))))
        said = yield Continuation(rng.randint(3, 9), temperature=0.0 if turn == 0 else 9.0)
        assert said
    return True


def writer(target: LlamaModel, num_rows: int = 5, last: int | None = None) -> TextWriter:
    def opened(index: int) -> Conversation | None:
        return talk(index) if last is None or index < last else None

    return TextWriter(target, (num_rows, 48), opened, [END])


def everything(directory: Path) -> list[TrainingSample]:
    shards = shard_indices(directory)
    return [sample for n in shards for sample in read_samples(shard_path(directory, n))]


def test_features_are_those_of_the_text_and_greedy_answers_are_greedy(
    target: LlamaModel, tmp_path: Path
) -> None:
    writer(target, last=12).write(tmp_path, 1000, 0, lambda count: True)
    samples = everything(tmp_path)
    assert len(samples) == 12
    for sample in samples:
        wanted = states_of(target, sample.token_ids.tolist())[:-1]
        torch.testing.assert_close(sample.features, wanted, rtol=1e-4, atol=1e-4)
        first = int(sample.is_target.nonzero()[0])
        greedy = target.logits(wanted[first - 1 : first + 2]).argmax(dim=-1)
        assert sample.token_ids[first : first + 3].tolist() == greedy.tolist()


def test_an_interrupted_run_ends_with_the_same_shards(target: LlamaModel, tmp_path: Path) -> None:
    wanted = writer(target).write(tmp_path / "whole", 550, 3, lambda count: True)
    for limit in (150, 400):
        part = writer(target, num_rows=3)
        part.write(tmp_path / "parts", 550, 3, lambda count, limit=limit: count < limit)
    assert writer(target).write(tmp_path / "parts", 550, 3, lambda count: True) == wanted
    for shard in wanted:
        pairs = zip(
            read_samples(shard_path(tmp_path / "whole", shard)),
            read_samples(shard_path(tmp_path / "parts", shard)),
            strict=True,
        )
        for one, other in pairs:
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.is_target.tolist() == other.is_target.tolist()


def test_existing_shards_are_reported_before_the_first_step(
    target: LlamaModel, tmp_path: Path
) -> None:
    shards = writer(target).write(tmp_path, 100, 0, lambda count: True)
    there = sum(int(s.is_target.sum()) for s in everything(tmp_path))
    reported: list[int] = []

    def stopped(count: int) -> bool:
        reported.append(count)
        return False

    assert writer(target).write(tmp_path, 10 * there, 0, stopped) == shards
    assert reported == [there]


def test_another_seed_samples_other_tokens(target: LlamaModel, tmp_path: Path) -> None:
    for seed in (0, 1):
        writer(target, last=6).write(tmp_path / str(seed), 1000, seed, lambda count: True)
    one, other = (everything(tmp_path / str(seed)) for seed in (0, 1))
    assert [s.token_ids.tolist() for s in one] != [s.token_ids.tolist() for s in other]


def test_a_loop_is_cut_to_two_rounds(target: LlamaModel, tmp_path: Path) -> None:
    def opened(index: int) -> Conversation | None:
        def stutter() -> Conversation:
            yield Given((*PREFIX, 3))
            yield Continuation(200, temperature=0.0)
            return True

        return stutter() if index == 0 else None

    TextWriter(target, (2, 260), opened, [END]).write(tmp_path, 500, 0, lambda count: True)
    (sample,) = everything(tmp_path)
    said = sample.token_ids[sample.is_target].tolist()
    assert len(said) < 150
    size = next(n for n in range(1, 41) if said[-n:] == said[-2 * n : -n])
    assert said[-3 * size : -2 * size] != said[-size:]


def test_a_given_text_is_read_to_its_end(target: LlamaModel, tmp_path: Path) -> None:
    def opened(index: int) -> Conversation | None:
        def read() -> Conversation:
            yield Given(PREFIX)
            yield Given(tuple(range(10, 25)), is_target=True)
            return index == 0

        return read() if index < 2 else None

    TextWriter(target, (2, 32), opened, [END]).write(tmp_path, 100, 0, lambda count: True)
    (sample,) = everything(tmp_path)
    assert sample.token_ids.tolist() == [*PREFIX, *range(10, 25)]
    assert sample.is_target.tolist() == [False] * 2 + [True] * 15
