"""The flags of `pointsman replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleet.command_line import Parser


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman replay",
        description="Decide the requests of a recording (picker --record) again, with the picker's "
        "own code. Without --config every decision has to be what it was.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording")
    text = "repeat the decisions with this configuration, and report what changes"
    parser.add_argument("--config", metavar="NEW", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = "rows and differences to list at most (default %(default)s)"
    parser.add_argument("--limit", metavar="N", type=_count, default=10, help=text)
    parser.add_argument(
        "--allow-experimental-plugins",
        dest="experimental",
        action="store_true",
        help="of --config; always allowed when they were for the recording",
    )
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no number of rows")
    return int(text)
