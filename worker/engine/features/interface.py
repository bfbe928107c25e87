"""The interface between the scheduler and its features.

A feature is what a request may ask for beyond tokens (an adapter, a grammar), or what makes steps
cheaper (drafts, tiers). The scheduler calls the hooks below and knows no feature by name. The one
attached last is asked first.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from worker.config import SchedulerConfig
from worker.engine.cache.cache_events import CacheEvent
from worker.engine.messages import AddRequest
from worker.engine.sequences.live_sequences import LiveSequences
from worker.engine.sequences.planning import Guess, StepInFlight, StepPlan
from worker.engine.sequences.sequence import Sequence
from worker.engine.sequences.sequence_kv import SequenceKv
from worker.types import KvOffer, ModelOutput, SchedulerCounters


@dataclass(frozen=True, slots=True)
class EngineState:
    limits: SchedulerConfig
    live: LiveSequences
    kv: SequenceKv
    counters: SchedulerCounters


class Feature:
    """A part that attaches to the scheduler; hooks do nothing by default. `name` is unique."""

    name: str

    def attach(self, state: EngineState) -> None:
        """Called once, before any other hook."""

    # ---- requests ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Called when a request was accepted, before it is in line."""

    def waits(self, sequence: Sequence) -> bool:
        """True if a waiting sequence lacks something that comes from outside the scheduler."""
        return False

    def hand_over(self, request_id: str) -> None:
        """Called before an answer is aborted because another engine continues it."""

    def offer(self, sequence: Sequence) -> KvOffer | None:
        """Return the offer of the KV of a sequence whose answer is complete, if it is exported."""
        return None

    def ended(self, sequence: Sequence, is_sound: bool) -> None:
        """Called once for each sequence that ended. `is_sound` is False if it failed or held a
        beam: nothing can be learned from its tokens then.
        """

    # ---- admission --------------------------------------------------------------------------

    def begin_admission(self) -> None:
        """Called before waiting sequences are considered for admission."""

    def may_join(self, sequence: Sequence) -> bool:
        """True if a waiting sequence can join the next step as far as this feature is concerned.
        May begin to load what the sequence needs. Not called if an earlier feature said no.
        """
        return not self.waits(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """Called when a sequence has its blocks and is about to run."""

    def take_failed(self) -> Seq[tuple[Sequence, str]]:
        """Return the waiting sequences that can never run, and why, each once."""
        return ()

    # ---- steps ------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Called before the next step is planned, or when nothing runs."""

    def must_wait(self, step: StepInFlight) -> bool:
        """True if the next step cannot be planned before the results of `step` are there."""
        return False

    def plan(self, plan: StepPlan) -> None:
        """Add to a plan that has all its sequences; no step is in flight, except one to follow."""

    def adapter_puts(self) -> tuple[tuple[int, Any], ...]:
        """Return adapters to put into slots before the step that is being built."""
        return ()

    def verified(self, sequence: Sequence, guess: Guess, num_accepted: int) -> None:
        """Called when `num_accepted` drafts of `guess` were accepted, before they are appended."""

    def after_step(self, step: StepInFlight, result: ModelOutput, now: float) -> None:
        """Called when the results of a step were applied to its sequences."""

    # ---- the engine as a whole --------------------------------------------------------------

    @property
    def has_promised(self) -> bool:
        """True if the engine must stay awake because another engine will ask for its KV."""
        return False

    def leave_model(self) -> None:
        """Called when the weights may change. No step is in flight."""

    def stats(self) -> dict[str, Any]:
        """Return the parts of `EngineStats` that the feature owns, by field."""
        return {}

    def check_integrity(self, in_flight: Iterable[StepInFlight]) -> None:
        """Raise IntegrityError when the feature's state contradicts the scheduler's."""


class BackgroundFeature(Feature):
    """A feature that moves KV even while the engine has nothing to run."""

    # A file that becomes readable when another engine wants something of this one.
    bell: int | None = None

    @property
    def is_asked(self) -> bool:
        """True if `before_step` has something to do, or will have once a disk has been read."""
        return False

    @property
    def is_reading(self) -> bool:
        """True if an answer to another engine waits for a disk."""
        return False

    @property
    def totals(self) -> tuple[int, ...]:
        """The counts that change while the engine is idle."""
        return ()

    def announce(self) -> Seq[CacheEvent]:
        """Return events that report all that the feature caches, parents before children."""
        return ()

    def close(self) -> None:
        """End all transfers. Idempotent."""


def needs(request: AddRequest) -> Iterator[tuple[str, str]]:
    """Yield the names of the features that a request needs, each with the error if it is absent."""
    if request.adapter is not None:
        yield "adapters", "there are no adapters here: start the worker with --enable-lora"
    asks = request.kv_source is not None or request.kv_peer is not None
    if request.keeps_kv or asks:
        yield "remote KV", "KV stays here: start the worker with --kv-transfer-config"
    if request.params.grammar is not None:
        yield (
            "grammars",
            "outputs cannot be constrained: the engine does not know what its tokens say",
        )
