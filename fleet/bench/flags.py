"""The flags of `pointsman bench`, and the settings that they give."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from base.flags import Dialect, Parser, Readers, add_flags, whole_number
from fleet.bench.arrivals import Ramp
from fleet.bench.slo import Bound, Slo, read_bounds
from fleet.bench.workload import TokenRange
from fleet.errors import UsageError

MAX_PROCESSES = 256
_COUNT: Final = whole_number(1)
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([ -~]*)")
_OURS = ("content-length", "content-type", "host", "transfer-encoding")


_FLAGS: Final = """
--url URL = http://127.0.0.1:8080
                              the endpoint
--model NAME                  default: the first one served
--api chat|completions = chat
                              API of the requests
--header HEADER               header of every request, such as 'authorization: Bearer KEY'; may be
                              repeated

load
--timeout SECONDS(0..] = 120.0
                              time after which a request has failed
--processes N[1..] = 1        processes that share the load, which is the same for any N: for rates
                              that one process cannot send
--compare-url URL             a second endpoint: the same arrivals at both in alternating turns
or --compare CONFIG           two configurations in alternating turns, each put into the file that
                              the picker follows: files, or names that `simulate --policies` knows,
                              such as round-robin default
--picker URL                  HTTP port of the picker for --compare (default: of the fleet that runs
                              here)
--rounds N[1..]               turns of each when comparing (default 6)

what is asked
--respect-eos                 let answers end early (default: ignore_eos, which vLLM and our workers
                              have)
"""
_OFFLINE: Final = """
--model PATH                  GGUF file or Hugging Face directory (default: random weights in the
                              shape of Qwen3-0.6B)
--requests N[1..] = 256       number of prompts, all given at once
--input-tokens SPAN = 100..1024
                              tokens of a prompt, which are random ids
--output-tokens SPAN = 100..1024
                              tokens to generate
--seed N = 1                  seed of prompts and lengths
--llm JSON                    keyword arguments of pointsman.LLM, such as {"max_num_seqs": 256}
--peer vllm|nano-vllm|transformers
                              run the same prompts in this engine too, if it is installed
--json FILE                   write all numbers
"""
# Flags of `pointsman simulate` too.
LOAD: Final = """
load
--rate R                      requests a second, whatever the answers: 5, a ramp 1..20, or stages
                              1,2,4,8 (default 1)
or --concurrency COUNTS       instead of --rate: number of sessions at a time, each started when
                              another ends; or 10,20,40
--burstiness SHAPE = 1.0      shape of the gaps: 1 is Poisson, less is burstier, inf is regular
--duration SECONDS(0..]       duration of each stage (default 30, of a trace all of it)
--requests N[1..]             most requests of each stage
--warmup SECONDS[0..] = 0.0   time at the start of each stage whose requests are not counted
--seed N = 1                  seed of arrivals and lengths

what is asked
--input-tokens SPAN = 512     tokens of a user's text: 512, or random from 128..1024
--output-tokens SPAN = 128    tokens requested
--prefix-groups N[1..]        number of system prompts, one of which begins each session
--prefix-tokens SPAN          tokens of each system prompt (default 1024); without groups every
                              session has its own
--prefix-prompts N[1..]       first questions of a group, which are repeated (default: every
                              question is new)
--turns SPAN = 1              requests of a session, each with the conversation so far: 4, or 2..8
--think SECONDS[0..] = 0.0    time between an answer and the next turn
--trace FILE                  times, lengths and shared beginnings of Mooncake's JSON lines, Azure's
                              CSV, a recording
--speed FACTOR(0..]           factor by which a trace is sent faster than it was recorded

results
--slo BOUNDS                  bounds of every request, or of a quantile:
                              ttft<1s,itl<50ms,e2e_p95<8s
--slo-share SHARE[0..1] = 0.99
                              share of requests that must be within their bounds
--json FILE                   write all numbers
--csv FILE                    write one line for each request
--html FILE                   write one page with plots
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman bench",
        description="Send load to any OpenAI endpoint, and report what its clients see.",
        epilog="Exit status: 0; 1 if an objective of --slo is missed, or nothing was answered; "
        "2 for a wrong command line.",
    )
    dialect = Dialect(
        readers={"HEADER": _header},
        settings={
            "--compare": {"nargs": 2, "metavar": ("A", "B")},
            "--header": {"action": "append", "default": []},
        },
    )
    add_flags(parser, LOAD, LOAD_DIALECT)
    add_flags(parser, _FLAGS, dialect)
    commands = parser.add_subparsers(metavar="[offline]", title="without a server")
    about = "measure the tokens a second of an engine in this process's place, without a server"
    offline = commands.add_parser("offline", help=about, description=about)
    offline.set_defaults(is_offline=True)
    readers: Readers = {"SPAN": _span, "FILE": Path, "PATH": Path, "JSON": _object}
    add_flags(offline, _OFFLINE, Dialect(readers=readers, defaults={"llm": "{}"}))
    return parser


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"takes a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"takes a JSON object, not {text[:80]!r}")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shape(text: str) -> float:
    value = _number(text)
    if not value >= 0.01:
        raise ValueError(f"takes a number of 0.01 or more, or inf, not {text!r}")
    return value


