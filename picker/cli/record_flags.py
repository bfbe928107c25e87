"""The flags of a recording of decisions."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from picker.config.units import quantity_bytes
from picker.errors import ConfigError

DEFAULT_MAX_BYTES = 2**30
MIN_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RecordFlags:
    """Where decisions are recorded, how large the file may become, and whether with prompts."""

    path: Path
    max_bytes: int = DEFAULT_MAX_BYTES
    keeps_prompts: bool = True


def add_record_flags(group: argparse._ArgumentGroup) -> None:
    """Flags about a recording."""
    text = "write down every decision, for `pointsman replay`; an existing recording is added to"
    group.add_argument("--record", metavar="FILE", type=_path, default=None, help=text)
    group.add_argument(
        "--record-max-bytes",
        metavar="SIZE",
        type=_size,
        default="1Gi",
        help="where a recording ends; requests go on",
    )
    group.add_argument(
        "--record-prompts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with the tokens of prompts, which may be read as text; without them prompt caches "
        "cannot be replayed with other settings",
    )


def record_flags_of(arguments: argparse.Namespace) -> RecordFlags | None:
    """What the parsed flags ask for, None for no recording."""
    if arguments.record is None:
        return None
    return RecordFlags(arguments.record, arguments.record_max_bytes, arguments.record_prompts)


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _size(text: str) -> int:
    try:
        size = quantity_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < MIN_MAX_BYTES:
        raise argparse.ArgumentTypeError(f"'{text}' is too little: write 64Ki or more")
    return size
