"""Arrival times of requests, in seconds from the beginning of a stage.

Gaps are drawn from a gamma distribution of mean 1 and shape `burstiness` (1: a Poisson process;
less: bursts; infinity: a metronome), and then mapped through the inverse of the integrated rate,
which makes ramps exact: over a ramp from `a` to `b` requests a second in `T` seconds, the expected
number of arrivals by time `t` is `a·t + (b − a)·t² / 2T`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Ramp:
    first: float
    last: float

    def __str__(self) -> str:
        return f"{self.first:g}" if self.first == self.last else f"{self.first:g}..{self.last:g}"


def intended_times(ramp: Ramp, seconds: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Yield ascending times within `seconds`."""
    slope = (ramp.last - ramp.first) / seconds
    area = 0.0
    while True:
        area += 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / burstiness)
        inside = ramp.first**2 + 2 * slope * area
        if inside < 0:  # a falling ramp never integrates to this value
            return
        # This form of the root also holds where the slope is 0.
        at = 2 * area / (ramp.first + math.sqrt(inside))
        if at >= seconds:
            return
        yield at
