"""What `pointsman top` draws."""

from __future__ import annotations

import pytest
from admin_scene import QUEUES, summary
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from fleet.picker_views import Seen
from fleet.top_frame import Room, Title, frame
from fleet.top_text import ASCII, Glyphs
from picker.admin.history import EndpointSeries, HistoryView
from picker.admin.views import EndpointsView, EndpointView, HealthView
from picker.flowcontrol.views import QueuesView
from picker.types import EndpointMetrics

TITLE = Title("http://127.0.0.1:9090", hint="q quits")


def seen(endpoints: int, decisions: int, queues: QueuesView = QUEUES, name: str = "worker") -> Seen:
    """A picker with so many of everything; the second endpoint is ejected."""
    pool = tuple(
        EndpointView(
            key=f"default/{name}-{number}",
            name=f"{name}-{number}",
            namespace="default",
            address="10.0.0.1:8000",
            labels={},
            health=HealthView("ejected" if number == 2 else "healthy"),
            inflight_requests=number,
            metrics=EndpointMetrics(number, 2 * number, 0.5) if number % 3 else None,
            requests_per_second=1.5,
            prefix_hit_share=0.25,
        )
        for number in range(1, endpoints + 1)
    )
    series = {one.key: EndpointSeries(running=(0.0, 5.0, 10.0)) for one in pool}
    listed = tuple(summary(number) for number in reversed(range(decisions)))
    return Seen(EndpointsView(pool, HistoryView(3, 1.0, series)), queues, listed)


def drawn(what: Seen | None, height: int | None = 24, width: int = 80) -> list[str]:
    """The lines as plain text."""
    lines = frame(what, TITLE, Room(width, height, Glyphs()))
    return [line.plain.rstrip() for line in lines]


def test_everything_fits_a_small_terminal() -> None:
    """Ten endpoints, two bands and some requests in 80 by 24."""
    lines = drawn(seen(10, 40))
    assert len(lines) == 24
    assert lines[0].startswith(
        "pointsman http://127.0.0.1:9090  9 of 10 endpoints usable  15.0 req/s"
    )
    assert lines[0].endswith("q quits")
    assert "saturation ████████░░ 83%  queued 14/5000 (52 kB)  under way 37" in lines[1]
    assert lines[3].startswith(
        "ENDPOINT   STATE       RUN WAIT KV           PREFIX INFL  REQ/S RUN"
    )
    assert lines[4].startswith("worker-2   ✕ ejected     4    2 ████░░░  50%    25%    2    1.5")
    assert lines[5].startswith("worker-1   ✓ healthy     2    1 ")
    assert lines[6].startswith("worker-3   ✓ healthy     -    - ░░░░░░░    - ")
    assert sum(line.startswith("worker-") for line in lines) == 10
    assert "0             12/1000    49 kB    2.7s  batch-tenant 75%, small-tenant 25%" in lines
    assert "of the last 40 requests: completed 40" in lines
    assert lines[-1].endswith("batch-tenant") or lines[-1].endswith("interactive")


@pytest.mark.parametrize(("column", "value"), [("STATE", "✕"), ("KV", "█"), ("RUNNING", "▁")])
def test_columns_begin_beneath_their_names(column: str, value: str) -> None:
    """Those that begin at the left."""
    lines = drawn(seen(10, 40))
    place = lines[3].index(column)
    if column == "RUNNING":
        assert lines[4].rindex(value) >= place
    else:
        assert lines[4][place] == value


def test_numbers_end_beneath_their_names() -> None:
    """Those that end at the right."""
    lines = drawn(seen(10, 40))
    for column, value in (("RUN ", "4"), ("WAIT", "2"), ("PREFIX", "25%"), ("INFL", "2")):
        end = lines[3].index(column) + len(column.strip())
        assert lines[4][:end].endswith(value), column
    head = next(line for line in lines if line.startswith("AT "))
    row = lines[lines.index(head) + 1]
    for column, value in (("QUEUE", "12ms"), ("TTFT", "81ms"), ("TOTAL", "1.4s")):
        end = head.index(column) + len(column)
        assert row[:end].endswith(value), column
    for column, value in (("OUTCOME", "completed"), ("ENDPOINT", "worker-"), ("FLOW", "i")):
        assert row[head.index(column) :].startswith(value), column


def test_what_does_not_fit_is_counted() -> None:
    """Thirty endpoints in 24 lines, the troubled one first."""
    lines = drawn(seen(30, 40))
    assert len(lines) == 24
    shown = [line for line in lines if line.startswith("worker-")]
    assert shown[0].startswith("worker-2 ")
    assert f"… {30 - len(shown)} more endpoints" in lines


def test_a_taller_terminal_shows_more() -> None:
    """All endpoints, and requests in the rest."""
    lines = drawn(seen(30, 40), height=60)
    assert sum(line.startswith("worker-") for line in lines) == 30
    assert not any("more endpoints" in line for line in lines)
    assert len(lines) == 60


def test_without_a_limit_everything_is_shown() -> None:
    """Of requests the last ten."""
    lines = drawn(seen(300, 40), height=None)
    assert sum(line.startswith("worker-") for line in lines) == 300
    assert sum("completed" in line for line in lines) == 11


def test_a_picker_without_flow_control_needs_no_lines_for_queues() -> None:
    """It says that it is off."""
    lines = drawn(seen(2, 0, QueuesView()))
    assert lines[1] == "flow control off"
    assert not any("PRIORITY" in line for line in lines)
    assert "no request yet" in lines


def test_a_picker_that_is_gone_leaves_its_last_picture() -> None:
    """With a line that says so."""
    lost = Title("http://127.0.0.1:9090", "does not answer since 10:00:00, trying again", "q quits")
    lines = frame(seen(2, 3), lost, Room(80, 24, Glyphs()))
    assert "✕ does not answer since 10:00:00" in lines[0].plain
    assert lines[0].plain.endswith("q quits")
    assert any("worker-1" in line.plain for line in lines)
    assert len(frame(None, lost, Room(80, 24, Glyphs()))) == 1


def test_a_wide_terminal_shows_ids() -> None:
    """They can be copied, to be explained."""
    lines = drawn(seen(2, 3), width=130)
    assert summary(2).request_id in "\n".join(lines)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 30),
    st.integers(20, 200),
    st.one_of(st.none(), st.integers(1, 70)),
    st.text(max_size=30),
    st.booleans(),
)
def test_no_line_is_ever_too_long_and_there_are_never_too_many(
    endpoints: int, decisions: int, width: int, height: int | None, name: str, is_ascii: bool
) -> None:
    """Whatever names are in it, and however small the terminal is."""
    bands = tuple(
        replace(band, flows=tuple(replace(flow, fairness_id=name) for flow in band.flows))
        for band in QUEUES.bands * 4
    )
    what = seen(endpoints, decisions, replace(QUEUES, bands=bands), name)
    lines = frame(what, TITLE, Room(width, height, ASCII if is_ascii else Glyphs()))
    assert all(cell_len(line.plain) <= width for line in lines)
    assert height is None or len(lines) <= height
    assert all(line.plain.isprintable() for line in lines)
    assert not is_ascii or all(line.plain.isascii() for line in lines)
