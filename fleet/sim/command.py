"""`pointsman simulate`: from the command line to a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import chain, count, islice
from math import inf
from random import Random
from statistics import fmean

from base.response_bodies import ResponseBodies
from fleet.bench.arrivals import Ramp
from fleet.bench.load import StageLoad, loads_of, sessions_of, write_results
from fleet.bench.page import ReportPart, RunFacts
from fleet.bench.report import lines_of, stages_table
from fleet.bench.slo import Slo
from fleet.bench.summary import Stage, Summary, summary
from fleet.bench.traces import read_recorded
from fleet.bench.workload import Sessions, traced_sessions
from fleet.errors import UsageError
from fleet.policies import POLICIES, policy
from fleet.run.layout import DISAGGREGATED_CONFIG
from fleet.run.proc import cores
from fleet.sim.fast_worker import is_linear
from fleet.sim.flags import Event, SimulateSettings, build_parser, read_settings
from fleet.sim.latency import WorkerLimits, worker_settings
from fleet.sim.processes import Processes
from fleet.sim.scenarios import ELSEWHERE, SCENARIOS
from fleet.sim.simulation import Tenant, simulate
from fleet.sim.virtual_fleet import Simulation
from picker.errors import ConfigError

_MAX_GAPS = 100_000
MAX_WORKERS_TRIED = 1024  # the most that are tried
_EVENTS = "precise-prefix-cache"  # a configuration of it follows KV events
Policy = tuple[str, str | None]
Out = Callable[[str], None]


def simulate_command(argv: Sequence[str], out: Out, note: Out) -> int:
    """Run the command. `note` gets each ended simulation and late event. Raises `FleetError`."""
    settings = read_settings(argv)
    ends: list[float] = []
    with Processes(_simulated, settings.processes or cores()) as processes:

        def results(jobs: Sequence[_Job]) -> Iterator[_Done]:
            ended = count(1)

            def report(job: _Job) -> None:
                fleet = f"{job.simulation.workers} workers, seed {job.simulation.seed}"
                if len(jobs) > 1 or settings.find is not None:
                    note(f"{next(ended)}/{len(jobs)} {job.title}, {fleet}")

            for summaries, stages, end in processes.results(jobs, report):
                ends.append(end)
                yield summaries, stages

        if settings.scenario is not None:
            status = _scenarios(settings, argv, results, out)
        else:
            status = _one_data_set(settings, argv, results, out)
    for text in _too_late(settings.event, ends):
        note(text)
    return status


def _too_late(events: Sequence[Event], ends: Sequence[float]) -> Iterator[str]:
    for event in events:
        before = [end for end in ends if end < event.at_seconds]
        if before:
            which = "the run" if len(ends) == 1 else f"{len(before)} of {len(ends)} simulations"
            last = "" if len(before) == 1 else ", the last of them"
            yield f"--event {event} never happened: {which} ended{last} at {max(before):.1f} s"


def _named_policies(settings: SimulateSettings) -> list[Policy]:
    names = settings.policies or ["default"]
    if settings.prefill is None:
        return [policy(name) for name in names]
    for name in names:
        if name in POLICIES and name != "default":
            raise UsageError(
                f"--policies: {name} knows no prefill workers; with --prefill take default or "
                "a file"
            )
    return [(n, DISAGGREGATED_CONFIG) if n == "default" else policy(n) for n in names]


def _one_data_set(
    settings: SimulateSettings, argv: Sequence[str], results: Results, out: Out
) -> int:
    begun, notes = datetime.now().astimezone(), list[str]()
    policies = _named_policies(settings)
    if settings.replay is not None:
        config, lacks = read_recorded(settings.replay)
        notes = [*lacks, ""]
        policies = [("recorded", config), *(policies if settings.policies else [])]
        settings = replace(settings, trace=settings.replay)
    sessions = sessions_of(settings)
    run = _Run(settings, policies, lambda _: sessions, list(loads_of(settings)))
    if settings.find is not None:
        return _find(run, results, out)
    rows, stages = run.rows(results(list(run.jobs())))
    report = "\n".join([*notes, *_lines(rows, settings)])
    out(report)
    document = {
        "pointsman_simulate": 1,
        "settings": settings.public(),
        "notes": notes,
        "stages": _plain(rows, settings.seed),
    }
    firsts = [row.by_seed[0] for row in rows]
    write_results(
        settings, document, _head(settings, argv, begun), [ReportPart(report, stages, firsts)]
    )
    every = [one for row in rows for one in row.by_seed]
    is_missed = any(one.missed for one in every) or not any(one.completed_rate for one in every)
    return 1 if is_missed else 0


def _head(settings: SimulateSettings, argv: Sequence[str], begun: datetime) -> RunFacts:
    facts = {"Model": f"simulated worker {settings.worker}", "Seed": str(settings.seed)}
    if settings.seeds > 1:
        facts["Seed"] += f", the first of {settings.seeds} (the text has the mean of all)"
    return RunFacts(("simulate", *argv), begun, facts, settings.objective)


@dataclass(frozen=True, slots=True)
class _Row:
    policy: str
    load: str
    by_seed: Sequence[Summary]

    @property
    def name(self) -> str:
        return self.by_seed[0].name


def _plain(rows: Sequence[_Row], first: int) -> list[dict[str, object]]:
    return [
        {"seed": seed, **asdict(one)} for row in rows for seed, one in enumerate(row.by_seed, first)
    ]


@dataclass(frozen=True, slots=True)
class _Job:
    """One simulation. Can be pickled."""

    title: str
    policy: str
    simulation: Simulation
    tenants: Sequence[Tenant]
    draws: int
    slo: Slo | None
    keeps_stages: bool


_Done = tuple[list[Summary], list[Stage]]  # by tenant; stages only if a report needs them
_Ended = tuple[list[Summary], list[Stage], float]  # with the time of the last answer
Results = Callable[[Sequence[_Job]], Iterator[_Done]]


def _simulated(job: _Job) -> _Ended:
    try:
        stages = simulate(job.simulation, job.tenants, job.draws)
    except ConfigError as error:
        text = str(error).partition("\n")[0]
        raise UsageError(f"--policies: {job.policy}: {text}") from error
    summaries = [summary(one, job.slo) for one in stages]
    ended = max(one.ended for one in stages)
    if not job.keeps_stages:
        return summaries, [], ended
    for stage in stages:
        _thin(stage)
    return summaries, stages, ended


@dataclass(frozen=True, slots=True)
class _Run:
    settings: SimulateSettings
    policies: Sequence[Policy]
    sessions: Callable[[int], Sessions]  # by seed
    loads: Sequence[StageLoad]
    tenants: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def jobs(self, workers: int | None = None) -> Iterator[_Job]:
        """List the jobs by load, then policy, then seed. Raises `UsageError`."""
        settings = self.settings
        seeds = range(settings.seed, settings.seed + settings.seeds)
        sessions = {seed: self.sessions(seed) for seed in seeds}
        shows = settings.csv is not None or settings.html is not None
        for draws, load in enumerate(self.loads):
            for name, config in self.policies:
                title = name if len(self.loads) == 1 else f"{load.name} {name}"
                for seed in seeds:
                    simulation = self._simulation(config, workers, seed)
                    tenants = list(self._tenants(title, load, sessions[seed]))
                    keeps = shows and seed == settings.seed
                    yield _Job(title, name, simulation, tenants, draws, settings.objective, keeps)

    def rows(self, results: Iterator[_Done]) -> tuple[list[_Row], list[Stage]]:
        rows, stages = list[_Row](), list[Stage]()
        for load in self.loads:
            for name, _ in self.policies:
                by_seed = list[list[Summary]]()
                for summaries, some in islice(results, self.settings.seeds):
                    by_seed.append(summaries)
                    stages += some
                for who, each in zip(
                    self.tenants or ("",), zip(*by_seed, strict=True), strict=True
                ):
                    rows.append(_Row(name, ", ".join(filter(None, (load.name, who))), each))
        return rows, stages

    def _tenants(self, title: str, load: StageLoad, sessions: Sessions) -> Iterator[Tenant]:
        whole = Tenant(title, self.settings, load, sessions)
        if not self.tenants:
            yield whole
        for who, (_, share) in self.tenants.items():
            ramp = load.ramp and Ramp(share * load.ramp.first, share * load.ramp.last)
            part = replace(load, ramp=ramp)
            yield replace(whole, name=f"{title}, {who}", load=part, objective=who)

    def _simulation(self, config: str | None, workers: int | None, seed: int) -> Simulation:
        settings = self.settings
        limits = WorkerLimits(
            settings.kv_tokens, settings.max_num_seqs, settings.max_num_batched_tokens
        )
        records_events = config is not None and _EVENTS in config
        worker = worker_settings(settings.worker, limits, records_events)
        transfers = replace(
            worker.sim,
            kv_transfer_seconds=settings.sim_kv_cache_transfer_latency,
            kv_transfer_per_token_seconds=settings.sim_kv_cache_transfer_time_per_token,
        )
        worker = replace(worker, sim=transfers)
        if settings.fast and not is_linear(worker):
            model = worker.sim.latency_model
            text = f"--fast is for the latency model linear; that of {settings.worker} is {model}"
            raise UsageError(text)
        return Simulation(
            workers or settings.num_workers,
            worker,
            config,
            settings.fast,
            seed,
            tuple(settings.event),
            {who: priority for who, (priority, _) in self.tenants.items()},
            settings.prefill or 0,
            settings.response_bodies != ResponseBodies.OFF.value,
        )


def _thin(stage: Stage) -> None:
    """Sample the gaps of a stage for a plot: all of them may be gigabytes."""
    step = 1 + sum(len(one.gaps) for one in stage.outcomes) // _MAX_GAPS
    # A fixed stride could select only the first gaps of answers, which are longer.
    rng = Random(step)
    for outcome in stage.outcomes if step > 1 else ():
        outcome.gaps = outcome.gaps[rng.randrange(step) :: step]


def _lines(rows: Sequence[_Row], settings: SimulateSettings) -> Iterator[str]:
    if len(rows) == settings.seeds == 1:
        yield from lines_of(rows[0].by_seed[0], settings.objective)
        return
    yield from stages_table([row.by_seed for row in rows])
    for row in rows:
        for text in dict.fromkeys(text for one in row.by_seed for text in one.missed):
            yield f"  {row.name} missed {text}"
    yield from _failures(rows)


def _failures(rows: Sequence[_Row]) -> Iterator[str]:
    for row in rows:
        errors = Counter[str]()
        for one in row.by_seed:
            errors.update(one.errors)
        for error, times in errors.most_common(3):
            yield f"  {row.name} failed {times:,} times: {error}"


def _find(run: _Run, results: Results, out: Out) -> int:
    found = [_least(replace(run, policies=[one]), results, out) for one in run.policies]
    return 0 if all(found) else 1


def _least(run: _Run, results: Results, out: Out) -> bool:
    [(name, _)] = run.policies
    tried = dict[int, list[str]]()

    def keeps(workers: int) -> bool:
        rows, _ = run.rows(results(list(run.jobs(workers))))
        missed = (text for row in rows for one in row.by_seed for text in one.missed)
        tried[workers] = list(dict.fromkeys(missed))
        return not tried[workers]

    few, many = 0, run.settings.workers or 1
    while not keeps(many):
        few, many = many, 2 * many
        if many > MAX_WORKERS_TRIED:
            out(f"{name}: {few:,} workers do not meet it either: {'; '.join(tried[few])}")
            return False
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if keeps(middle) else (middle, many)
    before = f" (with {few}: {'; '.join(tried[few])})" if few in tried else ""
    out(f"{name}: {many} workers{before}")
    return True


def _scenarios(settings: SimulateSettings, argv: Sequence[str], results: Results, out: Out) -> int:
    names = settings.scenario or ()
    if names == ("all",):
        names = (*SCENARIOS, *ELSEWHERE)
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in SCENARIOS and name not in ELSEWHERE:
            known = ", ".join([*SCENARIOS, *ELSEWHERE])
            raise UsageError(f"--scenario: there is no {name}; there are {known}, and all")
    runs = {name: _run_of(name, argv) for name in names if name in SCENARIOS}
    jobs = [
        replace(job, title=f"{name} {job.title}")
        for name, run in runs.items()
        for job in run.jobs()
    ]
    every = results(jobs)
    begun, parts, found = datetime.now().astimezone(), list[ReportPart](), dict[str, list[_Row]]()
    for name in names:
        if name in ELSEWHERE:
            part = ReportPart(f"{name} {ELSEWHERE[name]}\n", title=name)
        else:
            one = SCENARIOS[name]
            found[name], stages = runs[name].rows(every)
            stages = [replace(stage, name=f"{name} {stage.name}") for stage in stages]
            given = " ".join([one.flags, *argv])
            lines = [f"{name} {one.title}", f"  {given}", f"  published: {one.published}"]
            lines += [*stages_table([row.by_seed for row in found[name]]), *_failures(found[name])]
            firsts = [row.by_seed[0] for row in found[name]]
            part = ReportPart("\n".join([*lines, ""]), stages, firsts, lines[0])
        out(part.text)
        parts.append(part)
    if len(found) > 1:
        parts.append(ReportPart("\n".join(_verdict(found)), title="Verdict"))
        out(parts[-1].text)
    document = {
        "pointsman_simulate": 1,
        "settings": settings.public(),
        "scenarios": {name: _plain(rows, settings.seed) for name, rows in found.items()},
    }
    write_results(settings, document, _head(settings, argv, begun), parts)
    rows = chain.from_iterable(found.values())
    answers = any(one.completed_rate for row in rows for one in row.by_seed)
    return 0 if answers or not found else 1


def _run_of(name: str, argv: Sequence[str]) -> _Run:
    """Put a scenario's flags first, so that those of the user win."""
    one = SCENARIOS[name]
    flags = build_parser().parse_args([*one.flags.split(), *argv])
    settings = SimulateSettings(**vars(flags))
    settings.check()
    policies = [policy(each) for each in settings.policies or one.policies]
    requests = one.requests
    if requests is None:
        sessions = sessions_of(settings)
        return _Run(settings, policies, lambda _: sessions, list(loads_of(settings)), one.tenants)

    def traced(seed: int) -> Sessions:
        return traced_sessions(requests(Random(f"{seed} {name}")), 1.0)

    return _Run(settings, policies, traced, [StageLoad(name)], one.tenants)


