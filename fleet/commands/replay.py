"""`pointsman replay`: decide the requests of a recording again, and report differences."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from fleet.commands.top_text import Glyphs, clean
from picker.config.watch import read_config_file
from picker.errors import PickerError
from picker.recording.lines import read_recording
from picker.recording.replay import Comparison, OtherConfig, Replay, Tally

SAME, DIFFERENT, UNUSABLE = 0, 1, 2
_GLYPHS = Glyphs()

Print = Callable[[str], None]


class Report(msgspec.Struct, frozen=True):
    """The document of `--json`. `config` is None for the configurations of the recording itself."""

    file: str
    config: str | None
    runs: int
    replay_seconds: float
    notes: dict[str, int]
    comparison: Comparison


class Rows(msgspec.Struct, frozen=True):
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: bool = True


def replay_command(options: argparse.Namespace, out: Console, err: Print) -> int:
    """Return 0 if nothing differs or another configuration decided, 1 if some decisions differ, 2
    if a file cannot be used.
    """
    try:
        report = replayed(options.file, options.config, options.limit, options.experimental)
    except PickerError as error:
        for line in str(error).splitlines():
            err(f"pointsman: {clean(line, _GLYPHS)}")
        return UNUSABLE
    if options.json:
        out.out(msgspec.json.format(msgspec.json.encode(report)).decode(), highlight=False)
    else:
        show(report, out, options.limit)
    comparison = report.comparison
    is_same = comparison.identical == comparison.decisions
    return SAME if is_same or report.config is not None else DIFFERENT


def replayed(file: Path, config: Path | None, limit: int, experimental: bool) -> Report:
    """Replay a recording. Raises `RecordingError` and `ConfigError`."""
    other = None
    if config is not None:
        other = OtherConfig(read_config_file(config, "--config"), str(config), experimental)
    replay, tally = Replay(str(file), other), Tally(limit)
    began = time.perf_counter()
    for decision in replay.decisions(read_recording(file)):
        tally.add(decision)
    return Report(
        file=str(file),
        config=None if config is None else str(config),
        runs=replay.runs,
        replay_seconds=time.perf_counter() - began,
        notes=dict(replay.notes),
        comparison=tally.result(),
    )


def show(report: Report, out: Console, limit: int) -> None:
    """Print tables in a terminal, else lines. Texts are escaped, since clients chose them."""
    comparison = report.comparison
    for line in _headline(report):
        _print_line(line, out)
    for table in _tables(report, limit):
        if table.rows:
            out.print()
            _print_table(table, out)
    if report.config is None and comparison.differences:
        out.print()
        for one in comparison.differences:
            texts = "; ".join(one.texts)
            _print_line(f"line {one.line}, request {one.request_id}: {texts}", out)
        left = comparison.decisions - comparison.identical - len(comparison.differences)
        if left:
            _print_line(f"… and {left:,} more", out)
    if report.notes:
        out.print()
    for text, count in report.notes.items():
        times = f" ({count:,} times)" if count > 1 else ""
        _print_line(f"note: {text}{times}", out)


def _print_line(text: str, out: Console) -> None:
    out.print(clean(text, _GLYPHS), markup=False, highlight=False, soft_wrap=True)


def _headline(report: Report) -> Iterable[str]:
    one = report.comparison
    if report.config is None:
        runs = f" of {report.runs} runs" if report.runs > 1 else ""
        yield f"{one.decisions:,} decisions{runs}, {one.identical:,} identical"
        return
    yield f"{one.decisions:,} decisions, now by {report.config}"
    yield f"{one.moved:,} moved ({_percent(one.moved, one.decisions)})"
    yield f"{one.rescored:,} with other scores ({_percent(one.rescored, one.decisions)})"
    if one.refused_before or one.refused_now:
        yield f"refused: {one.refused_before:,} before, {one.refused_now:,} now"
    if one.prompt_tokens:
        before = _percent(one.matched_tokens_before, one.prompt_tokens)
        now = _percent(one.matched_tokens_now, one.prompt_tokens)
        yield f"prompt tokens matched at the chosen endpoint: {before} before, {now} now"
    if one.scores.before is not None and one.scores.now is not None:
        text = "total of the chosen endpoint, on average"
        yield f"{text}: {one.scores.before:.4g} before, {one.scores.now:.4g} now"


def _tables(report: Report, limit: int) -> Iterable[Rows]:
    if report.config is None:
        return
    one = report.comparison
    shares = []
    for each in sorted(one.shares, key=lambda share: -max(share.before, share.now))[:limit]:
        counts = (each.before, each.now)
        parts = (_percent(count, one.decisions) for count in counts)
        shares.append((each.endpoint, *(f"{count:,}" for count in counts), *parts))
    columns = ("endpoint", "before", "now", "share before", "share now")
    yield Rows("requests per endpoint", columns, shares)
    moves = [(f"{move.requests:,}", move.before, move.now) for move in one.moves[:limit]]
    yield Rows("moves", ("requests", "from", "to"), moves, numeric=False)


def _print_table(table: Rows, out: Console) -> None:
    rows = [tuple(clean(cell, _GLYPHS) for cell in row) for row in table.rows]
    if out.is_terminal:
        shown = Table(title=table.title, title_justify="left")
        for index, column in enumerate(table.columns):
            right = bool(index) == table.numeric
            shown.add_column(column, justify="right" if right else "left")
        for row in rows:
            shown.add_row(*row)
        out.print(shown, markup=False, highlight=False)
        return
    lines = [table.columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    _print_line(table.title, out)
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        _print_line(f"  {'  '.join(cells)}".rstrip(), out)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"
