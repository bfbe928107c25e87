"""Numbers from outcomes. Latencies count from the intended time; those of failures are excluded
from quantiles, and count as missed in goodput.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleet.bench.client import Record
from fleet.bench.driver import PULSE_SECONDS, ClientPulse
from fleet.bench.slo import Slo

LATE_SECONDS = 0.01
BUSY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Spread:
    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The bench's own load. Its worst process gives the 99th percentile of the delays of sends and
    of timers, and the share of a core; the CPU seconds are for each request.
    """

    processes: int
    late_p99_seconds: float
    pulse_p99_seconds: float
    busy_share: float
    cpu_seconds_per_request: float

    @property
    def _whose(self) -> str:
        return "its" if self.processes == 1 else "one process's"

    @property
    def saturation(self) -> str | None:
        """Return why the numbers are the client's and not the endpoint's, or None."""
        late = max(self.late_p99_seconds, self.pulse_p99_seconds)
        if late > LATE_SECONDS:
            return f"1 % of {self._whose} sends or timers were {late * 1e3:.0f} ms late or more"
        if self.busy_share > BUSY_SHARE:
            return f"{self._whose} CPU was {self.busy_share:.0%} of a core"
        return None


@dataclass(frozen=True, slots=True)
class Summary:
    """One stage, without its warm-up. Rates are over `seconds`, from the first intended time to the
    last answer; `offered_rate` is that of the requests that were due while they were still
    arriving. `goodput` is the share of all requests that were answered within the objectives of
    requests, `missed` are the objectives that do not hold; `client` is None for a simulation.
    """

    name: str
    requests: int
    seconds: float
    offered_rate: float
    completed_rate: float
    errors: dict[str, int]
    ttft: Spread | None
    itl: Spread | None
    e2e: Spread | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    max_in_flight: int
    goodput: float | None
    goodput_rate: float | None
    missed: tuple[str, ...]
    client: ClientLoad | None

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Stage:
    """The observations of one stage. `begun` and the outcomes' times are on one clock; the first
    `warmup_seconds` are not counted. `client` is None for a simulation.
    """

    name: str
    begun: float
    ended: float
    warmup_seconds: float
    outcomes: Sequence[Record]
    pulses: Sequence[ClientPulse]
    client: ClientLoad | None

    def counted(self) -> list[Record]:
        since = self.begun + self.warmup_seconds
        return sorted(
            (one for one in self.outcomes if one.intended >= since), key=lambda one: one.intended
        )


@dataclass(slots=True)
class Observed:
    outcomes: list[Record]
    pulses: list[ClientPulse]
    started: int
    in_flight: int
    cpu_seconds: float


def stage_of(
    name: str, begun: float, ended: float, warmup_seconds: float, processes: Sequence[Observed]
) -> Stage:
    """Merge the observations of several processes of one stage, which all count from `begun`."""
    outcomes = [outcome for one in processes for outcome in one.outcomes]
    # Processes measure at about the same times. One that is done has no requests in flight.
    looks = [(pulse, number) for number, one in enumerate(processes) for pulse in one.pulses]
    for number, one in enumerate(processes):
        looks += [
            (ClientPulse(last.at + PULSE_SECONDS, 0.0, 0), number) for last in one.pulses[-1:]
        ]
    in_flight, rounds = [0] * len(processes), dict[int, ClientPulse]()
    for pulse, number in sorted(looks, key=lambda look: look[0].at):
        in_flight[number] = pulse.in_flight
        rounds[int(pulse.at / PULSE_SECONDS)] = replace(pulse, in_flight=sum(in_flight))
    load = _client_load(processes, ended - begun)
    return Stage(name, begun, ended, warmup_seconds, outcomes, [*rounds.values()], load)


def spread(values: Sequence[float] | NDArray[np.float64]) -> Spread | None:
    """Return the distribution of values; quantiles are interpolated between the two nearest."""
    if not len(values):
        return None
    numbers = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = np.quantile(numbers, (0.5, 0.95, 0.99))
    return Spread(len(numbers), *map(float, (numbers.mean(), p50, p95, p99, numbers.max())))


def summary(stage: Stage, slo: Slo | None) -> Summary:
    every = stage.counted()
    good = [one for one in every if one.is_good]
    first = every[0].intended if every else stage.begun
    window = max(1e-9, max((one.ended for one in every), default=first) - first)
    arriving = every[-1].intended - first if len(every) > 1 else 0.0
    spreads = spreads_of(good)
    tokens = sum(one.output_tokens for one in good)
    within = None if slo is None else sum(slo.admits(one.times) for one in good)
    goodput = None if within is None or not every else within / len(every)
    since = stage.warmup_seconds
    return Summary(
        name=stage.name,
        requests=len(every),
        seconds=window,
        offered_rate=(len(every) - 1) / arriving if arriving > 0 else 0.0,
        completed_rate=len(good) / window,
        errors=dict(Counter(one.error for one in every if one.error).most_common()),
        **spreads,
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_tokens=sum(one.cached_tokens for one in good),
        output_tokens=tokens,
        output_tokens_per_second=tokens / window,
        max_in_flight=max((one.in_flight for one in stage.pulses if one.at >= since), default=0),
        goodput=goodput,
        goodput_rate=None if within is None else within / window,
        missed=() if slo is None else tuple(_missed(slo, goodput, spreads)),
        client=stage.client,
    )


def spreads_of(good: Sequence[Record]) -> dict[str, Spread | None]:
    """Return distributions by metric. All gaps between tokens form one."""
    times = [one.times for one in good]
    gaps = [np.frombuffer(one.gaps) for one in good if one.gaps]
    return {
        "ttft": spread([one["ttft"] for one in times if one["ttft"] is not None]),
        "itl": spread(np.concatenate(gaps)) if gaps else None,
        "e2e": spread([one["e2e"] for one in times if one["e2e"] is not None]),
    }


def _client_load(processes: Sequence[Observed], seconds: float) -> ClientLoad:
    def p99(late: Sequence[float]) -> float:
        return float(np.quantile(late, 0.99)) if late else 0.0

    sends = (
        [each.sent - each.intended for each in one.outcomes if each.sent is not None]
        for one in processes
    )
    timers = ([each.late_seconds for each in one.pulses] for one in processes)
    requests = sum(len(one.outcomes) for one in processes)
    return ClientLoad(
        processes=len(processes),
        late_p99_seconds=max(map(p99, sends)),
        pulse_p99_seconds=max(map(p99, timers)),
        busy_share=max(one.cpu_seconds for one in processes) / max(1e-9, seconds),
        cpu_seconds_per_request=sum(one.cpu_seconds for one in processes) / max(1, requests),
    )


def _missed(slo: Slo, goodput: float | None, spreads: dict[str, Spread | None]) -> list[str]:
    missed = []
    if goodput is None or goodput < slo.share:
        met = "no request" if goodput is None else f"{goodput:.2%} of requests"
        # Quantiles only count answers: they would hold even if most requests failed.
        within = f"{slo.of_requests}: {met} within" if slo.of_requests else f"{met} answered"
        missed.append(f"{within}, {slo.share:.2%} wanted")
    for bound in slo.bounds:
        measured = spreads[bound.metric]
        if bound.quantile is None:
            continue
        value = None if measured is None else getattr(measured, bound.quantile)
        if value is None or not bound.holds(value):
            text = "nothing measured" if value is None else f"{value * 1e3:.1f} ms"
            missed.append(f"{bound}: {text}")
    return missed
