"""The interfaces of a drafter on the device: to the model runner, and to its own network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.llama import StepTensors
from worker.types import Drafts, ModelOutput, SamplingParams, ScheduledSequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for up to `num_drafts` drafts of one sequence, starting at `position`.

    The target has run every token before `last_token`, which is at `position` - 1. `block_table`
    covers the positions of the drafts, too.
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
    """Drafts by sequence id, and the seconds that catch-up took besides the rounds."""

    drafts: dict[int, Drafts]
    catch_up_seconds: float = 0.0


class DraftNetwork(Protocol):
    """The part of a drafter that computes. It holds no state between steps.

    Row p has the token at position p. A network that `reads_states` also takes the target's state
    of position p - 1, so it has no row 0.
    """

    config: ModelConfig  # the shape of its layers, and so of its cache
    reads_states: bool
    layers: tuple[int, ...]  # of the target, whose inputs `reduce` takes
    max_positions: int  # the exclusive upper bound of row positions
    draft_vocab: Tensor | None  # the target's ids [Vd] of the columns of `logits`; None: all

    def reduce(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return features [T, hidden] of the target's rows, which are stored for `run`.

        `states` are the target's before its final norm, `inputs` those that enter `layers`, all
        [T, hidden_size]. Called only if the network `reads_states`.
        """

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Return hidden states [T, hidden] of all rows. `features` [T, hidden] are those of
        `reduce` for the previous positions, or this method's results for these.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, Vd] float32 of hidden states [R, hidden]; each row independently."""