def _verdict(found: Mapping[str, Sequence[_Row]]) -> Iterator[str]:
    """Yield lines on each policy's distance to the best of a load, by goodput and mean time."""
    lost = dict[str, list[tuple[float, float, str]]]()
    for scenario, rows in found.items():
        for load in dict.fromkeys(row.load for row in rows):
            some = [row for row in rows if row.load == load]
            goodputs = [fmean(each.goodput or 0.0 for each in row.by_seed) for row in some]
            times = [fmean(one.e2e.mean if one.e2e else inf for one in row.by_seed) for row in some]
            for row, goodput, seconds in zip(some, goodputs, times, strict=True):
                one = max(goodputs) - goodput, seconds / min(times) - 1, f"{scenario} {load}"
                lost.setdefault(row.policy, []).append(one)
    yield "Behind the best of each load"
    wide = max(len(policy) for policy in lost)
    for name, behind in lost.items():
        points, _, where = max(behind)
        _, slower, there = max(behind, key=lambda one: one[1])
        yield (
            f"  {name:>{wide}}: goodput by {fmean(one[0] for one in behind):.1%}, at worst "
            f"{points:.1%} ({where}); E2E {fmean(one[1] for one in behind):.1%} longer, at worst "
            f"{slower:.1%} ({there}); {len(behind)} loads"
        )
