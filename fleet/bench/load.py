"""What the flags of load, data and results come to, for `bench` and `simulate` alike."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from fleet.bench.arrivals import Ramp, intended_times
from fleet.bench.driver import Driver
from fleet.bench.page import page
from fleet.bench.report import refuse_unwritable, write_csv, write_text
from fleet.bench.slo import Bound, Slo
from fleet.bench.summary import Stage
from fleet.bench.traces import read_trace
from fleet.bench.workload import Session, Sessions, Span, Synthetic, traced_sessions
from fleet.errors import UsageError


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The flags that are not about where requests go; see `flags`."""

    rate: tuple[Ramp, ...] | None
    concurrency: tuple[int, ...] | None
    burstiness: float
    duration: float | None
    requests: int | None
    warmup: float
    seed: int
    input_tokens: Span
    output_tokens: Span
    prefix_groups: int | None
    prefix_tokens: Span | None
    prefix_prompts: int | None
    turns: Span
    think: float
    trace: Path | None
    speed: float | None
    slo: tuple[Bound, ...] | None
    slo_share: float
    json: Path | None
    csv: Path | None
    html: Path | None

    @property
    def objective(self) -> Slo | None:
        return None if self.slo is None else Slo(self.slo, self.slo_share)

    @property
    def seconds(self) -> float:
        """Of a stage; with a number of requests alone it lasts until they are sent."""
        if self.duration is not None:
            return self.duration
        return 30.0 if self.requests is None else 1e7

    def check(self) -> None:
        """Raises `UsageError` for flags that contradict each other."""
        if self.speed is not None and self.trace is None:
            raise UsageError("--speed is for a --trace")
        if self.prefix_prompts is not None and self.prefix_groups is None:
            raise UsageError("--prefix-prompts needs --prefix-groups")
        if self.trace is not None and (self.prefix_groups or self.prefix_tokens):
            name = "--prefix-groups" if self.prefix_groups else "--prefix-tokens"
            raise UsageError(f"{name} is not for a --trace, whose beginnings are its own")
        if self.trace is not None and self.turns != Span(1, 1):
            raise UsageError("--turns is not for a --trace")
        if self.speed is not None and (self.rate or self.concurrency):
            raise UsageError("--speed is for a trace's own times, not for --rate or --concurrency")
        if self.think and self.turns.high == 1:
            raise UsageError("--think is between requests of a session: give --turns 2 or more")
        is_own_times = self.trace is not None and not (self.rate or self.concurrency)
        if self.burstiness != 1 and (self.concurrency is not None or is_own_times):
            raise UsageError("--burstiness is for --rate")
        if self.warmup >= self.seconds and not (is_own_times and self.duration is None):
            raise UsageError(
                f"--warmup must be shorter than --duration, {self.seconds:g} s, "
                "or nothing is counted"
            )
        results = [one for one in (self.json, self.csv, self.html) if one is not None]
        for path in results:
            refuse_unwritable(path)
            if results.count(path) > 1:
                raise UsageError(f"two of --json, --csv and --html name {path}")

    def public(self) -> dict[str, object]:
        """For reports."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: None if v is None else _plain(v) for k, v in every.items()}


def _plain(value: object) -> object:
    if isinstance(value, int | float | str):
        return value
    return [str(one) for one in value] if isinstance(value, tuple | list) else str(value)


@dataclass(frozen=True, slots=True)
class Load:
    """One stage: a ramp, or a number of sessions, or neither for a trace's own times."""

    name: str
    ramp: Ramp | None = None
    concurrency: int | None = None


def loads_of(settings: LoadSettings) -> Iterator[Load]:
    """The stages of a run."""
    if settings.concurrency is not None:
        for number in settings.concurrency:
            yield Load(f"{number} sessions", concurrency=number)
    elif settings.trace is not None and settings.rate is None:
        yield Load(settings.trace.name)
    else:
        for ramp in settings.rate or (Ramp(1.0, 1.0),):
            yield Load(f"{ramp}/s", ramp)


def sessions_of(settings: LoadSettings) -> Sessions:
    """The data set. Raises `UsageError`."""
    if settings.trace is not None:
        trace = read_trace(settings.trace, settings.output_tokens.high)
        return traced_sessions(trace, settings.speed or 1.0)
    prefix = settings.prefix_tokens
    synthetic = Synthetic(
        settings.input_tokens,
        settings.output_tokens,
        settings.prefix_groups or 0,
        Span(1024, 1024) if settings.prefix_groups and prefix is None else prefix,
        settings.prefix_prompts or 0,
        settings.turns,
    )
    return synthetic.sessions


def draws_of(seed: int, stage: int, tenant: int = 0) -> Random:
    """What decides arrivals and lengths of a stage, by its number: one seed gives `bench` and
    `simulate` the same. The first 32 bits are for texts.
    """
    return Random(f"{seed}/{stage}/{tenant}")


async def drive(
    driver: Driver[Any],
    load: Load,
    settings: LoadSettings,
    sessions: Iterable[Session | None],
    rng: Random,
) -> None:
    """One stage, from its first request to its last answer. None is a session that another process
    sends.
    """
    if load.concurrency is not None:
        own = (one for one in sessions if one is not None)
        await driver.closed_loop(own, load.concurrency, settings.seconds)
    elif load.ramp is None:
        until = settings.duration or float("inf")
        timed = ((one.at_seconds or 0.0, one) for one in sessions if one is not None)
        await driver.open_loop(pair for pair in timed if pair[0] < until)
    else:
        # Its own draws: the arrivals are the same whatever is asked.
        arriving = Random(rng.getrandbits(64))
        times = intended_times(load.ramp, settings.seconds, settings.burstiness, arriving)
        every = zip(times, sessions, strict=False)
        await driver.open_loop((at, one) for at, one in every if one is not None)


def write_results(
    settings: LoadSettings,
    document: Mapping[str, object],
    title: str,
    parts: Sequence[tuple[str, Sequence[Stage]]],
) -> None:
    """The files that the flags name; `parts` are those of the page. Raises `FleetError`."""
    if settings.json is not None:
        text = msgspec.json.format(msgspec.json.encode(document)).decode()
        write_text(settings.json, text + "\n")
    if settings.csv is not None:
        file = io.StringIO(newline="")
        write_csv(file, (stage for _, stages in parts for stage in stages))
        write_text(settings.csv, file.getvalue())
    if settings.html is not None:
        write_text(settings.html, page(title, parts))
