"""The flags of `pointsman simulate`, and the settings that they give."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from base.flags import Dialect, Parser, add_flags
from fleet.bench.flags import LOAD, LOAD_DIALECT, LoadSettings
from fleet.errors import UsageError
from worker.errors import ConfigError
from worker.sim.settings import BY_NAME

DEFAULT_WORKERS = 4
MAX_WORKERS = 10_000
_EVENT = re.compile(
    r"(?P<at>[0-9]+(?:\.[0-9]+)?):"
    r"(?:(?P<kind>kill|drain|add):(?P<number>[1-9][0-9]{0,5})"
    r"|slow:(?P<slow>[1-9][0-9]{0,5}):(?P<factor>(?=[0-9.]*[1-9])[0-9]+(?:\.[0-9]+)?))"
)


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a fleet. `number` is that of a worker, from 1, or how many are added."""

    at_seconds: float
    kind: str
    number: int
    factor: float = 1.0

    def __str__(self) -> str:
        text = f"{self.at_seconds:g}:{self.kind}:{self.number}"
        return f"{text}:{self.factor:g}" if self.kind == "slow" else text


_FLAGS = """
fleet
--workers N[1..]              number of workers (default 4)
or --prefill N[1..]           in place of --workers: number of workers, the first ones, that run
                              prompts for those of --decode, by the configuration of `pointsman up
                              --prefill`
--decode N[1..]               in place of --workers: number of workers that answer
--sim-kv-cache-transfer-latency DURATION
                              time of KV from another worker (default 0s)
--sim-kv-cache-transfer-time-per-token DURATION
                              time of each token of KV from another worker, if the latency is 0
                              (default 0s)
--worker NAME|FILE = qwen3-32b-2xh100
                              speed of each worker: a preset, or a file of `pointsman fit`
--kv-tokens N[1..]            KV cache of each (default: of the preset or file, else 262144)
--max-num-seqs N[1..]         sequences in a step (default: of the preset or file, else 256)
--max-num-batched-tokens N[1..]
                              tokens in a step (default: of the preset or file, else 8192)
--fast                        skip over equal steps: approximate, and several times as fast
--policies NAME|FILE          configurations of the picker, with the same requests for each: files,
                              or default, precise, four-scorers, predicted, random, round-robin,
                              power-of-two, consistent-hashing, cache_aware, dynamo, load-only,
                              prefix-only, llm-d-111, llm-d-322 (default: default)
--response-bodies off|usage|all = off
                              what the picker sees of responses: headers and the end (off), also the
                              first token's time and the usage (usage, and all)
--event EVENT                 SECONDS:kill:N, :drain:N, :slow:N:FACTOR of the worker of this number,
                              or :add:COUNT; may be repeated
--seeds N[1..] = 1            runs with different seeds, from --seed on: mean ± deviation; plots
                              show the first
--processes N[1..]            simulations at a time, each with the memory of its fleet (default: the
                              cores)

questions
--find workers                find the smallest number of workers that meets --slo
or --scenario NAMES           a published benchmark, or several: S1,S6; or all
or --replay FILE              repeat the requests of a recording with other configurations
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman simulate",
        description="Run a fleet in virtual time: the picker's code and the workers' scheduler and "
        "cache, with a latency model for the forward pass. Nothing waits, and a seed gives one "
        "outcome.",
        epilog="Exit status: 0; 1 if an objective of --slo is missed, or nothing was answered; "
        "2 for a wrong command line.",
    )
    durations = ("sim_kv_cache_transfer_latency", "sim_kv_cache_transfer_time_per_token")
    dialect = Dialect(
        readers={
            "DURATION": _duration,
            "EVENT": _event,
            "FILE": Path,
            "NAME|FILE": str,
            "NAMES": _names,
            "--find": ("workers",),
        },
        defaults=dict.fromkeys(durations, 0.0),
        settings={"--event": {"action": "append", "default": []}, "--policies": {"nargs": "+"}},
    )
    add_flags(parser, _FLAGS, dialect)
    add_flags(parser, LOAD, LOAD_DIALECT)
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _duration(text: str) -> float:
    try:
        return float(BY_NAME["kv-cache-transfer-latency"].parse(text))
    except ConfigError as error:
        raise ValueError(str(error).partition(" ")[2]) from None


def _event(text: str) -> Event:
    found = _EVENT.fullmatch(text)
    if found is None:
        raise ValueError(
            "takes an event such as 60:kill:3, 60:drain:3, 90:slow:1:4 or 120:add:2, "
            f"not {text[:80]!r}"
        )
    if found["slow"]:
        return Event(float(found["at"]), "slow", int(found["slow"]), float(found["factor"]))
    return Event(float(found["at"]), found["kind"], int(found["number"]))


@dataclass(frozen=True, slots=True)
class SimulateSettings(LoadSettings):
    workers: int | None
    prefill: int | None
    decode: int | None
    sim_kv_cache_transfer_latency: float
    sim_kv_cache_transfer_time_per_token: float
    worker: str
    kv_tokens: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    fast: bool
    policies: list[str] | None
    response_bodies: str
    event: list[Event]
    seeds: int
    processes: int | None
    find: str | None
    scenario: tuple[str, ...] | None
    replay: Path | None

    @property
    def num_workers(self) -> int:
        if self.prefill is not None and self.decode is not None:
            return self.prefill + self.decode
        return self.workers or DEFAULT_WORKERS

    def check(self) -> None:
        LoadSettings.check(self)
        self.check_roles()
        if self.find is not None and self.slo is None:
            raise UsageError("--find needs --slo, such as ttft_p95<1s,itl_p95<50ms")
        if self.find is not None and (self.json or self.csv or self.html):
            raise UsageError("--json, --csv and --html are for runs: --find prints a number")
        if self.num_workers > MAX_WORKERS:
            raise UsageError(f"--workers must not be more than {MAX_WORKERS:,}")
        if self.find is not None and self.event:
            raise UsageError("--event is not for --find: its workers have no numbers")
        if self.replay is not None and self.trace is not None:
            raise UsageError("--replay has the requests; --trace is for a run without it")
        most = self.num_workers
        for event in sorted(self.event, key=lambda one: one.at_seconds):
            if event.kind == "add":
                most += event.number
                if most > MAX_WORKERS:
                    raise UsageError(f"--event {event}: there are at most {MAX_WORKERS:,}")
            elif event.number > most:
                raise UsageError(f"--event {event}: there is no worker {event.number} then")

    def check_roles(self) -> None:
        """Raise `UsageError` for flags of prefill and decode workers that have no use."""
        if (self.prefill is None) is not (self.decode is None):
            raise UsageError("--prefill and --decode go together: give both, or neither")
        if self.prefill is not None:
            for flag in ("find", "scenario", "replay"):
                if getattr(self, flag) is not None:
                    raise UsageError(f"--prefill is not for --{flag}, whose workers do both")
        elif self.sim_kv_cache_transfer_latency or self.sim_kv_cache_transfer_time_per_token:
            name = "latency" if self.sim_kv_cache_transfer_latency else "time-per-token"
            raise UsageError(f"--sim-kv-cache-transfer-{name} is for --prefill")


def read_settings(argv: Sequence[str]) -> SimulateSettings:
    """Parse flags. Raises `UsageError`; with `--scenario`, only for flags that no scenario has."""
    settings = SimulateSettings(**vars(build_parser().parse_args(argv)))
    if settings.scenario is None:
        settings.check()
    else:
        settings.check_roles()
    return settings
