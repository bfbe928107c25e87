"""Samples in memory: learned and held-out ones, their batches, their draft vocabulary."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.errors import ConfigError
from worker.training.store import TrainingSample

# One text in twelve is held out as a whole; at most 256 of these measure the head.
HELD_OUT_EVERY = 12
MAX_HELD_OUT = 256
# Samples that are sorted by length together, so that batches need little padding.
_SORTED_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Padded samples. Row t of a sample is position t: `features` [B, L, H] are those of t,
    `next_ids` [B, L] token t+1; `expected` [N, H] are the target's hidden states of position t+1,
    of the target rows only, whose places in [B · L] are `rows` [N]; `said_ids` [N] is token t+2.
    """

    features: Tensor
    next_ids: Tensor
    rows: Tensor
    expected: Tensor
    said_ids: Tensor

    def to(self, device: torch.device) -> TrainingBatch:
        if self.rows.device == device:
            return self
        parts = (self.features, self.next_ids, self.rows, self.expected, self.said_ids)
        return TrainingBatch(*(part.to(device) for part in parts))


def divide(samples: Sequence[TrainingSample]) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Divide samples into those to learn from and held-out ones. Raise `ConfigError` for too few.

    The choice depends on a sample's tokens alone, so that it is the same with more samples, or when
    a head is trained further. Equal samples are used once.
    """
    usable: dict[int, TrainingSample] = {}
    for sample in samples:
        if len(sample.token_ids) > 2 and bool(sample.is_target[2:].any()):
            usable.setdefault(_mark(sample), sample)
    if len(usable) < 2:
        raise ConfigError(
            f"{len(usable)} different texts are too few to train a draft head; let the model write"
            " more (--tokens, --minutes), or give more to read (--text)"
        )
    held = {mark for mark in usable if mark % HELD_OUT_EVERY == 0}
    if not held or len(held) == len(usable):
        held = {min(usable)}
    learned = [sample for mark, sample in usable.items() if mark not in held]
    held_out = [sample for mark, sample in usable.items() if mark in held]
    return learned, held_out[:MAX_HELD_OUT]


def _mark(sample: TrainingSample) -> int:
    digest = hashlib.sha256(sample.token_ids.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def batches(
    samples: Sequence[TrainingSample], batch_tokens: int, rng: random.Random | None, skip: int = 0
) -> Iterator[TrainingBatch | None]:
    """Yield all samples in padded batches, the first `skip` as None; `rng` None: in order."""
    order = list(range(len(samples)))
    if rng is not None:
        rng.shuffle(order)
    groups: list[list[int]] = []
    for start in range(0, len(order), _SORTED_TOGETHER):
        part = sorted(order[start : start + _SORTED_TOGETHER], key=lambda i: _length(samples[i]))
        groups += _cut(part, samples, batch_tokens)
    if rng is not None:
        rng.shuffle(groups)
    for number, group in enumerate(groups):
        yield None if number < skip else collate([samples[index] for index in group])


def _length(sample: TrainingSample) -> int:
    return len(sample.token_ids)


def _cut(
    order: Sequence[int], samples: Sequence[TrainingSample], batch_tokens: int
) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for index in order:  # ascending in length: the last is the longest
        if groups[-1] and (len(groups[-1]) + 1) * _length(samples[index]) > batch_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def collate(samples: Sequence[TrainingSample]) -> TrainingBatch:
    """Pad samples to the longest. The last two positions of a sample have nothing to predict."""
    length = max(len(sample.token_ids) for sample in samples) - 2
    hidden = samples[0].features.shape[-1]
    features = torch.zeros(len(samples), length, hidden, dtype=samples[0].features.dtype)
    next_ids = torch.zeros(len(samples), length, dtype=torch.int64)
    rows, expected, said = [], [], []
    for index, sample in enumerate(samples):
        count = len(sample.token_ids) - 2
        features[index, :count] = sample.features[:count]
        next_ids[index, :count] = sample.token_ids[1:-1]
        wanted = sample.is_target[2:].nonzero()[:, 0]
        rows.append(wanted + index * length)
        expected.append(sample.features[wanted + 1])
        said.append(sample.token_ids[wanted + 2])
    return TrainingBatch(features, next_ids, torch.cat(rows), torch.cat(expected), torch.cat(said))


def choose_draft_vocab(
    samples: Iterable[TrainingSample], vocab_size: int, size: int, always: Sequence[int]
) -> Tensor:
    """Choose the `size` most frequent target tokens of `samples`, as ascending ids [size] int64.

    `always` are among them. The lower id wins a tie: byte-pair vocabularies list frequent tokens
    first, which compensates for tokens that the samples happen to lack.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.token_ids[sample.is_target], minlength=vocab_size)
    counts[list(always)] = int(counts.max()) + 1
    likeliest = counts.argsort(descending=True, stable=True)[: min(size, vocab_size)]
    return likeliest.sort().values
