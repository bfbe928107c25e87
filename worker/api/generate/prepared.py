"""A checked request: the requests to the engine, and the form of the answer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from worker.api.generate.frames import Frames
from worker.api.generate.logprobs import LogprobsWriter
from worker.api.generate.resumption import Resumption
from worker.api.http.arrival import Arrival
from worker.api.schema.constraints import Constraint
from worker.api.schema.params import TextParams
from worker.api.tools.answer import AnswerForm
from worker.engine.messages import AddRequest


@dataclass(frozen=True, slots=True)
class Shown:
    """The facts that an answer shows besides its text. `new_logprobs` makes the writer of a choice;
    `prompt_logprobs` is the number of likeliest tokens with each token of the prompt. `usage`,
    `continuous_usage` and `interval` (tokens per frame) concern streams.
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
class Prepared:
    """A checked request. `echoes` are the prompts' texts with which the answers begin."""

    requests: tuple[AddRequest, ...]
    text: TextParams
    frames: Frames
    stream: bool
    shown: Shown
    echoes: tuple[str, ...] = ()
    keep_alive_seconds: float | None = None
    constraint: Constraint | None = None
    form: AnswerForm | None = None
    resumption: Resumption | None = None

    @property
    def num_sequences(self) -> int:
        pairs = ((request, request.params.beam) for request in self.requests)
        return sum(1 + len(r.branch_ids) if beam is None else beam.width for r, beam in pairs)

    @property
    def num_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) + len(r.output_token_ids) for r in self.requests)


Prepare = Callable[[bytes, Arrival], Awaitable[Prepared]]
