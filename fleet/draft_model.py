"""The draft model that `--speculative-config` names, found or fetched like the model itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleet.errors import FleetError
from worker.errors import ConfigError
from worker.speculation_flags import FLAG, SHORT_FLAG, parse


def with_found_draft_model(argv: Sequence[str], resolve: Callable[[str], Path]) -> list[str]:
    """A worker's flags, the draft model's name in them made a path by `resolve`.

    Flags without a draft model come back as they are, and so does whatever the worker will refuse.
    Raises the `FleetError` of `resolve`, with the flag in front.
    """
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument(FLAG, SHORT_FLAG, dest="config")
    given, others = known.parse_known_args(list(argv))
    if given.config is None:
        return list(argv)
    try:
        fields = msgspec.json.decode(given.config, type=dict[str, Any])
        method = parse(fields).method
    except (msgspec.MsgspecError, ConfigError):
        return list(argv)
    if method != "draft_model":
        return list(argv)
    try:
        path = resolve(fields["model"])
    except FleetError as error:
        raise FleetError(f"{FLAG}: model: {error}") from error
    return [*others, FLAG, msgspec.json.encode(fields | {"model": str(path)}).decode()]
