"""`pointsman bench`: from the command line to a report."""

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import chain

import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fleet.bench.client import Record
from fleet.bench.comparison import TurnComparison, compare, comparison_lines
from fleet.bench.driver import RequestForm
from fleet.bench.flags import LoadSettings, Settings, read_settings
from fleet.bench.load import StageLoad, loads_of, sessions_of, write_results
from fleet.bench.page import ReportPart, RunFacts
from fleet.bench.picker_config import FollowedConfig, read_configs
from fleet.bench.report import lines_of, stages_table
from fleet.bench.shard import LoadShard, Target, endpoint_of, follow, started
from fleet.bench.summary import Observed, Stage, Summary, stage_of, summary
from fleet.bench.workload import WordRing
from fleet.errors import FleetError
from fleet.http_client import first_model
from fleet.picker_views import PickerViews
from fleet.run.running_picker import picker_behind, picker_url

INTERRUPTED = 130
LIVE_SECONDS = 1.0
RECENT_SECONDS = 10.0
BEGIN_SECONDS = 0.05  # for all processes to hear of it
DEFAULT_ROUNDS = 6
_PROBE_WORDS = (8, 264)


def bench_command(argv: Sequence[str], out: Callable[[str], None], screen: Console) -> int:
    """Run `pointsman bench …`; return the exit status. Raises `FleetError`."""
    settings = read_settings(argv)
    _allow_many_connections()
    bench = Bench(settings, screen)
    base = settings.url.rstrip("/").removesuffix("/v1")
    model = settings.model or first_model(base, dict(settings.header), settings.timeout)
    begun = datetime.now().astimezone()
    uvloop.run(bench.run(model))
    report, every = bench.report(), bench.summaries
    out(report)
    document = {
        "pointsman_bench": 1,
        "settings": settings.public(),
        "stages": [asdict(one) for one in every],
        "comparison": None if bench.comparison is None else asdict(bench.comparison),
    }
    facts = {"Endpoint": settings.url, "Model": model, "Seed": str(settings.seed)}
    secrets = [value for _, value in settings.header]
    run = RunFacts(("bench", *argv), begun, facts, settings.objective, secrets)
    write_results(settings, document, run, [ReportPart(report, bench.stages, every)])
    if bench.failure is not None:
        raise bench.failure
    if bench.was_interrupted:
        return INTERRUPTED
    answers = any(one.completed_rate for one in every)
    if bench.comparison is not None:
        answers = bool(bench.comparison.ratios)
    return 1 if any(one.missed for one in every) or not answers else 0


def _allow_many_connections() -> None:
    """Raise the limit of open files: an open loop has a connection for each open request."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage to run: its endpoint, the picker's configuration, and the number of its draws."""

    load: StageLoad
    endpoint: Target
    draws: int
    config: tuple[bytes, str] | None = None


