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


@dataclass(slots=True)
class Tally:
    """One method on one workload: what came of it and of plain decoding beside it, by job."""

    pairs: dict[int, list[tuple[Outcome, Outcome]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, job: int, plain: Outcome, outcome: Outcome) -> None:
        """Take in a job that was done."""
        self.pairs[job].append((plain, outcome))

    def row(self) -> dict[str, float]:
        """Everything the table has."""
        plain, drafted = self._seconds(0, "decode_seconds"), self._seconds(1, "decode_seconds")
        every = [pair for pairs in self.pairs.values() for pair in pairs]
        tokens = sum(pairs[0][0].num_decoded for pairs in self.pairs.values())
        runs, drafts = self._total("num_runs"), self._total("num_draft_tokens")
        accepted, shares = self._total("num_accepted"), max(self._total("num_shares"), 1)
        return {
            "plain_tokens_per_second": tokens / plain,
            "tokens_per_second": tokens / drafted,
            "speed_up": plain / drafted,
            "speed_up_error": _ratio_error(self.pairs.values()),
            "cpu_speed_up": (
                self._seconds(0, "decode_cpu_seconds") / self._seconds(1, "decode_cpu_seconds")
            ),
            "whole_speed_up": statistics.median(
                plain.whole_seconds / outcome.whole_seconds for plain, outcome in every
            ),
            "acceptance_rate": accepted / drafts if drafts else math.nan,
            "mean_acceptance_length": 1 + accepted / runs if runs else math.nan,
            "tokens_per_step": self._total("num_decoded") / shares,
            "mean_k": drafts / shares,
            "num_requests": sum(len(outcome.answers) for _, outcome in every),
            "num_differing": sum(
                mine != theirs
                for plain, outcome in every
                for mine, theirs in zip(outcome.answers, plain.answers, strict=True)
            ),
        }

    def _seconds(self, which: int, name: str) -> float:
        """Decoding time of every job once, plain (0) or with drafts (1): the median over rounds."""
        return sum(
            float(statistics.median(getattr(pair[which], name) for pair in pairs))
            for pairs in self.pairs.values()
        )

    def _total(self, which: str) -> int:
        return sum(getattr(outcome, which) for pairs in self.pairs.values() for _, outcome in pairs)


def _ratio_error(jobs: Iterable[Sequence[tuple[Outcome, Outcome]]]) -> float:
    """The standard error of the mean ratio of times, relative to it, from what rounds differ by."""
    logs = [[math.log(p.decode_seconds / o.decode_seconds) for p, o in pairs] for pairs in jobs]
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
