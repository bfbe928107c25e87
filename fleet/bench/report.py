"""A summary as text, and stages as CSV."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TextIO

from fleet.bench.slo import Slo
from fleet.bench.summary import Spread, Stage, Summary
from fleet.errors import FleetError

_COLUMNS = (
    "stage", "at_seconds", "late_seconds", "ttft_seconds", "itl_seconds", "e2e_seconds",
    "prompt_tokens", "cached_tokens", "output_tokens", "status", "error",
)  # fmt: skip
_STAGE_COLUMNS = (
    ("done/s", ".2f"), ("tokens/s", ",.0f"), ("cached", ".1%"), ("TTFT p50", ",.1f"),
    ("p95", ",.1f"), ("ITL p50", ",.1f"), ("p95", ",.1f"), ("failed", ",.0f"), ("goodput", ".1%"),
)  # fmt: skip


def lines_of(one: Summary, slo: Slo | None) -> Iterator[str]:
    if not one.requests:
        yield f"{one.name}: no request was counted: none was due after the warm-up"
        return
    failed = sum(one.errors.values())
    yield (
        f"{one.name}: {one.requests:,} requests in {one.seconds:.1f} s, {one.offered_rate:.2f}/s "
        f"offered, {one.completed_rate:.2f}/s completed, {failed:,} failed"
    )
    yield f"  {'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p95", "p99", "max"))
    for name, spread in (("TTFT", one.ttft), ("ITL", one.itl), ("E2E", one.e2e)):
        yield f"  {name:<6}{_cells(spread)}"
    prompts = "prompt tokens unknown (no usage in the answers)"
    if one.prompt_tokens or not one.completed_rate:
        prompts = f"{one.prompt_tokens:,} prompt tokens, {one.cached_share or 0.0:.1%} cached"
    yield (
        f"  {one.output_tokens_per_second:,.0f} output tokens/s; {prompts}; "
        f"at most {one.max_in_flight:,} in flight"
    )
    bounds = "" if slo is None else slo.of_requests
    if bounds and one.goodput is not None and one.goodput_rate is not None:
        yield f"  goodput {one.goodput:.2%}, {one.goodput_rate:.2f}/s at {bounds}"
    for text in one.missed:
        yield f"  missed {text}"
    for error, times in list(one.errors.items())[:5]:
        yield f"  failed {times:,} times: {error}"
    load = one.client
    if load is None:
        return
    busiest = "" if load.processes == 1 else f" in the busiest of {load.processes} processes"
    yield (
        f"  client: {load.cpu_seconds_per_request * 1e6:.0f} µs of CPU a request, "
        f"{load.busy_share:.0%} of a core{busiest}, "
        f"sends {load.late_p99_seconds * 1e3:.1f} ms late (p99)"
    )
    if load.saturation is not None:
        yield (
            f"  The client was saturated: {load.saturation}. Latencies are longer than the "
            f"endpoint's: lower the load, or set --processes {load.processes + 1} where each has "
            "a core to itself."
        )


def stages_table(rows: Sequence[Sequence[Summary]]) -> Iterator[str]:
    """Yield a line for each stage: of one run, or mean ± standard deviation of several."""
    first = max(12, *(len(row[0].name) + 2 for row in rows)) if rows else 12
    wide = 12 if all(len(row) == 1 for row in rows) else 19
    yield f"{'stage':>{first}}" + "".join(f"{name:>{wide}}" for name, _ in _STAGE_COLUMNS)
    for row in rows:
        columns = zip(_STAGE_COLUMNS, zip(*map(_numbers, row), strict=True), strict=True)
        cells = "".join(f"{_repeated(values, form):>{wide}}" for (_, form), values in columns)
        yield f"{row[0].name:>{first}}{cells}"


def _numbers(one: Summary) -> Iterator[float | None]:
    yield one.completed_rate
    yield one.output_tokens_per_second
    yield one.cached_share or 0.0
    for spread in (one.ttft, one.itl):
        yield None if spread is None else spread.p50 * 1e3
        yield None if spread is None else spread.p95 * 1e3
    yield sum(one.errors.values())
    yield one.goodput


def _repeated(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = format(fmean(known), form)
    return mean if len(known) == 1 else f"{mean} ±{format(stdev(known), form)}"


def _cells(spread: Spread | None) -> str:
    if spread is None:
        return f"{'–':>10}" * 5
    values = (spread.mean, spread.p50, spread.p95, spread.p99, spread.max)
    return "".join(f"{seconds * 1e3:>10,.1f}" for seconds in values)


def write_csv(file: TextIO, stages: Iterable[Stage]) -> None:
    writer = csv.writer(file)
    writer.writerow(_COLUMNS)
    for stage in stages:
        for one in stage.counted():
            times = one.times
            late = None if one.sent is None else one.sent - one.intended
            seconds = (one.intended - stage.begun, late, times["ttft"], times["itl"], times["e2e"])
            cells = ["" if value is None else f"{value:.6f}" for value in seconds]
            tokens = (one.prompt_tokens, one.cached_tokens, one.output_tokens)
            writer.writerow((stage.name, *cells, *tokens, one.status, one.error))


def write_text(path: Path, text: str) -> None:
    """Write a result, and create its folder. Raises `FleetError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FleetError(f"cannot write {path}: {error.strerror or error}") from error
