"""`pointsman bench`: from the command line to a report."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import resource
import secrets
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import httpx
import msgspec
import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fleet.bench.arrivals import Ramp, intended_times
from fleet.bench.client import Client, Record
from fleet.bench.comparison import Comparison, compare, comparison_lines
from fleet.bench.driver import Driver, RequestForm
from fleet.bench.flags import build_parser
from fleet.bench.page import page
from fleet.bench.picker_config import FollowedConfig, look_at, read_configs
from fleet.bench.report import lines_of, stages_table, write_csv, write_text
from fleet.bench.slo import Bound, Slo
from fleet.bench.summary import Stage, Summary, summary
from fleet.bench.traces import read_trace
from fleet.bench.workload import (
    Sessions,
    Span,
    Synthetic,
    WordRing,
    traced_sessions,
)
from fleet.chat import first_model
from fleet.errors import FleetError, UsageError
from fleet.running_picker import picker_url

INTERRUPTED = 130
LIVE_SECONDS = 1.0
RECENT_SECONDS = 10.0
_PROBE_WORDS = (8, 264)


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags as they were read; see `flags`."""

    url: str
    model: str | None
    api: str
    header: list[tuple[str, str]]
    rate: tuple[Ramp, ...] | None
    concurrency: int | None
    burstiness: float
    duration: float | None
    requests: int | None
    warmup: float
    timeout: float
    seed: int
    compare_url: str | None
    compare: list[Path] | None
    picker: str | None
    rounds: int
    input_tokens: Span
    output_tokens: Span
    prefix_groups: int | None
    prefix_tokens: int | None
    turns: Span
    think: float
    trace: Path | None
    speed: float | None
    respect_eos: bool
    slo: tuple[Bound, ...] | None
    slo_share: float
    json: Path | None
    csv: Path | None
    html: Path | None

    @property
    def compared(self) -> tuple[str, str] | None:
        """The names of what is compared."""
        if self.compare is not None:
            return str(self.compare[0]), str(self.compare[1])
        return None if self.compare_url is None else (self.url, self.compare_url)

    @property
    def objective(self) -> Slo | None:
        return None if self.slo is None else Slo(self.slo, self.slo_share)

    def public(self) -> dict[str, object]:
        """For reports: without headers, which may be credentials."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        del every["header"]
        return {k: None if v is None else _plain(v) for k, v in every.items()}


def _plain(value: object) -> object:
    if isinstance(value, int | float | str):
        return value
    return [str(one) for one in value] if isinstance(value, tuple | list) else str(value)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go, and what is before their bodies."""

    url: str
    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes

    def client(self, timeout_seconds: float) -> Client:
        loop = asyncio.get_running_loop()

        async def connect(protocol: Callable[[], asyncio.Protocol]) -> object:
            return await loop.create_connection(protocol, self.host, self.port, ssl=self.tls)

        return Client(connect, self.head, time.perf_counter, timeout_seconds)


