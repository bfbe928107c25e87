"""A profile of step times, measured when the engine starts.

The sizes are timed in turn, so that other load on the machine affects all of them alike. The
sequences are made up: they write to the KV cache, which is still empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from worker.executor.interface import Executor, execute
from worker.types import ModelOutput, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

_MIN_TURNS, _MAX_TURNS = 3, 5
_MAX_SIZE = 512
_LONGEST_SECONDS = 0.2  # of a step, beyond which no larger one is tried
_MAX_SECONDS = 2.0  # of all turns, but for the least number
_DRAFTING_SIZES = (1, 8)
_TURNS = 1 + _MIN_TURNS  # of steps with drafts

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds measured at start: of a step, by its tokens; and of the first and each further draft
    of the device's drafter, by its sequences (empty if none could be measured). Each table has at
    least two points, in ascending order of size.
    """

    steps: Points
    first_draft: Points = ()
    next_draft: Points = ()


@dataclass(frozen=True, slots=True)
class ProfiledCache:
    num_blocks: int
    block_size: int
    max_model_len: int

    def start(self, num_to_draft: int) -> int:
        """Return the position at which steps start: the middle of the second block, or less to
        leave room for the drafts. If it is below 1, there is no room.
        """
        middle = self.block_size + self.block_size // 2
        return min(middle, self.max_model_len - 2 - num_to_draft)

    def most(self, num_to_draft: int) -> int:
        if self.start(num_to_draft) < 1:
            return 0
        return self.num_blocks // self.blocks_of(num_to_draft)

    def blocks_of(self, num_to_draft: int) -> int:
        return -(-(self.start(num_to_draft) + 2 + num_to_draft) // self.block_size)


def profile(
    executor: Executor,
    cache: ProfiledCache,
    most: tuple[int, int],
    clock: Callable[[], float],
    drafts_on_device: bool,
) -> StepProfile | None:
    """Time steps of ascending sizes; `most` limits the sequences of a step and the drafts of each.

    Return None if the cache has no room for two sequences.
    """
    num_sequences, num_drafts = most
    largest = min(cache.most(0), _MAX_SIZE, num_sequences * (1 + num_drafts))
    if largest < 2:
        return None
    sizes = _sizes(executor, cache, largest, clock)
    began, turns = clock(), list[list[float]]()
    while len(turns) < _MAX_TURNS:
        if len(turns) >= _MIN_TURNS and clock() - began > _MAX_SECONDS:
            break
        turns.append([_time(executor, cache, size, clock) for size in sizes])
    steps = [(n, median(times)) for n, times in zip(sizes, zip(*turns, strict=True), strict=True)]
    if not drafts_on_device:
        return StepProfile(steps)
    first, further = [], []
    fitting = min(num_sequences, cache.most(num_drafts + _TURNS))
    for size in (n for n in _DRAFTING_SIZES if n <= fitting):
        one, several = (_time_drafts(executor, cache, size, k) for k in (1, 1 + num_drafts))
        if one is None or several is None:
            return StepProfile(steps)
        first.append((size, one))
        further.append((size, max(0.0, several - one) / num_drafts))
    if len(first) == 1:  # there is room for no more
        first.append((2, first[0][1]))
        further.append((2, further[0][1]))
    return StepProfile(steps, first, further)


def _sizes(
    executor: Executor, cache: ProfiledCache, largest: int, clock: Callable[[], float]
) -> list[int]:
    """Return powers of two up to `largest`, while steps are short; at least two of them."""
    sizes = [1, 2]
    longest = max(_time(executor, cache, size, clock) for size in sizes)
    while sizes[-1] * 2 <= largest and longest <= _LONGEST_SECONDS:
        sizes.append(sizes[-1] * 2)
        longest = _time(executor, cache, sizes[-1], clock)
    return sizes


def _step(
    cache: ProfiledCache, size: int, num_to_draft: int = 0, turn: int = 0, num_turns: int = 1
) -> SchedulerOutput:
    room = num_to_draft + num_turns - 1
    start, each = cache.start(room) + turn, cache.blocks_of(room)
    sample = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), start + 1, num_prompt=start)
    tables = (tuple(range(i * each, (i + 1) * each)) for i in range(size))
    sequences = (
        ScheduledSequence(i, (0,), start, table, (sample,), num_to_draft=num_to_draft)
        for i, table in enumerate(tables)
    )
    return SchedulerOutput(0, tuple(sequences))


def _time(executor: Executor, cache: ProfiledCache, size: int, clock: Callable[[], float]) -> float:
    began = clock()
    execute(executor, _step(cache, size))
    return clock() - began


def _time_drafts(
    executor: Executor, cache: ProfiledCache, size: int, num_drafts: int
) -> float | None:
    """Return the median time, or None without drafts; each reading precedes the drafter's clock.
    Each step is behind the one before, which is the first: a graph drafts only after such steps.
    """
    steps = [_step(cache, size, num_drafts, turn, _TURNS) for turn in range(_TURNS)]
    outputs: list[ModelOutput] = [execute(executor, step) for step in steps]
    drafted = [o.drafting_seconds for o in outputs if o.drafts]
    return median(drafted[1:] or drafted or [0.0]) or None
