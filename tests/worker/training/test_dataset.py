"""Batches contain every target once, with the inputs of the head."""

import random

import pytest
import torch

from worker.errors import ConfigError
from worker.training.dataset import TrainingBatch, batches, choose_draft_vocab, collate, divide
from worker.training.store import TrainingSample


def sample(length: int, mark: int) -> TrainingSample:
    """Token i is 100 · mark + i, and so is every number of feature i."""
    ids = 100 * mark + torch.arange(length)
    features = ids[:-1, None].float().expand(-1, 4)
    return TrainingSample(ids, torch.arange(length) % 3 != 0, features)


def made(count: int) -> list[TrainingSample]:
    return [sample(3 + (7 * mark) % 11, mark) for mark in range(count)]


def test_a_row_has_its_state_the_next_token_and_the_one_to_predict() -> None:
    batch = collate([sample(6, 1), sample(4, 2)])
    assert batch.next_ids.tolist() == [[101, 102, 103, 104], [201, 202, 0, 0]]
    assert batch.features[:, :, 0].tolist() == [[100, 101, 102, 103], [200, 201, 0, 0]]
    flat = batch.next_ids.flatten()[batch.rows]
    assert batch.said_ids.tolist() == [102, 104, 105, 202]
    assert (flat + 1).tolist() == batch.said_ids.tolist()
    assert batch.expected[:, 0].tolist() == flat.tolist()


def test_every_target_is_in_one_batch_of_a_round() -> None:
    samples = made(40)
    wanted = sorted(t for s in samples for t in s.token_ids[2:][s.is_target[2:]].tolist())
    for rng in (None, random.Random(0)):
        found = [b for b in batches(samples, 32, rng) if b is not None]
        assert sorted(t for b in found for t in b.said_ids.tolist()) == wanted
        assert all(b.next_ids.numel() <= 32 for b in found)


def test_skipping_batches_does_not_change_the_others() -> None:
    """Training resumes in this way."""

    def tokens(skip: int) -> list[list[int] | None]:
        found = batches(made(30), 32, random.Random(5), skip)
        return [None if b is None else b.said_ids.tolist() for b in found]

    assert tokens(3) == [None] * 3 + tokens(0)[3:]


def test_about_one_text_in_twelve_is_held_out() -> None:
    samples = made(240)
    learned, held_out = divide(samples)
    assert 10 < len(held_out) < 30
    assert sorted(map(id, learned + held_out)) == sorted(map(id, samples))
    some = divide(samples[::2])[1]
    assert {id(s) for s in some} == {id(s) for s in held_out} & {id(s) for s in samples[::2]}


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        divide([sample(5, 1)])


def test_a_repeated_text_counts_once() -> None:
    with pytest.raises(ConfigError, match=r"1 different texts .*--text"):
        divide([sample(9, 1)] * 5)
    learned, held_out = divide([sample(9, 1), sample(9, 2)] * 3)
    assert (len(learned), len(held_out)) == (1, 1)


def test_the_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    said = torch.tensor([9, 9, 9, 7, 7, 8])
    samples = [TrainingSample(said, torch.tensor([True] * 5 + [False]), torch.zeros(5, 1))]
    assert choose_draft_vocab(samples, 20, 5, [19]).tolist() == [0, 1, 7, 9, 19]
    assert choose_draft_vocab(samples, 20, 50, [19]).tolist() == list(range(20))


def test_a_batch_on_its_device_is_not_copied() -> None:
    batch = collate([sample(6, 1)])
    assert isinstance(batch, TrainingBatch)
    assert batch.to(torch.device("cpu")) is batch
