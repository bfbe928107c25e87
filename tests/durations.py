"""CPU seconds of every test, recorded as the suite runs, and the commands that read the record.

pytest writes a record with `--record-durations=FILE`: a first line with the speed of the machine,
then one line for each item. CPU seconds include those of child processes that have ended; they
depend on other load far less than elapsed time does. The speed is measured by a loop before and
after the tests, in every test process, and the slowest measurement counts.

    python -m tests.durations slowest FILE…  prints the 50 slowest items of the newest record
    python -m tests.durations check FILE     prints the items above the bound that `tests/slow.toml`
                                             does not name; fails on one far above it

Far above is 2.5 times the bound. The loop knows the machine before and after the tests, not during
them: on a machine that others use, too, items took up to 2.3 times their usual CPU seconds at a
speed at which the loop took 1.95 times its own, so an item just below the bound can be measured at
1.2 times the bound, and one measured there says nothing of the change under test. An item that
became twice as slow is printed; one that belongs to another depth is many times above.
"""

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

MAX_CPU_SECONDS = 2.0
FAR_ABOVE = 2.5
REFERENCE_LOOP_SECONDS = 0.06  # on an idle core of a server CPU of 2024
EXEMPT = Path(__file__).with_name("slow.toml")
_LOOP = "loop_seconds"


class Duration(NamedTuple):
    item: str
    elapsed_seconds: float
    cpu_seconds: float


class Record(NamedTuple):
    loop_seconds: float
    durations: tuple[Duration, ...]

    @property
    def bound_seconds(self) -> float:
        return MAX_CPU_SECONDS * max(self.loop_seconds / REFERENCE_LOOP_SECONDS, 1.0)


class Recorder:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._loops = [loop_seconds()]
        self._durations: list[Duration] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, cpu = time.monotonic(), _cpu_seconds()
        result = yield
        spent = (time.monotonic() - began, _cpu_seconds() - cpu)
        self._durations.append(Duration(item.nodeid, *(round(part, 3) for part in spent)))
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        measured = getattr(node, "workeroutput", {}).get("durations")
        if measured is not None:
            loops, durations = json.loads(measured)
            self._loops += loops
            self._durations += (Duration(*row) for row in durations)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._loops.append(loop_seconds())
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["durations"] = json.dumps([self._loops, self._durations])
        elif self._path is not None and self._durations:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(encoded(Record(max(self._loops), tuple(self._durations))))


def loop_seconds() -> float:
    began = time.process_time()
    counts: dict[str, int] = {}
    for number in range(400_000):
        key = str(number % 5_003)
        counts[key] = counts.get(key, 0) + number
    return time.process_time() - began


def encoded(record: Record) -> str:
    rows = [json.dumps({_LOOP: round(record.loop_seconds, 4)}), *map(json.dumps, record.durations)]
    return "\n".join(rows) + "\n"


def read(path: Path) -> Record:
    first, *rows = path.read_text().splitlines()
    return Record(json.loads(first)[_LOOP], tuple(Duration(*json.loads(row)) for row in rows))


def too_slow(record: Record, exempt: Mapping[str, str]) -> list[Duration]:
    """Return the items above the bound that are not exempt, slowest first.

    A key of `exempt` is an item, or a folder, file or function that stands for all its items.
    """
    return [
        each
        for each in slowest(record.durations)
        if each.cpu_seconds > record.bound_seconds
        and not any(_covers(name, each.item) for name in exempt)
    ]


def stale(record: Record, exempt: Mapping[str, str]) -> list[str]:
    items = [each.item for each in record.durations]
    return [name for name in exempt if not any(_covers(name, item) for item in items)]


def slowest(durations: Iterable[Duration]) -> list[Duration]:
    return sorted(durations, key=lambda each: -each.cpu_seconds)


def main(arguments: list[str]) -> int:
    command, *names = arguments
    paths = sorted((path for path in map(Path, names) if path.exists()), key=_changed)
    if not paths:
        print(f"no record in {', '.join(names)}: run `make test` first")
        return 2
    record = read(paths[-1])
    if command == "slowest":
        total = sum(each.cpu_seconds for each in record.durations)
        print(f"{paths[-1]}: {len(record.durations)} items, {total / 60:.1f} CPU minutes")
        for each in slowest(record.durations)[:50]:
            print(f"{each.cpu_seconds:8.2f} CPU s {each.elapsed_seconds:8.2f} s  {each.item}")
        return 0
    exempt = tomllib.loads(EXEMPT.read_text())
    found, gone = too_slow(record, exempt), stale(record, exempt)
    failing = [each for each in found if each.cpu_seconds > FAR_ABOVE * record.bound_seconds]
    for each in found:
        print(
            f"{each.item}: {each.cpu_seconds:.1f} CPU seconds, above {record.bound_seconds:.1f};"
            f" make it smaller, mark it `full`, or name it in {EXEMPT.name} with the reason"
        )
    for name in gone:
        print(f"{EXEMPT.name} names {name}, which did not run: remove the line")
    print(
        f"{len(found)} of {len(record.durations)} items are above the bound for `make test`,"
        f" {len(failing)} of them by more than {FAR_ABOVE} times: these fail"
    )
    return 1 if failing or gone else 0


def _covers(name: str, item: str) -> bool:
    return item == name or item.startswith((f"{name}/", f"{name}::", f"{name}["))


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def _changed(path: Path) -> float:
    return path.stat().st_mtime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
