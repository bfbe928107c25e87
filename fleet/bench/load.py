"""The stages and sessions of a run, from the flags that `bench` and `simulate` share."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from fleet.bench.arrivals import Ramp, intended_times
from fleet.bench.driver import Driver
from fleet.bench.flags import LoadSettings
from fleet.bench.page import ReportPart, RunFacts, page
from fleet.bench.report import write_csv, write_text
from fleet.bench.traces import read_trace
from fleet.bench.workload import Sessions, Synthetic, TokenRange, TurnSession, traced_sessions


@dataclass(frozen=True, slots=True)
class StageLoad:
    name: str
    ramp: Ramp | None = None
    concurrency: int | None = None


def loads_of(settings: LoadSettings) -> Iterator[StageLoad]:
    if settings.concurrency is not None:
        for number in settings.concurrency:
            what = "session" if number == 1 else "sessions"
            yield StageLoad(f"{number} {what}", concurrency=number)
    elif settings.trace is not None and settings.rate is None:
        yield StageLoad(settings.trace.name)
    else:
        for ramp in settings.rate or (Ramp(1.0, 1.0),):
            yield StageLoad(f"{ramp}/s", ramp)


def sessions_of(settings: LoadSettings) -> Sessions:
    if settings.trace is not None:
        trace = read_trace(settings.trace, settings.output_tokens.high)
        return traced_sessions(trace, settings.speed or 1.0)
    prefix = settings.prefix_tokens
    synthetic = Synthetic(
        settings.input_tokens,
        settings.output_tokens,
        settings.prefix_groups or 0,
        TokenRange(1024, 1024) if settings.prefix_groups and prefix is None else prefix,
        settings.prefix_prompts or 0,
        settings.turns,
    )
    return synthetic.sessions


def draws_of(seed: int, stage: int, tenant: int = 0) -> Random:
    """Return a stage's draws, equal in `bench` and `simulate`; the first 32 bits are for texts."""
    return Random(f"{seed}/{stage}/{tenant}")


async def drive(
    driver: Driver[Any],
    load: StageLoad,
    settings: LoadSettings,
    sessions: Iterable[TurnSession | None],
    rng: Random,
) -> None:
    """Run one stage to its last answer. A session that is None belongs to another process."""
    if load.concurrency is not None:
        own = (one for one in sessions if one is not None)
        await driver.closed_loop(own, load.concurrency, settings.seconds)
    elif load.ramp is None:
        until = settings.duration or float("inf")
        timed = ((one.at_seconds or 0.0, one) for one in sessions if one is not None)
        await driver.open_loop(pair for pair in timed if pair[0] < until)
    else:
        # Draws of its own: the arrivals do not depend on the requests.
        arriving = Random(rng.getrandbits(64))
        times = intended_times(load.ramp, settings.seconds, settings.burstiness, arriving)
        every = zip(times, sessions, strict=False)
        await driver.open_loop((at, one) for at, one in every if one is not None)


def write_results(
    settings: LoadSettings,
    document: Mapping[str, object],
    run: RunFacts,
    parts: Sequence[ReportPart],
) -> None:
    """Write the files that the flags name; `parts` are those of the page. Raises `FleetError`."""
    if settings.json is not None:
        text = msgspec.json.format(msgspec.json.encode({**document, "run": run.public()})).decode()
        write_text(settings.json, text + "\n")
    if settings.csv is not None:
        file = io.StringIO(newline="")
        write_csv(file, (stage for part in parts for stage in part.stages))
        write_text(settings.csv, file.getvalue())
    if settings.html is not None:
        write_text(settings.html, page(run, parts))
