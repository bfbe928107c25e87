"""The parts that the scripts share: command line, tables, results, and a process beside."""

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fleet.run.catalog import DEFAULT
from fleet.run.models import cached_path

# For the twins and fakes of the tests, which some scripts use.
sys.path.append(str(Path(__file__).parents[1]))

# Not under version control: a fresh clone does not have the folder.
RESULTS = Path(__file__).parent / "results"
DEFAULT_MODEL = cached_path(DEFAULT)
START_SECONDS = 120.0


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the script's docstring as it is written; `--json` is there."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = RESULTS / Path(sys.argv[0]).with_suffix(".json").name
    parser.add_argument("--json", type=Path, default=path, help="the results")
    return parser


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """A parser of an argument such as `1,4,16`."""
    return lambda text: [kind(part) for part in text.split(",")]


def write_results(options: argparse.Namespace, **found: Any) -> None:
    """Write one JSON document: the machine, the arguments, and what was `found`; print its path."""
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    document = {"machine": machine, "arguments": vars(options), **found}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=2, default=str)
    options.json.write_text(text + "\n", encoding="utf-8")
    print(f"written to {options.json}")


class Table:
    """Prints rows as they come, and collects them for the results.

    A column is the key of a value in each row, with a format specification where `str` is not
    enough: `"p50_us .1f"`, `"method <12"`. A row may have more keys than there are columns.
    """

    def __init__(self, *columns: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._columns = [(key, spec) for key, _, spec in (c.partition(" ") for c in columns)]
        print(self._line({key: key for key, _ in self._columns}, is_heading=True), flush=True)

    def add(self, **row: Any) -> None:
        """Print one row of the table."""
        self.rows.append(row)
        print(self._line(row), flush=True)

    def _line(self, row: dict[str, Any], is_heading: bool = False) -> str:
        cells = []
        for key, spec in self._columns:
            if spec.startswith("<"):
                cells.append(format(str(row[key]), spec))
                continue
            value = row[key]
            text = "–" if value is None else format(value, "" if is_heading else spec)
            cells.append(text.rjust(max(len(key), 8)))
        return "  ".join(cells).rstrip()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children until now."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = [
        thread for one in (str(pid), *children) for thread in Path(f"/proc/{one}/task").iterdir()
    ]
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


@contextmanager
def child(serve: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `serve(pipe, *arguments)` in another process until the block ends.

    Yields the other end of the pipe once `serve` has sent its first message, which is still to be
    received.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=True)
    process.start()
    there.close()  # so that its end is noticed here
    try:
        if not here.poll(START_SECONDS):
            raise TimeoutError(f"{serve.__name__} has not started")
        yield here
    finally:
        process.kill()
        process.join()
