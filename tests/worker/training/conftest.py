"""Material to train a toy head on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_llama import states_of, tiny_llama

from worker.models.llama import LlamaModel
from worker.training.store import Sample


@pytest.fixture
def target() -> LlamaModel:
    """A model of 61 tokens."""
    return tiny_llama()


@pytest.fixture
def greedy_samples(target: LlamaModel) -> Callable[[int, int], list[Sample]]:
    """So many texts of so many tokens, each gone on with greedily after four random ones."""

    def make(count: int, length: int) -> list[Sample]:
        noise = torch.Generator().manual_seed(7)
        samples = []
        for _ in range(count):
            tokens = torch.randint(0, target.config.vocab_size, (4,), generator=noise).tolist()
            while len(tokens) < length:
                tokens.append(int(target.logits(states_of(target, tokens)[-1:]).argmax()))
            is_target = torch.arange(length) >= 4
            samples.append(Sample(torch.tensor(tokens), is_target, states_of(target, tokens)[:-1]))
        return samples

    return make
