"""What `speculation.py` prints and writes: one row for each method on each workload."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculation_runs import Outcome

COLUMNS = (
    ("plain/s", "plain_tokens_per_second", "8.1f"),
    ("with/s", "tokens_per_second", "8.1f"),
    ("speed-up", "speed_up", "9.3f"),
    ("±", "speed_up_error", "6.1%"),
    ("cpu", "cpu_speed_up", "6.2f"),
    ("whole", "whole_speed_up", "7.2f"),
    ("accepted", "acceptance_rate", "9.1%"),
    ("length", "mean_acceptance_length", "7.2f"),
    ("tok/step", "tokens_per_step", "9.2f"),
    ("mean k", "mean_k", "7.2f"),
    ("differ", "num_differing", "7d"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A job on a method's engine, and on the plain ones beside it."""

    plain: tuple[Outcome, ...]
    drafted: Outcome

    def plain_mean(self, name: str) -> float:
        """A time of the plain engines, on the average."""
        return statistics.fmean(getattr(outcome, name) for outcome in self.plain)


@dataclass(slots=True)
class Tally:
    """One method on one workload: what came of it and of plain decoding beside it, by job."""

    pairs: dict[int, list[Pair]] = field(default_factory=lambda: defaultdict(list))

    def add(self, job: int, plain: Sequence[Outcome], outcome: Outcome) -> None:
        """Take in a job that was done."""
        self.pairs[job].append(Pair(tuple(plain), outcome))

    def row(self) -> dict[str, float]:
        """Everything the table has."""
        plain, drafted = self._seconds("decode_seconds")
        plain_cpu, drafted_cpu = self._seconds("decode_cpu_seconds")
        every = [pair for pairs in self.pairs.values() for pair in pairs]
        tokens = sum(pairs[0].drafted.num_decoded for pairs in self.pairs.values())
        runs, drafts = self._total("num_runs"), self._total("num_draft_tokens")
        accepted, shares = self._total("num_accepted"), max(self._total("num_shares"), 1)
        return {
            "plain_tokens_per_second": tokens / plain,
            "tokens_per_second": tokens / drafted,
            "speed_up": plain / drafted,
            "speed_up_error": _ratio_error(self.pairs.values()),
            "cpu_speed_up": plain_cpu / drafted_cpu,
            "whole_speed_up": statistics.median(
                pair.plain_mean("whole_seconds") / pair.drafted.whole_seconds for pair in every
            ),
            "acceptance_rate": accepted / drafts if drafts else math.nan,
            "mean_acceptance_length": 1 + accepted / runs if runs else math.nan,
            "tokens_per_step": self._total("num_decoded") / shares,
            "mean_k": drafts / shares,
            "num_requests": sum(len(pair.drafted.answers) for pair in every),
            "num_differing": sum(
                mine != theirs
                for pair in every
                for mine, theirs in zip(pair.drafted.answers, pair.plain[0].answers, strict=True)
            ),
        }

    def _seconds(self, name: str) -> tuple[float, float]:
        """A time of every job once, plain and with drafts: medians over rounds."""
        rounds = self.pairs.values()
        return (
            sum(statistics.median(pair.plain_mean(name) for pair in pairs) for pairs in rounds),
            sum(statistics.median(getattr(p.drafted, name) for p in pairs) for pairs in rounds),
        )

    def _total(self, which: str) -> int:
        return sum(getattr(p.drafted, which) for pairs in self.pairs.values() for p in pairs)


def _ratio_error(jobs: Iterable[Sequence[Pair]]) -> float:
    """The standard error of the mean ratio of times, relative to it, from what rounds differ by."""
    logs = [
        [math.log(p.plain_mean("decode_seconds") / p.drafted.decode_seconds) for p in pairs]
        for pairs in jobs
    ]
    freedom = sum(len(own) - 1 for own in logs)
    if not freedom:
        return math.nan
    spread = sum((one - statistics.fmean(own)) ** 2 for own in logs for one in own)
    return math.sqrt(spread / freedom / sum(map(len, logs)))


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    cells = "".join(f"{row[key]:{form}}" for _, key, form in COLUMNS)
    print(f"{row['workload']:22}{row['batch']:>5} {row['method']:12}{cells}", flush=True)


def print_header() -> None:
    """The first line of the table."""
    widths = [(name, form.partition(".")[0].rstrip("d")) for name, _, form in COLUMNS]
    cells = "".join(f"{name:>{width}}" for name, width in widths)
    print(f"{'workload':22}{'batch':>5} {'method':12}{cells}")
