"""A checked request, ready to run: what to ask of the engine, and how to answer. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.api.generate.frames import Frames
from worker.api.generate.logprobs import LogprobsWriter
from worker.api.schema.params import TextParams
from worker.engine.messages import AddRequest


@dataclass(frozen=True, slots=True)
class Shown:
    """Which facts an answer shows besides its text. `new_logprobs` makes the writer of one choice;
    None: log probabilities were not asked for. `prompt_logprobs` is how many of the likeliest
    tokens go with each token of the prompt. `usage` and `continuous_usage` are about streams, and
    so is `interval`: tokens per frame.
    """

    new_logprobs: Callable[[], LogprobsWriter] | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    cached_tokens: bool = True
    metrics: bool = False
    usage: bool = False
    continuous_usage: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """A beam search instead of draws. `num_logprobs` is how many of the likeliest tokens to show,
    `end_ids` end a beam.
    """

    width: int
    length_penalty: float
    num_logprobs: int
    end_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: what to ask of the engine, and how to answer. `echoes` are the texts of
    the prompts, where the answer begins with them.
    """

    requests: tuple[AddRequest, ...]
    text: TextParams
    frames: Frames
    stream: bool
    shown: Shown
    echoes: tuple[str, ...] = ()
    beam: BeamOptions | None = None
    keep_alive_seconds: float | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences run at once."""
        width = 1 if self.beam is None else self.beam.width
        return sum(width + len(request.branch_ids) for request in self.requests)