class Bench:
    def __init__(self, settings: Settings, screen: Console) -> None:
        self.settings = settings
        self.stages: list[Stage] = []
        self._screen = screen
        self._sessions = sessions_of(settings)
        self._about = ""
        self._configs = () if settings.compare is None else read_configs(settings.compare)
        self.comparison: TurnComparison | None = None
        self.failure: FleetError | None = None  # that ended the run after some stages
        self.was_interrupted = False  # by Ctrl-C, early
        self._num_cut = 0  # requests of the last stage without an outcome

    @property
    def summaries(self) -> list[Summary]:
        return [summary(stage, self.settings.objective) for stage in self.stages]

    async def run(self, model: str) -> None:
        """Run all stages, until Ctrl-C. Raises `FleetError` if no stage can be reported yet."""
        settings = self.settings
        self._about = f"{settings.url}, {model}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        is_chat = settings.api == "chat"
        urls = [settings.url, *([settings.compare_url] if settings.compare_url else [])]
        endpoints = [endpoint_of(url, is_chat, settings.header) for url in urls]
        form = RequestForm(model, is_chat, not settings.respect_eos)
        ratios = [await self._tokens_per_word(one, form) for one in endpoints]
        task = asyncio.current_task()
        if task is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            with self._followed() as followed:
                for turn in self._turns(endpoints):
                    if followed is not None and turn.config is not None:
                        await followed.use(*turn.config)
                    await self._stage(turn, form, ratios[0])
        except asyncio.CancelledError:
            self.was_interrupted = True
        except FleetError as error:
            if not self.stages:
                raise
            self.failure = error

    @contextlib.contextmanager
    def _followed(self) -> Iterator[FollowedConfig | None]:
        if not self._configs:
            yield None
            return
        named, url = self.settings.picker, self.settings.url
        picker = picker_url(named, os.environ) if named else picker_behind(url, os.environ)
        with FollowedConfig(PickerViews(picker).config) as followed:
            yield followed

    def _turns(self, endpoints: Sequence[Target]) -> Iterator[PlannedStage]:
        loads, names = list(loads_of(self.settings)), self.settings.compared
        if names is None:
            yield from (
                PlannedStage(load, endpoints[0], number) for number, load in enumerate(loads)
            )
            return
        for number in range(self.settings.rounds or DEFAULT_ROUNDS):
            # A B, B A, A B …: drifts during the run affect both alike.
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                load = replace(loads[0], name=f"{'AB'[which]}{number + 1}")
                config = (self._configs[which], names[which]) if self._configs else None
                yield PlannedStage(load, endpoints[min(which, len(endpoints) - 1)], number, config)

    async def _tokens_per_word(self, endpoint: Target, form: RequestForm) -> float:
        """Measure the tokens per word by the usage of two requests. Raises `FleetError`."""
        client, ring, counts = endpoint.client(self.settings.timeout), WordRing(0, 1.0), []
        for number, words in enumerate(_PROBE_WORDS):
            outcome = Record(time.perf_counter())
            text = ring.text(number, words)
            await client.ask(form.body([{"role": "user", "content": text}], 1), outcome)
            if not outcome.is_good:
                raise FleetError(f"{endpoint.url} fails a first request: {outcome.error}")
            counts.append(outcome.prompt_tokens)
        client.close()
        # The difference is free of the tokens of a chat template.
        ratio = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
        return ratio if ratio > 0 else 1.0

    async def _stage(self, turn: PlannedStage, form: RequestForm, tokens_per_word: float) -> None:
        settings, load = self.settings, turn.load
        shard = LoadShard(
            number=0,
            processes=settings.processes,
            settings=LoadSettings(
                **{f.name: getattr(settings, f.name) for f in fields(LoadSettings)}
            ),
            load=load,
            draws=turn.draws,
            endpoint=turn.endpoint,
            form=form,
            timeout_seconds=settings.timeout,
            tokens_per_word=tokens_per_word,
            # Texts are new in every stage and run, whatever the seed, so that no prefix cache
            # contains them already.
            novelty=secrets.randbits(64),
        )
        async with contextlib.AsyncExitStack() as stack:
            processes = [
                await stack.enter_async_context(started(replace(shard, number=number)))
                for number in range(shard.processes)
            ]
            for one in processes:
                await one.receive()  # the process is ready
            begun = time.perf_counter() + BEGIN_SECONDS
            for one in processes:
                one.channel.send(begun)
            seen = [one.seen for one in processes]
            is_whole = True
            try:
                async with self._shown(load.name, begun, seen):
                    await follow(processes)
            except FleetError:
                is_whole = False
                raise
            finally:
                ended = time.perf_counter()
                if is_whole:
                    self.stages.append(stage_of(load.name, begun, ended, settings.warmup, seen))
                    self._num_cut = sum(one.started - len(one.outcomes) for one in seen)

    @contextlib.asynccontextmanager
    async def _shown(
        self, name: str, begun: float, seen: Sequence[Observed]
    ) -> AsyncIterator[None]:
        if not self._screen.is_terminal:
            yield
            return

        async def draw(live: Live) -> None:
            while True:
                await asyncio.sleep(LIVE_SECONDS)
                live.update(Text("\n".join(self._picture(name, begun, seen))), refresh=True)

        with Live(console=self._screen, auto_refresh=False, transient=True) as live:
            task = asyncio.create_task(draw(live), name="live table")
            try:
                yield
            finally:
                task.cancel()

    def _picture(self, name: str, begun: float, seen: Sequence[Observed]) -> Iterator[str]:
        now = time.perf_counter()
        recent = [
            replace(one, pulses=one.pulses[-200:], outcomes=[
                each for each in one.outcomes[-20_000:] if each.ended > now - RECENT_SECONDS
            ])
            for one in seen
        ]  # fmt: skip
        since = min((each.intended for one in recent for each in one.outcomes), default=now)
        stage, slo = stage_of(name, since, now, 0.0, recent), self.settings.objective
        yield (
            f"{now - begun:.0f} s, {sum(one.started for one in seen):,} begun, "
            f"{sum(one.in_flight for one in seen):,} in flight; of the last {RECENT_SECONDS:.0f} s:"
        )
        yield from list(lines_of(summary(stage, slo), slo))[: 6 if slo is None else 7]

    def report(self) -> str:
        every, slo = self.summaries, self.settings.objective
        stages = chain.from_iterable([*lines_of(one, slo), ""] for one in every)
        lines = [self._about, "", *stages]
        names = self.settings.compared
        if names is not None:
            self.comparison = compare(every, self.settings.seed)
            lines += comparison_lines(self.comparison, *names)
        elif len(every) > 1:
            lines += stages_table([[one] for one in every])
        text = "\n".join(lines).rstrip()
        if self.was_interrupted:
            text += f"\n\ninterrupted; requests in flight, not counted: {self._num_cut:,}"
        return text.lstrip()
