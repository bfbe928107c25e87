"""What the model runner asks of a drafter on the device, and what that asks of its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.llama import StepTensors
from worker.types import Drafts, ModelOutput, SamplingParams, ScheduledSequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_drafts` drafts of one sequence, of the tokens at `position` on.

    `last_token` stands at `position` - 1 and has just been drawn; the target has run every token
    before it, and none from it on is in its cache. `block_table` covers those positions, and as
    many as drafts are to be made for.
    """

    seq_id: int
    last_token: int
    position: int
    block_table: Sequence[int]
    params: SamplingParams
    num_drafts: int


def draft_requests(
    sequences: Sequence[ScheduledSequence], output: ModelOutput
) -> list[DraftRequest]:
    """What a step's sequences ask of the drafter, now that `output` has its draws."""
    requests = []
    for sequence in sequences:
        draws = output.sampled.get(sequence.seq_id, ())
        if sequence.num_to_draft == 0 or not draws or len(sequence.samples) != 1:
            continue
        known = sequence.start + len(sequence.token_ids) - sequence.num_drafts
        requests.append(
            DraftRequest(
                sequence.seq_id,
                draws[-1].token_id,
                known + len(draws),
                sequence.block_table,
                sequence.samples[0].params,
                sequence.num_to_draft,
            )
        )
    return requests


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts by sequence id, and how long the drafter read before it began with them, beyond what
    it has to read in every round.
    """

    drafts: dict[int, Drafts]
    catch_up_seconds: float = 0.0


class DraftNetwork(Protocol):
    """The part of a drafter that computes: a model with keys and values in `kv_cache` [num_layers,
    num_blocks, 2, kv_heads, block_size, head_dim]. Holds no state between steps.

    Row p has the token at position p. One that `reads_states` also takes what the target made of
    position p - 1, so it has no row 0.
    """

    @property
    def config(self) -> ModelConfig:
        """The shape of its layers, and with it of its cache."""
        ...

    @property
    def reads_states(self) -> bool:
        """Whether rows need features."""
        ...

    @property
    def max_positions(self) -> int:
        """Rows stand at positions below this."""
        ...

    @property
    def draft_vocab(self) -> Tensor | None:
        """The target's ids [Vd] int64 of the columns of `logits`; None: they are these ids."""
        ...

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Hidden states [T, hidden] of all rows. `features` [T, hidden_size of the target], where
        they are read: the target's states of the positions before, or what this gave for them.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, Vd] float32 of hidden states [R, hidden]; each row on its own."""
        ...
