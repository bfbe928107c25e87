"""Which of the target's tokens a head can say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from worker.training.store import Sample


def choose_draft_vocab(
    samples: Iterable[Sample], vocab_size: int, size: int, always: Sequence[int]
) -> Tensor:
    """The `size` tokens that the targets of `samples` have most of, as ascending ids [size] int64.

    `always` are among them. Ties go to the lower id: byte-pair vocabularies list frequent tokens
    first, so rare ones that the samples happen not to have are made up for.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.token_ids[sample.is_target], minlength=vocab_size)
    counts[list(always)] = int(counts.max()) + 1
    likeliest = counts.argsort(descending=True, stable=True)[: min(size, vocab_size)]
    return likeliest.sort().values
