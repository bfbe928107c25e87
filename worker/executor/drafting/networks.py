"""The two networks that drafters run: a small model of its own, and a trained head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.draft_head import DraftHead
from worker.models.layers import StepTensors
from worker.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class ModelNetwork:
    """A draft model with the target's vocabulary; implements `DraftNetwork`."""

    model: LlamaModel

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    @property
    def reads_states(self) -> bool:
        """Tokens are all it reads."""
        return False

    @property
    def max_positions(self) -> int:
        """As many as it was loaded for and can attend to."""
        return len(self.model.rope.cos)

    @property
    def draft_vocab(self) -> Tensor | None:
        """Its vocabulary is the target's."""
        return None

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """The model's states."""
        return self.model.states(step, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits."""
        return self.model.logits(hidden)


@dataclass(frozen=True, slots=True)
class HeadNetwork:
    """A trained head; implements `DraftNetwork`.

    A head's own row p pairs the target's state of position p with token p + 1. Here that row stands
    at position p + 1 and in its slot, with its token, so that what is kept for a block depends on
    no token behind the block; rotary embedding only sees differences of positions.
    """

    head: DraftHead

    @property
    def config(self) -> ModelConfig:
        """That of the one layer."""
        return self.head.config

    @property
    def reads_states(self) -> bool:
        """Every row continues a state."""
        return True

    @property
    def max_positions(self) -> int:
        """As many as the target's."""
        return len(self.head.rope.cos)

    @property
    def draft_vocab(self) -> Tensor | None:
        """The tokens it can say."""
        return self.head.draft_vocab

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """The head's hidden states."""
        if features is None:
            raise ValueError("a head needs features")
        return self.head.forward(features, step, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits."""
        return self.head.logits(hidden)
