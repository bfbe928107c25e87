"""Machines of known step times, for `speculation_virtual.py`, and what else may run on them.

A machine is a table of what a step takes by its number of tokens. What a clock shows of a step has
noise besides, as on a shared machine: a few steps are late, and the speed drifts and jumps. That is
not in the true times. Contention is: while others read much memory, every step waits once more for
what a step of one token takes, or longer, and tokens add what they always do.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from worker.executor.profiling import StepProfile

# Seconds of a step by its number of tokens: straight lines between these, and on.
MACHINES: dict[str, tuple[tuple[int, float], ...]] = {
    "amx": (
        *((1, 0.0331), (3, 0.0408), (5, 0.049), (8, 0.0564), (12, 0.0632), (14, 0.0639)),
        *((16, 0.0683), (17, 0.0717), (20, 0.0755), (24, 0.0816), (32, 0.0891), (40, 0.0966)),
        *((48, 0.119), (64, 0.1564), (88, 0.1904), (112, 0.2108)),
    ),
    "cliff": (
        *((1, 0.038), (2, 0.04), (3, 0.043), (4, 0.045), (8, 0.057), (12, 0.063), (15, 0.0655)),
        *((16, 0.066), (17, 0.075), (20, 0.079), (24, 0.085), (32, 0.095), (41, 0.112)),
        *((57, 0.148), (81, 0.175), (113, 0.205)),
    ),
    "lin": ((1, 0.052), (4, 0.061), (16, 0.089), (4096, 8.249)),
}
PROMPT_TOKEN = {"amx": 0.0013, "cliff": 0.0013, "lin": 0.0017}  # seconds, in a long prompt
AHEAD = 0.985  # of that, when a step is scheduled while another runs: without drafts
LATE, LATEST = 0.05, 3.0  # how many steps are late, and how much at most
DRIFT, RETURN = 0.004, 0.01  # of the speed's logarithm in a step; of what it is off


@dataclass(frozen=True, slots=True)
class Unrest:
    """How much else runs on a machine: the spread of a step's log time; how likely it is after a
    step that something else runs; then the spread of the log speed, and of how often everything
    that a step of one token takes is waited for once more.
    """

    spread: float
    change: float
    jumps: float
    contention: float


UNREST = {"quiet": Unrest(0.05, 1 / 30, 0.15, 0.0), "busy": Unrest(0.1, 1 / 14, 0.15, 1.0)}


class Machine:
    """What steps take on a machine, and what a clock shows of it."""

    def __init__(self, name: str, unrest: str, rng: Random) -> None:
        self._lines = list(pairwise(MACHINES[name]))
        self._prompt_token = PROMPT_TOKEN[name]
        self._rng = rng
        self._unrest = UNREST[unrest]
        self._speed = self._level = 0.0
        self._waiting = 0.0  # for memory, in any step

    def seconds(self, num_tokens: int, is_ahead: bool) -> float:
        """What a step of so many tokens truly takes just now."""
        reaching = (line for line in self._lines if num_tokens <= line[1][0])
        (left, low), (right, high) = next(reaching, self._lines[-1])
        seconds = low + (high - low) * (num_tokens - left) / (right - left) + self._waiting
        return seconds * AHEAD if is_ahead else seconds

    def profile(self) -> StepProfile:
        """What an engine measures when it starts: of each size the median of some noisy steps."""
        sizes = [2**n for n in range(8)]
        noisy = [[self.seconds(n, False) * self.noise() for n in sizes] for _ in range(5)]
        medians = [statistics.median(samples) for samples in zip(*noisy, strict=True)]
        return StepProfile(tuple(zip(sizes, medians, strict=True)))

    def prompts(self, num_tokens: int) -> float:
        """What a step of nothing but prompts takes."""
        return num_tokens * self._prompt_token

    def noise(self) -> float:
        """By how much a step seems to take longer."""
        self._speed += self._rng.gauss(0.0, DRIFT) - RETURN * self._speed
        factor = math.exp(self._rng.gauss(0.0, self._unrest.spread) + self._speed + self._level)
        return factor * self._rng.uniform(1.2, LATEST) if self._rng.random() < LATE else factor

    def change(self) -> None:
        """What else runs on it may be something else from now on."""
        if self._rng.random() < self._unrest.change:
            self._level = self._rng.gauss(0.0, self._unrest.jumps)
            contention = max(0.0, self._rng.gauss(0.0, self._unrest.contention))
            self._waiting = contention * self._lines[0][0][1]
