# Apart: a file format, of which the command knows nothing else.
"""What a recording of `picker --record` has for a simulation, and what not. The requests are read
by `fleet.bench.traces`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet.errors import UsageError


class _Request(msgspec.Struct):
    max_output_tokens: int | None = None
    prompts: tuple[str, ...] | None = None
    objective: str = ""


class _Line(msgspec.Struct):
    line: str
    number: int = 0
    again: int | bool | None = None
    config: str | int = ""  # of a header its text, of a decision the number of one
    request: _Request | None = None
    usage: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Its first configuration, and how many of its requests have what."""

    config: str
    requests: int
    without_prompt: int
    without_length: int
    with_objective: int

    def notes(self) -> Iterator[str]:
        """What the recording does not have, for people."""
        yield (
            f"{self.requests:,} recorded requests, with their times and, in blocks of 64 tokens, "
            "their prompts. A recording does not have requests that were rejected before "
            "scheduling, nor how fast the workers were (they are --worker's); and a turn comes at "
            "its recorded time, however long the answer before it takes."
        )
        if self.without_prompt:
            yield f"{self.without_prompt:,} have no recorded prompt, and share no beginning here."
        if self.without_length:
            yield (
                f"{self.without_length:,} have no recorded length of their answer: their "
                "max_tokens stands in, or --output-tokens."
            )
        if self.with_objective:
            yield f"{self.with_objective:,} have an objective, whose priority is not simulated."


def read_recorded(path: Path) -> Recorded:
    """Raises `UsageError` for what is no recording."""
    decode = msgspec.json.Decoder(_Line).decode
    config: str | None = None
    requests: dict[int, _Request] = {}
    ended: set[int] = set()
    try:
        with path.open("rb") as file:
            for text in file:
                one = decode(text)
                if one.line == "header" and config is None and isinstance(one.config, str):
                    config = one.config
                elif one.request is not None and one.again is None:
                    requests[one.number] = one.request
                elif one.usage is not None and one.usage.get("completion_tokens"):
                    ended.add(one.number)
    except OSError as error:
        raise UsageError(f"--replay: {path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"--replay: {path} is no recording of `picker --record`: {error}"
        ) from error
    if config is None or not requests:
        raise UsageError(
            f"--replay: {path} is no recording of `picker --record`, or has no request"
        )
    every = requests.values()
    return Recorded(
        config,
        len(requests),
        sum(one.prompts is None or len(one.prompts) != 1 for one in every),
        sum(
            number not in ended and one.max_output_tokens is None
            for number, one in requests.items()
        ),
        sum(bool(one.objective) for one in every),
    )
