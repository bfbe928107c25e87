"""The parts of a recording of `picker --record` that a simulation uses besides its requests."""

from collections.abc import Iterator
from pathlib import Path

from fleet.bench.traces import Recording, recording
from fleet.errors import UsageError


def read_recorded(path: Path) -> tuple[str, list[str]]:
    """Return the first configuration, and notes. Raises `UsageError`."""
    found = recording(path, "--replay")
    if not found.requests:
        raise UsageError(f"--replay: {path} has no request")
    return found.config, list(_lacks(found))


def _lacks(found: Recording) -> Iterator[str]:
    every = [request for _, request in found.requests.values()]
    without_prompt = sum(one.prompts is None or len(one.prompts) != 1 for one in every)
    without_length = len(found.requests.keys() - found.ended.keys())
    with_objective = sum(bool(one.objective) for one in every)
    yield (
        f"{len(every):,} recorded requests, with their times and, in blocks of 64 tokens, "
        "their prompts. A recording does not have requests that were rejected before "
        "scheduling, nor how fast the workers were (they are --worker's); and a turn comes at "
        "its recorded time, however long the answer before it takes."
    )
    if without_prompt:
        yield f"{without_prompt:,} have no recorded prompt, and share no beginning here."
    if without_length:
        yield (
            f"{without_length:,} have no recorded length of their answer: their max_tokens is "
            "used, or --output-tokens."
        )
    if with_objective:
        yield f"{with_objective:,} have an objective, whose priority is not simulated."
