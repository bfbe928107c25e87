"""Flags about what is remembered and told of decisions."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from picker.decisions.records import DEFAULT_CAPACITY

MAX_RECORDS = 1_000_000


@dataclass(frozen=True, slots=True)
class ExplainFlags:
    """How many requests are remembered (0: none), and whether responses tell of their decision."""

    decision_records: int = DEFAULT_CAPACITY
    decision_header: bool = False


NO_WISHES = ExplainFlags()


def add_explain_flags(group: argparse._ArgumentGroup) -> None:
    """Add them."""
    group.add_argument(
        "--decision-records",
        type=_records,
        metavar="N",
        default=DEFAULT_CAPACITY,
        help="how many past requests are remembered for `pointsman explain`; 0: none",
    )
    group.add_argument(
        "--decision-header",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="tell clients the request's id (`x-request-id`) and its endpoint's name "
        "(`x-pointsman-endpoint`) in the headers of responses",
    )


def explain_flags_of(arguments: argparse.Namespace) -> ExplainFlags:
    """What the parsed flags ask for."""
    return ExplainFlags(arguments.decision_records, arguments.decision_header)


def _records(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > MAX_RECORDS:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MAX_RECORDS}")
    return int(text)