def endpoint_of(base: str, is_chat: bool, headers: Iterable[tuple[str, str]]) -> Endpoint:
    """`base` is an address with or without the `/v1` that other clients want."""
    parts = urlsplit(base)
    path = parts.path.rstrip("/").removesuffix("/v1")
    path += "/v1/chat/completions" if is_chat else "/v1/completions"
    host = (parts.hostname or "").encode("idna").decode()
    is_tls = parts.scheme == "https"
    lines = [f"POST {path} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
    lines += ["content-type: application/json", "accept: text/event-stream"]
    lines += [f"{name}: {value}" for name, value in headers]
    return Endpoint(
        url=base,
        host=host,
        port=parts.port or (443 if is_tls else 80),
        tls=ssl.create_default_context() if is_tls else None,
        head="".join(f"{line}\r\n" for line in lines).encode(),
    )


def bench_command(argv: Sequence[str], out: Callable[[str], None], screen: Console) -> int:
    """Run `pointsman bench …`; returns the exit status. `screen` shows the run while it lasts, if
    it is a terminal. Raises `FleetError`.
    """
    settings = Settings(**vars(build_parser().parse_args(argv)))
    _check(settings)
    for path in (settings.json, settings.csv, settings.html):
        if path is not None and path.is_dir():
            raise UsageError(f"{path} is a folder; the result needs the name of a file")
    _allow_many_connections()
    bench = Bench(settings, screen)
    was_interrupted = uvloop.run(bench.run())
    report = bench.report()
    out(report)
    _write(settings, bench, report)
    if was_interrupted:
        return INTERRUPTED
    every = bench.summaries
    is_missed = any(one.missed for one in every) or not any(one.completed_rate for one in every)
    return 1 if is_missed else 0


def _check(settings: Settings) -> None:
    """Flags that contradict each other."""
    if settings.speed is not None and settings.trace is None:
        raise UsageError("--speed is for a --trace")
    if settings.prefix_tokens is not None and settings.prefix_groups is None:
        raise UsageError("--prefix-tokens needs --prefix-groups")
    if settings.trace is not None and settings.prefix_groups is not None:
        raise UsageError("--prefix-groups is not for a --trace, whose beginnings are its own")
    if settings.trace is not None and settings.turns != Span(1, 1):
        raise UsageError("--turns is not for a --trace")
    if settings.speed is not None and (settings.rate or settings.concurrency):
        raise UsageError("--speed is for a trace's own times, not for --rate or --concurrency")
    if settings.compared is not None and len(settings.rate or ()) > 1:
        raise UsageError("a comparison has one stage: give --rate a single rate or ramp")
    if settings.picker is not None and settings.compare is None:
        raise UsageError("--picker is for --compare")
    if settings.duration is not None and settings.warmup >= settings.duration:
        raise UsageError("--warmup must be shorter than --duration, or nothing is counted")


def _allow_many_connections() -> None:
    """An open loop has as many as there are requests in flight."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True)
class Load:
    """One stage: a ramp, or a number of sessions, or neither for a trace's own times."""

    name: str
    ramp: Ramp | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A stage to come: where it goes, which configuration the picker is to have (with its name),
    and the number of its draws, of arrivals and lengths.
    """

    load: Load
    endpoint: Endpoint
    draws: int
    config: tuple[bytes, str] | None = None


class Bench:
    """Owns the stages of a run."""

    def __init__(self, settings: Settings, screen: Console) -> None:
        self.settings = settings
        self.stages: list[Stage] = []
        self._screen = screen
        self._sessions = _sessions_of(settings)
        self._configs = () if settings.compare is None else read_configs(settings.compare)
        self.comparison: Comparison | None = None

    @property
    def summaries(self) -> list[Summary]:
        return [summary(stage, self.settings.objective) for stage in self.stages]

    async def run(self) -> bool:
        """All stages; returns whether Ctrl-C ended it before its time. Raises `FleetError`."""
        settings = self.settings
        is_chat = settings.api == "chat"
        urls = [settings.url, *([settings.compare_url] if settings.compare_url else [])]
        endpoints = [endpoint_of(url, is_chat, settings.header) for url in urls]
        base = settings.url.rstrip("/").removesuffix("/v1")
        model = settings.model or await first_model(base, settings.header)
        form = RequestForm(model, is_chat, not settings.respect_eos)
        ratios = [await self._tokens_per_word(one, form) for one in endpoints]
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        try:
            with self._followed() as followed:
                for turn in self._turns(endpoints):
                    if followed is not None and turn.config is not None:
                        await followed.use(*turn.config)
                    # Texts are new in every stage and run, whatever the seed: what an earlier one
                    # left in a prefix cache serves no other.
                    ring = WordRing(secrets.randbits(64), ratios[0])
                    await self._stage(turn, form, ring)
        except asyncio.CancelledError:
            return True
        return False

    @contextlib.contextmanager
    def _followed(self) -> Iterator[FollowedConfig | None]:
        """The configuration of the picker, where some are compared."""
        if not self._configs:
            yield None
            return
        picker = picker_url(self.settings.picker, os.environ)
        with (
            httpx.Client(trust_env=False) as http,
            FollowedConfig(lambda: look_at(picker, http)) as followed,
        ):
            yield followed

    def _turns(self, endpoints: Sequence[Endpoint]) -> Iterator[Turn]:
        loads, names = list(_loads_of(self.settings)), self.settings.compared
        if names is None:
            yield from (Turn(load, endpoints[0], number) for number, load in enumerate(loads))
            return
        for number in range(self.settings.rounds):
            # A B, B A, A B …: what drifts during the run is the same for both.
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                load = replace(loads[0], name=f"{'AB'[which]}{number + 1}")
                config = (self._configs[which], names[which]) if self._configs else None
                yield Turn(load, endpoints[min(which, len(endpoints) - 1)], number, config)

    async def _tokens_per_word(self, endpoint: Endpoint, form: RequestForm) -> float:
        """What the tokenizer makes of a word, by the usage of two requests. Raises `FleetError`
        when they fail: there is nothing to measure then.
        """
        client, ring, counts = endpoint.client(self.settings.timeout), WordRing(0, 1.0), []
        for number, words in enumerate(_PROBE_WORDS):
            outcome = Record(time.perf_counter())
            text = ring.text(number, words)
            await client.ask(form.body([{"role": "user", "content": text}], 1), outcome)
            if not outcome.is_good:
                raise FleetError(f"{endpoint.url} fails a first request: {outcome.error}")
            counts.append(outcome.prompt_tokens)
        client.close()
        ratio = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
        return ratio if ratio > 0 else 1.0

    async def _stage(self, turn: Turn, form: RequestForm, ring: WordRing) -> None:
        settings, load = self.settings, turn.load
        client, rng = (
            turn.endpoint.client(settings.timeout),
            Random(f"{settings.seed}/{turn.draws}"),
        )
        driver = Driver(client, form, time.perf_counter, settings.think, settings.requests)
        sessions = iter(self._sessions(ring, rng))
        cpu = time.process_time()
        try:
            async with self._shown(load.name, driver):
                if load.concurrency is not None:
                    await driver.closed_loop(sessions, load.concurrency, _seconds_of(settings))
                elif load.ramp is None:
                    until = settings.duration or float("inf")
                    timed = ((one.at_seconds or 0.0, one) for one in sessions)
                    await driver.open_loop(pair for pair in timed if pair[0] < until)
                else:
                    # Its own draws: the arrivals are the same whatever is asked.
                    own = Random(rng.getrandbits(64))
                    times = intended_times(
                        load.ramp, _seconds_of(settings), settings.burstiness, own
                    )
                    await driver.open_loop(zip(times, sessions, strict=False))
        finally:
            client.close()
            cpu = time.process_time() - cpu
            self.stages.append(
                Stage(
                    load.name,
                    driver.begun,
                    time.perf_counter(),
                    settings.warmup,
                    driver.outcomes,
                    driver.pulses,
                    cpu,
                )
            )

    @contextlib.asynccontextmanager
    async def _shown(self, name: str, driver: Driver) -> AsyncIterator[None]:
        """With the last seconds on the screen, drawn once a second."""
        if not self._screen.is_terminal:
            yield
            return

        async def draw(live: Live) -> None:
            while True:
                await asyncio.sleep(LIVE_SECONDS)
                live.update(Text("\n".join(self._picture(name, driver))), refresh=True)

        with Live(console=self._screen, auto_refresh=False, transient=True) as live:
            task = asyncio.create_task(draw(live), name="live table")
            try:
                yield
            finally:
                task.cancel()

    def _picture(self, name: str, driver: Driver) -> Iterator[str]:
        now = time.perf_counter()
        recent = [one for one in driver.outcomes[-20_000:] if one.ended > now - RECENT_SECONDS]
        since = min((one.intended for one in recent), default=now)
        seen = Stage(name, since, now, 0.0, recent, driver.pulses[-200:], 0.0)
        slo = self.settings.objective
        yield (
            f"{now - driver.begun:.0f} s, {driver.started:,} begun, "
            f"{driver.client.in_flight:,} in flight; of the last {RECENT_SECONDS:.0f} s:"
        )
        yield from list(lines_of(summary(seen, slo), slo))[: 6 if slo is None else 7]

    def report(self) -> str:
        """What is printed."""
        every, slo = self.summaries, self.settings.objective
        lines = list(chain.from_iterable([*lines_of(one, slo), ""] for one in every))
        names = self.settings.compared
        if names is not None:
            self.comparison = compare(every, self.settings.seed)
            lines += comparison_lines(self.comparison, *names)
        elif len(every) > 1:
            lines += stages_table(every)
        return "\n".join(lines).rstrip()


def _sessions_of(settings: Settings) -> Sessions:
    if settings.trace is not None:
        trace = read_trace(settings.trace, settings.output_tokens.high)
        return traced_sessions(trace, settings.speed or 1.0)
    synthetic = Synthetic(
        settings.input_tokens,
        settings.output_tokens,
        settings.prefix_groups or 0,
        settings.prefix_tokens or 1024,
        settings.turns,
    )
    return synthetic.sessions


def _loads_of(settings: Settings) -> Iterator[Load]:
    if settings.concurrency is not None:
        yield Load(f"{settings.concurrency} sessions", concurrency=settings.concurrency)
    elif settings.trace is not None and settings.rate is None:
        yield Load(settings.trace.name)
    else:
        for ramp in settings.rate or (Ramp(1.0, 1.0),):
            yield Load(f"{ramp}/s", ramp)


def _seconds_of(settings: Settings) -> float:
    """With a number of requests alone a stage lasts until they are sent."""
    if settings.duration is not None:
        return settings.duration
    return 30.0 if settings.requests is None else 1e7


def _write(settings: Settings, bench: Bench, report: str) -> None:
    document = {
        "pointsman_bench": 1,
        "settings": settings.public(),
        "stages": [asdict(one) for one in bench.summaries],
        "comparison": None if bench.comparison is None else asdict(bench.comparison),
    }
    try:
        if settings.json is not None:
            text = msgspec.json.format(msgspec.json.encode(document)).decode()
            write_text(settings.json, text + "\n")
        if settings.csv is not None:
            file = io.StringIO(newline="")
            write_csv(file, bench.stages)
            write_text(settings.csv, file.getvalue())
        if settings.html is not None:
            title = f"pointsman bench: {settings.url}"
            write_text(settings.html, page(title, report, bench.stages))
    except OSError as error:
        raise FleetError(f"cannot write a result: {error}") from error
