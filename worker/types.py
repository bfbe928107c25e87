"""The values every room of the worker shares. Plain ints and tuples; no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended; the value is the OpenAI `finish_reason` and the metric label."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Validated at the API; the engine trusts it.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` is always set: the API draws
    one for requests that give none, so that the engine itself owns no randomness. Stop strings live
    in the API process (it detokenizes); the engine knows token ids only.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Asks the executor for the next token after the last position of a chunk.

    The random numbers of a draw are a pure function of (`seed`, `position`), so that the same
    request gives the same tokens in any batch, chunking or after preemption. `position` is the
    index of the token being drawn. `banned_ids` cannot be drawn.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: run `token_ids` at positions `start`, `start`+1, …

    The KV of position p lives in block `block_table[p // block_size]`, slot `p % block_size`; every
    position below `start` has its KV there already. `sample` is None for a chunk that does not
    reach the sequence's last token.
    """

    seq_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. `block_copies` (source, destination) are done before anything is written."""

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens run in this step."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The tokens drawn in one step, by sequence id, for every sequence whose `sample` was set."""

    sampled: dict[int, int]
