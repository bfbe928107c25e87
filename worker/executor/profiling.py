"""A profile of step times, taken when the engine starts.

The sizes take turns, so that what else runs on the machine meets all of them alike. A first turn
shows which sizes are short enough, and compiles what a size needs. The sequences of a profile are
made up: they write to the KV cache, which holds nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from worker.executor.interface import Executor
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

_LEAST_TURNS, _MOST_TURNS = 3, 5
_MAX_SIZE = 512
_LONGEST_SECONDS = 0.2  # of a step, beyond which no larger one is tried
_MAX_SECONDS = 2.0  # of all turns, but for the least number
_DRAFTING_SIZES = (1, 8)

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds measured at start: of a step by its tokens, and of the first and of each further
    draft of the device's drafter by its sequences (empty without such a drafter). Each has at least
    two points, whose sizes rise.
    """

    steps: Points
    first_draft: Points = ()
    next_draft: Points = ()


@dataclass(frozen=True, slots=True)
class ProfiledCache:
    """The KV cache that made-up sequences use: its blocks, and the tokens of one."""

    num_blocks: int
    block_size: int


def profile(
    executor: Executor,
    cache: ProfiledCache,
    most: tuple[int, int],
    clock: Callable[[], float],
    drafts_on_device: bool,
) -> StepProfile | None:
    """Run steps of rising sizes and time them. `most` are sequences of a step, and drafts of each.

    None where the cache has no room for two sequences.
    """
    num_sequences, num_drafts = most
    largest = min(cache.num_blocks // 2, _MAX_SIZE, num_sequences * (1 + num_drafts))
    if largest < 2:
        return None
    sizes = _sizes(executor, cache, largest, clock)
    began, turns = clock(), list[list[float]]()
    while len(turns) < _MOST_TURNS:
        if len(turns) >= _LEAST_TURNS and clock() - began > _MAX_SECONDS:
            break
        turns.append([_time(executor, cache, size, clock) for size in sizes])
    steps = [(n, median(times)) for n, times in zip(sizes, zip(*turns, strict=True), strict=True)]
    if not drafts_on_device:
        return StepProfile(steps)
    first, further = [], []
    for size in (n for n in _DRAFTING_SIZES if n <= min(num_sequences, largest)):
        one, several = (_time_drafts(executor, cache, size, k) for k in (1, 1 + num_drafts))
        first.append((size, one))
        further.append((size, max(0.0, several - one) / num_drafts))
    return StepProfile(steps, first, further) if len(first) > 1 else StepProfile(steps)


def _sizes(
    executor: Executor, cache: ProfiledCache, largest: int, clock: Callable[[], float]
) -> list[int]:
    """Powers of two up to `largest`, as long as steps are short; two of them at least."""
    sizes = [1, 2]
    longest = max(_time(executor, cache, size, clock) for size in sizes)
    while sizes[-1] * 2 <= largest and longest <= _LONGEST_SECONDS:
        sizes.append(sizes[-1] * 2)
        longest = _time(executor, cache, sizes[-1], clock)
    return sizes


def _step(cache: ProfiledCache, size: int, num_to_draft: int = 0) -> SchedulerOutput:
    """A step that decodes `size` sequences, each in the middle of its second block."""
    start = cache.block_size + cache.block_size // 2
    sample = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), start + 1, num_prompt=start)
    sequences = (
        ScheduledSequence(i, (0,), start, (2 * i, 2 * i + 1), (sample,), num_to_draft=num_to_draft)
        for i in range(size)
    )
    return SchedulerOutput(0, tuple(sequences))


def _time(executor: Executor, cache: ProfiledCache, size: int, clock: Callable[[], float]) -> float:
    began = clock()
    executor.execute(_step(cache, size))
    return clock() - began


def _time_drafts(executor: Executor, cache: ProfiledCache, size: int, num_drafts: int) -> float:
    """Seconds of drafting; 0 where the drafter made none. It reads the sequences before that."""
    outputs: list[ModelOutput] = [
        executor.execute(_step(cache, size, num_drafts)) for _ in range(1 + _LEAST_TURNS)
    ]
    drafting = [output.drafting_seconds for output in outputs if output.drafts]
    return median(drafting) if drafting else 0.0
