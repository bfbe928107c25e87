# Apart: read by the help of the command line, without what runs the command.
"""The flags of `pointsman bench`."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from fleet.bench.arrivals import Ramp
from fleet.bench.slo import Bound, read_bounds
from fleet.bench.workload import Span
from fleet.command_line import Parser, count, seconds, url

_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([ -~]*)")
_OURS = ("content-length", "content-type", "host", "transfer-encoding")


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman bench",
        description="Send load to any OpenAI endpoint, and report what its clients see.",
        epilog="Exit status: 0; 1 if an objective of --slo is missed, or nothing was answered; "
        "2 for a wrong command line.",
    )
    text = "the endpoint"
    parser.add_argument("--url", type=url, default="http://127.0.0.1:8080", help=text)
    parser.add_argument("--model", help="default: the first one served")
    text = "which of the two APIs"
    parser.add_argument("--api", choices=("chat", "completions"), default="chat", help=text)
    text = "sent with every request, such as 'authorization: Bearer KEY'; may be repeated"
    parser.add_argument("--header", type=_header, action="append", default=[], help=text)
    group = add_load(parser)
    text = "after which a request has failed"
    group.add_argument("--timeout", type=positive, default=120.0, metavar="SECONDS", help=text)
    text = "that share the load, which is the same whatever N: for rates that one cannot send"
    group.add_argument("--processes", type=count, default=1, metavar="N", help=text)
    compared = group.add_mutually_exclusive_group()
    text = "a second endpoint: the same arrivals at both in alternating turns"
    compared.add_argument("--compare-url", type=url, metavar="URL", help=text)
    text = (
        "two configurations in alternating turns, each put into the file that the picker follows: "
        "files, or names that `simulate --policies` knows, such as round-robin default"
    )
    compared.add_argument("--compare", nargs=2, metavar=("A", "B"), help=text)
    text = "of --compare: its HTTP port (default: of the fleet that runs here)"
    group.add_argument("--picker", type=url, metavar="URL", help=text)
    text = "turns of each when comparing (default 6)"
    group.add_argument("--rounds", type=count, metavar="N", help=text)
    data = add_data(parser)
    text = "let answers end early (default: ignore_eos, which vLLM and our workers have)"
    data.add_argument("--respect-eos", action="store_true", help=text)
    add_results(parser)
    return parser


def add_load(parser: Parser) -> argparse._ArgumentGroup:
    """When requests are sent; returns the group."""
    group = parser.add_argument_group("load")
    either = group.add_mutually_exclusive_group()
    text = "requests a second, whatever the answers: 5, a ramp 1..20, or stages 1,2,4,8 (default 1)"
    either.add_argument("--rate", type=_rates, metavar="R", help=text)
    text = "instead of --rate: so many sessions at a time, each begun as another ends; or 10,20,40"
    either.add_argument("--concurrency", type=_counts, metavar="N", help=text)
    text = "shape of the gaps: 1 is Poisson, less is burstier, inf is regular"
    group.add_argument("--burstiness", type=_shape, default=1.0, metavar="SHAPE", help=text)
    text = "of each stage (default 30, of a trace all of it)"
    group.add_argument("--duration", type=positive, metavar="SECONDS", help=text)
    group.add_argument("--requests", type=count, metavar="N", help="of each stage, at most")
    text = "at the beginning of each stage, whose requests are not counted"
    group.add_argument("--warmup", type=seconds, default=0.0, metavar="SECONDS", help=text)
    group.add_argument("--seed", type=int, default=1, help="of arrivals and lengths")
    return group


def add_data(parser: Parser) -> argparse._ArgumentGroup:
    """What is asked; returns the group."""
    group = parser.add_argument_group("what is asked")
    text = "of a user's text: 512, or drawn from 128..1024"
    group.add_argument("--input-tokens", type=_span, default=Span(512, 512), help=text)
    text = "asked for"
    group.add_argument("--output-tokens", type=_span, default=Span(128, 128), help=text)
    text = "so many system prompts, one of which begins each session"
    group.add_argument("--prefix-groups", type=count, metavar="N", help=text)
    text = "of each system prompt (default 1024); without groups every session has its own"
    group.add_argument("--prefix-tokens", type=_span, metavar="N", help=text)
    text = "first questions of a group, which come again (default: every question is new)"
    group.add_argument("--prefix-prompts", type=count, metavar="N", help=text)
    text = "requests of a session, each with all that was said before: 4, or 2..8"
    group.add_argument("--turns", type=_span, default=Span(1, 1), help=text)
    text = "between an answer and the next turn"
    group.add_argument("--think", type=seconds, default=0.0, metavar="SECONDS", help=text)
    text = "times, lengths and shared beginnings of Mooncake's JSON lines, Azure's CSV, a recording"
    group.add_argument("--trace", type=Path, metavar="FILE", help=text)
    text = "how much faster than it was recorded a trace is sent"
    group.add_argument("--speed", type=positive, metavar="FACTOR", help=text)
    return group


def add_results(parser: Parser) -> None:
    """What is measured, and where it is written."""
    group = parser.add_argument_group("results")
    text = "bounds of every request, or of a quantile: ttft<1s,itl<50ms,e2e_p95<8s"
    group.add_argument("--slo", type=_bounds, metavar="BOUNDS", help=text)
    text = "of the requests that must be within the bounds of requests"
    group.add_argument("--slo-share", type=_share, default=0.99, metavar="SHARE", help=text)
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write one line for each request")
    group.add_argument("--html", type=Path, metavar="FILE", help="write one page with plots")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"takes a number above 0, not {text!r}")
    return value


def _shape(text: str) -> float:
    value = _number(text)
    if not value >= 0.01:
        raise argparse.ArgumentTypeError(f"takes a number of 0.01 or more, or inf, not {text!r}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"takes a share between 0 and 1, not {text!r}")
    return value


def _rates(text: str) -> tuple[Ramp, ...]:
    ramps = []
    for part in text.split(","):
        ends = [_number(end) for end in part.split("..")]
        if len(ends) > 2 or not all(0 < end <= 1e6 for end in ends):
            raise argparse.ArgumentTypeError(
                "takes requests a second such as 5, 1..20 or 1,2,4, at most a million, "
                f"not {text[:80]!r}"
            )
        ramps.append(Ramp(ends[0], ends[-1]))
    return tuple(ramps)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _span(text: str) -> Span:
    ends = [int(end) if re.fullmatch("[0-9]{1,7}", end) else 0 for end in text.split("..")]
    if len(ends) > 2 or not 0 < ends[0] <= ends[-1]:
        raise argparse.ArgumentTypeError(
            f"takes a whole number from 1 to 9,999,999, or two such as 128..1024, not {text[:80]!r}"
        )
    return Span(ends[0], ends[-1])


def _bounds(text: str) -> tuple[Bound, ...]:
    try:
        return read_bounds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text)
    if found is None or found[1].lower() in _OURS:
        raise argparse.ArgumentTypeError(f"takes 'name: value' ({', '.join(_OURS)} are ours)")
    return found[1].lower(), found[2]
