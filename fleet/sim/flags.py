# Apart: read by the help of the command line, without what runs the commands.
"""The flags of `pointsman simulate`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from fleet.bench.flags import add_data, add_load, add_results
from fleet.command_line import Parser, count
from worker.errors import ConfigError
from worker.faults.sim_settings import BY_NAME

_EVENT = re.compile(
    r"(?P<at>[0-9]+(?:\.[0-9]+)?):"
    r"(?:(?P<kind>kill|drain|add):(?P<number>[1-9][0-9]{0,5})"
    r"|slow:(?P<slow>[1-9][0-9]{0,5}):(?P<factor>(?=[0-9.]*[1-9])[0-9]+(?:\.[0-9]+)?))"
)


@dataclass(frozen=True, slots=True)
class Event:
    """At so many seconds a worker is killed, drained or slowed, by its number from 1; or `number`
    workers are added.
    """

    at_seconds: float
    kind: str
    number: int
    factor: float = 1.0

    def __str__(self) -> str:
        text = f"{self.at_seconds:g}:{self.kind}:{self.number}"
        return f"{text}:{self.factor:g}" if self.kind == "slow" else text


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman simulate",
        description="Run a fleet in virtual time: the picker's code and the workers' scheduler and "
        "cache, with a latency model for the forward pass. Nothing waits, and a seed gives one "
        "outcome.",
        epilog="Exit status: 0; 1 if an objective of --slo is missed, or nothing was answered; "
        "2 for a wrong command line.",
    )
    group = parser.add_argument_group("fleet")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--workers", type=count, metavar="N", help="(default 4)")
    text = (
        "in place of --workers: so many workers, the first ones, that run prompts for those of "
        "--decode, by the configuration of `pointsman up --prefill`"
    )
    either.add_argument("--prefill", type=count, metavar="N", help=text)
    text = "in place of --workers: so many workers that answer"
    group.add_argument("--decode", type=count, metavar="N", help=text)
    for name, what in (("latency", "if not 0"), ("time-per-token", "else of each of its tokens")):
        text = f"time of KV from another worker, {what} (default 0s)"
        flag = f"--sim-kv-cache-transfer-{name}"
        group.add_argument(flag, type=_duration, default=0.0, metavar="DURATION", help=text)
    text = "how fast each is: a preset, or a file of `pointsman fit`"
    group.add_argument("--worker", default="qwen3-32b-2xh100", metavar="NAME|FILE", help=text)
    text = "KV cache of each (default: of the preset or file, else 262144)"
    group.add_argument("--kv-tokens", type=count, metavar="N", help=text)
    text = "sequences in a step (default: of the preset or file, else 256)"
    group.add_argument("--max-num-seqs", type=count, metavar="N", help=text)
    text = "tokens in a step (default: of the preset or file, else 8192)"
    group.add_argument("--max-num-batched-tokens", type=count, metavar="N", help=text)
    text = "workers that jump over equal steps: approximate, and several times as fast"
    group.add_argument("--fast", action="store_true", help=text)
    text = (
        "configurations of the picker, with the same requests for each: files, or default, "
        "precise, predicted, random, round-robin, power-of-two, consistent-hashing, cache_aware, "
        "dynamo, load-only, prefix-only, llm-d-111, llm-d-322 (default: default)"
    )
    group.add_argument("--policies", nargs="+", metavar="NAME|FILE", help=text)
    text = (
        "SECONDS:kill:N, :drain:N, :slow:N:FACTOR of the worker of this number, or :add:COUNT; may "
        "be repeated"
    )
    group.add_argument("--event", type=_event, action="append", default=[], help=text)
    text = "runs of each, with the seeds from --seed on: mean ± deviation; plots show the first"
    group.add_argument("--seeds", type=count, default=1, metavar="N", help=text)
    text = "simulations at a time, each with the memory of its fleet (default: the cores)"
    group.add_argument("--processes", type=count, metavar="N", help=text)
    asked = parser.add_argument_group("questions")
    either = asked.add_mutually_exclusive_group()
    text = "the least number of workers that keeps --slo"
    either.add_argument("--find", choices=("workers",), help=text)
    text = "a published benchmark, or several: S1,S6; or all"
    either.add_argument("--scenario", type=_names, metavar="NAMES", help=text)
    text = "what other configurations would have done with the requests of a recording"
    either.add_argument("--replay", type=Path, metavar="FILE", help=text)
    add_load(parser)
    add_data(parser)
    add_results(parser)
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _duration(text: str) -> float:
    """Seconds, as the worker's flags of these names read them."""
    try:
        return float(BY_NAME["kv-cache-transfer-latency"].parse(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).partition(" ")[2]) from None


def _event(text: str) -> Event:
    found = _EVENT.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            "takes an event such as 60:kill:3, 60:drain:3, 90:slow:1:4 or 120:add:2, "
            f"not {text[:80]!r}"
        )
    if found["slow"]:
        return Event(float(found["at"]), "slow", int(found["slow"]), float(found["factor"]))
    return Event(float(found["at"]), found["kind"], int(found["number"]))