def _rates(text: str) -> tuple[Ramp, ...]:
    ramps = []
    for part in text.split(","):
        ends = [_number(end) for end in part.split("..")]
        if len(ends) > 2 or not all(0 < end <= 1e6 for end in ends):
            raise ValueError(
                "takes requests a second such as 5, 1..20 or 1,2,4, at most a million, "
                f"not {text[:80]!r}"
            )
        ramps.append(Ramp(ends[0], ends[-1]))
    return tuple(ramps)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_COUNT(part) for part in text.split(","))


def _span(text: str) -> TokenRange:
    ends = [int(end) if re.fullmatch("[0-9]{1,7}", end) else 0 for end in text.split("..")]
    if len(ends) > 2 or not 0 < ends[0] <= ends[-1]:
        raise ValueError(
            f"takes a whole number from 1 to 9,999,999, or two such as 128..1024, not {text[:80]!r}"
        )
    return TokenRange(ends[0], ends[-1])


def _header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text)
    if found is None or found[1].lower() in _OURS:
        raise ValueError(f"takes 'name: value' ({', '.join(_OURS)} are ours)")
    return found[1].lower(), found[2]


LOAD_DIALECT: Final = Dialect(
    readers={
        "BOUNDS": read_bounds,
        "COUNTS": _counts,
        "FILE": Path,
        "R": _rates,
        "SHAPE": _shape,
        "SPAN": _span,
    }
)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    rate: tuple[Ramp, ...] | None
    concurrency: tuple[int, ...] | None
    burstiness: float
    duration: float | None
    requests: int | None
    warmup: float
    seed: int
    input_tokens: TokenRange
    output_tokens: TokenRange
    prefix_groups: int | None
    prefix_tokens: TokenRange | None
    prefix_prompts: int | None
    turns: TokenRange
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
        """The duration of a stage; with only a number of requests, until they are sent."""
        if self.duration is not None:
            return self.duration
        return 30.0 if self.requests is None else 1e7

    def check(self) -> None:
        """Raise `UsageError` for flags that contradict each other."""
        if self.speed is not None and self.trace is None:
            raise UsageError("--speed is for a --trace")
        if self.prefix_prompts is not None and self.prefix_groups is None:
            raise UsageError("--prefix-prompts needs --prefix-groups")
        if self.trace is not None and (self.prefix_groups or self.prefix_tokens):
            name = "--prefix-groups" if self.prefix_groups else "--prefix-tokens"
            raise UsageError(f"{name} is not for a --trace, whose beginnings are its own")
        if self.trace is not None and self.turns != TokenRange(1, 1):
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
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: None if v is None else _plain(v) for k, v in every.items()}


def _plain(value: object) -> object:
    if isinstance(value, int | float | str):
        return value
    return [str(one) for one in value] if isinstance(value, tuple | list) else str(value)


@dataclass(frozen=True, slots=True)
class Settings(LoadSettings):
    url: str
    model: str | None
    api: str
    header: list[tuple[str, str]]
    timeout: float
    compare_url: str | None
    compare: list[str] | None
    picker: str | None
    rounds: int | None
    processes: int
    respect_eos: bool

    @property
    def compared(self) -> tuple[str, str] | None:
        if self.compare is not None:
            return self.compare[0], self.compare[1]
        return None if self.compare_url is None else (self.url, self.compare_url)

    def check(self) -> None:
        LoadSettings.check(self)
        if self.compared is not None and len(self.rate or self.concurrency or ()) > 1:
            name = "--rate a single rate or ramp" if self.rate else "--concurrency one number"
            raise UsageError(f"a comparison has one stage: give {name}")
        if self.concurrency is not None and min(self.concurrency) < self.processes:
            raise UsageError("--processes must not be more than --concurrency")
        if self.processes > MAX_PROCESSES:
            raise UsageError(f"--processes must not be more than {MAX_PROCESSES}")
        if self.picker is not None and self.compare is None:
            raise UsageError("--picker is for --compare")
        if self.rounds is not None and self.compared is None:
            raise UsageError("--rounds is for --compare and --compare-url")

    def public(self) -> dict[str, object]:
        return {k: v for k, v in LoadSettings.public(self).items() if k != "header"}


def read_settings(argv: Sequence[str]) -> Settings:
    """Parse a command line. Raises `UsageError` for flags that contradict each other."""
    settings = Settings(**vars(build_parser().parse_args(argv)))
    settings.check()
    return settings


def refuse_unwritable(path: Path) -> None:
    """Raise `UsageError` before a run whose result `write_text` could not write."""
    why = None
    if path.is_dir():
        why = "it is a folder; the result needs the name of a file"
    elif path.exists():
        why = None if os.access(path, os.W_OK) else "it is read-only for this user"
    else:
        folder = next(one for one in path.absolute().parents if one.exists())
        if not folder.is_dir():
            why = f"{folder} is no folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            why = f"{folder} is read-only for this user"
    if why is not None:
        raise UsageError(f"cannot write {path}: {why}")
