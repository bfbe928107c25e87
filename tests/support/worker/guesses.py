"""Drafters with scripted guesses, and schedulers that ask them, driven step by step."""

from collections.abc import Sequence

from tests.support.worker.step_driver import drawn, make_request
from worker.config import SpeculativeConfig
from worker.engine.drafters.interface import DraftContext
from worker.engine.features.speculation import Speculation
from worker.engine.messages import RequestOutput
from worker.engine.scheduling.scheduler import Scheduler
from worker.types import Drafts, ScheduledSequence, SchedulerOutput


class Says:
    def __init__(self, *token_ids: object, shift: int = 0) -> None:
        self.token_ids = token_ids
        self.shift = shift
        self.asked: list[tuple[int, int]] = []  # sequence, how many
        self.ended: list[DraftContext] = []
        self.learning: list[int] = []  # sequences whose outputs are to be learnt from

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        self.asked.append((context.seq_id, num_tokens))
        position = len(context.token_ids) + self.shift
        confidences = (0.5,) * len(self.token_ids)
        return Drafts(position, self.token_ids, confidences)  # type: ignore[arg-type]

    def end(self, context: DraftContext, learns: bool) -> None:
        self.ended.append(context)
        if learns:
            self.learning.append(context.seq_id)

    def learn(self, num_tokens: int) -> None: ...


class Raises(Says):
    def __init__(self, seq_id: int, *token_ids: int) -> None:
        super().__init__(*token_ids)
        self.seq_id = seq_id

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        drafts = super().propose(context, num_tokens)
        if context.seq_id == self.seq_id:
            raise RuntimeError("no idea")
        return drafts

    def end(self, context: DraftContext, learns: bool) -> None:
        super().end(context, learns)
        if context.seq_id == self.seq_id:
            raise RuntimeError("cannot let go")


def by(
    drafter: Says | None,
    most: int = 8,
    vocab_size: int | None = 1000,
    by_batch: tuple[tuple[int, int, int], ...] = (),
) -> Speculation:
    """Return a speculation with drafts by `drafter` or, without one, by the device."""
    config = SpeculativeConfig(
        "eagle" if drafter is None else "ngram",
        most,
        enable_adaptive_verification=False,
        num_speculative_tokens_per_batch_size=by_batch,
    )
    return Speculation(config, drafter, drafter is None, vocab_size)


def asked(
    engine: Scheduler, names: str = "a", prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 20
) -> Scheduler:
    for name in names:
        engine.add(make_request(name, prompt, max_tokens=max_tokens))
    return engine


def scheduled(engine: Scheduler) -> SchedulerOutput:
    step = engine.schedule(0.0)
    assert step is not None
    engine.check_integrity()
    return step


def share_of(step: SchedulerOutput, seq_id: int = 0) -> ScheduledSequence:
    return next(s for s in step.sequences if s.seq_id == seq_id)


def take_in(
    engine: Scheduler, step: SchedulerOutput, tokens: dict[int, int | tuple[int, ...]]
) -> list[RequestOutput]:
    outputs = engine.update(step, drawn(tokens), 0.0)
    engine.check_integrity()
    return outputs
