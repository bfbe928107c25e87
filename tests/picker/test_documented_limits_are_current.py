"""The table of limits in docs/protocol.md says what the code says, and leaves out none."""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(2\^)?([\d,]+(?:\.\d+)?)(?: (KiB|MiB|GiB))?")
UNITS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CONSTANT = re.compile(r"^(_?(?:DEFAULT_)?(?:MAX|MOST)_[A-Z0-9_]+)(?:: Final)? = ", re.MULTILINE)
# What is named like a limit and bounds nothing that comes from outside or that has to wait.
NO_LIMITS = {
    # parts of a thread's time, the age of something computed, pauses
    *("app.model_choice.MAX_AGE_SECONDS", "flowcontrol.load_estimate.MAX_AGE_SECONDS"),
    "base.backoff.MAX_ASKED_SECONDS",
    *("k8s.discovery.MAX_SHARE", "scrape.scrape.MAX_SHARE", "xds.feed.MAX_SHARE"),
    # lines of the log and names in a line, and what is remembered not to log it twice
    *(
        "app.model_choice._MAX_WARNINGS",
        "app.served_pool.MAX_NAMED",
        "app.pool_choice._MAX_WARNINGS",
    ),
    *("peers.server.MAX_COMPLAINTS", "telemetry.health_metrics.MAX_LINES"),
    *("recording.replay._MAX_TOTALS_SHOWN", "xds.server.MAX_LINES"),
    *("xds.server._MAX_SHOWN", "xds.server._MAX_TEXT"),
    # values that are computed anew when they are not remembered
    *("extproc.wire.MAX_REMEMBERED", "plugins.parsers.http_parsers.MAX_REMEMBERED"),
    *("recording.requests.MAX_REMEMBERED", "recording.requests.MAX_REMEMBERED_LENGTH"),
    *("requestcontrol.pipeline.MAX_CACHED_PATHS", "rpc.http2.headers.MAX_REMEMBERED"),
    *("peers.inbox._MAX_MISSING", "scrape.exposition.MAX_REMEMBERED_BYTES"),
    # beyond it loads are added up less often
    "peers.exchange.MAX_LOADS_PER_MESSAGE",
    # what a type or a standard can hold
    *("config.decode.MAX_BYTES", "base.durations.MAX_SECONDS", "peers.wire._MAX_UINT32"),
    *("framework.label_selector._MAX_NAME", "framework.label_selector._MAX_PREFIX"),
    *("plugins.conformance._MAX_PORT_DIGITS", "pool.object_parts.MAX_PORT"),
    *("plugins.parsers._usage._MAX_COUNT", "plugins.parsers._usage._MAX_DIGITS"),
    *("plugins.producers.inflight_load_producer._MAX_OUTPUT", "rpc.http2.frames.MAX_FRAME_BYTES"),
    *("rpc.http2.frames.MAX_WINDOW_BYTES", "tokenization.prompt_stream._MAX_TOKEN"),
    *("contrib.latency._learner.MAX_READING_SECONDS", "contrib.program_aware._MAX_HALVINGS"),
    # flags that are refused
    *("cli.flags.MAX_LEASE_NAME", "cli.flags.MAX_LEASE_SECONDS"),
    # parts of formulas and algorithms
    "planner.capacity._MAX_SECONDS",
    *("prefix.block_hash._MAX_RUNS", "prefix.segment_table.MAX_ENTRIES_PER_BUCKET"),
    *("k8s.reflector._MAX_BARREN", "plugins.fairness_policies._burst_headroom.MAX_DEVIATIONS"),
    *(
        f"plugins.fairness_policies.{name}"
        for name in (
            "_burst_headroom.MAX_GAPS",
            "_recent_use._MAX_EXPONENT",
            "deficit_round_robin_fairness_policy.MAX_FACTOR",
        )
    ),
}


@cache
def documented() -> dict[str, str]:
    page = (ROOT / "docs/protocol.md").read_text()
    section = page.partition("\n## Every limit\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if "`" in line]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    assert len({row[2] for row in cells}) == len(cells)
    return {place: row[1] for row in cells if is_there(place := row[2].strip("`"))}


def is_there(place: str) -> bool:
    """A shelf may have been removed."""
    room = place.partition(".")[0]
    return room == "base" or any((ROOT / "picker").glob(f"{room}*"))


def constants() -> Iterator[str]:
    for file in sorted([*(ROOT / "picker").rglob("*.py"), *(ROOT / "base").rglob("*.py")]):
        dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        module = dotted.removeprefix("picker.")
        for found in CONSTANT.finditer(file.read_text()):
            yield f"{module}.{found[1]}"


def value_at(place: str) -> float:
    path, name = place.rsplit(".", 1)
    path, _, holder = path.rpartition(".") if path.split(".")[-1][0].isupper() else (path, "", "")
    module = import_module(path if path.startswith("base.") else f"picker.{path}")
    if not holder:
        return float(getattr(module, name))
    fields = {field.name: field.default for field in dataclasses.fields(getattr(module, holder))}
    return float(fields[name])


@pytest.mark.parametrize("place", documented())
def test_a_documented_limit_is_that_of_the_code(place: str) -> None:
    found = NUMBER.match(documented()[place])
    assert found is not None
    number = float(found[2].replace(",", ""))
    assert value_at(place) == (2**number if found[1] else number * UNITS[found[3]])


def test_every_limit_of_the_code_is_documented() -> None:
    known = set(constants())
    assert known >= set(filter(is_there, NO_LIMITS))
    assert known - NO_LIMITS <= documented().keys()
