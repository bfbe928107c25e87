"""Flags about what is remembered of failing endpoints."""

from __future__ import annotations

import argparse

from picker.outliers.breaker import OutlierSettings

MAX_FAILURES = 1000
DEFAULT_FAILURES = OutlierSettings().failures


def add_health_flags(arguments: argparse._ArgumentGroup) -> None:
    """Add them."""
    text = "failures in a row (500, 502, 503, 504, no connection) after which an endpoint gets"
    arguments.add_argument(
        "--endpoint-ejection-failures",
        type=_failures,
        metavar="N",
        default=DEFAULT_FAILURES,
        help=f"{text} nothing but a probe now and then; 0: never",
    )


def _failures(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > MAX_FAILURES:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MAX_FAILURES}")
    return int(text)
