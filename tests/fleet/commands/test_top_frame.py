"""The pictures of `pointsman top`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from fleet.commands.top_frame import KEYS, Room, Title, Wishes, frame
from fleet.commands.top_text import ASCII, Glyphs
from fleet.picker_views import Seen
from picker.admin.history import EndpointSeries, HistoryView
from picker.admin.views import EndpointsView, EndpointView, HealthView, PoolRates
from picker.decisions.views import RecordSummary
from picker.flowcontrol.views import QueuesView
from picker.types import EndpointMetrics, Percentiles
from tests.depth import examples
from tests.support.picker.admin_scene import QUEUES, summary

TITLE = Title("http://127.0.0.1:9090")

TTFT = Percentiles(0.08, 1.2, 2.5)


def seen(endpoints: int, decisions: int, queues: QueuesView = QUEUES, name: str = "worker") -> Seen:
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
            ttft=TTFT,
        )
        for number in range(1, endpoints + 1)
    )
    series = {one.key: EndpointSeries(running=(0.0, 5.0, 10.0)) for one in pool}
    listed = tuple(summary(number) for number in reversed(range(decisions)))
    rates = PoolRates(1.5 * endpoints, 7.0, 0.0, 640.0, TTFT)
    return Seen(EndpointsView(pool, rates, HistoryView(3, 1.0, series)), queues, listed)


def drawn(
    what: Seen | None, height: int | None = 24, width: int = 80, wishes: Wishes | None = None
) -> list[str]:
    lines = frame(what, TITLE, Room(width, height, Glyphs()), wishes)
    return [line.plain.rstrip() for line in lines]


def test_everything_fits_a_small_terminal() -> None:
    lines = drawn(seen(10, 40))
    assert len(lines) == 24
    assert lines[0].startswith(
        "pointsman http://127.0.0.1:9090  9 of 10 endpoints usable  15.0 req/s"
    )
    rates = "TTFT with queue p50 80ms p95 1.2s  640 tok/s  7.0/s refused  0.0/s failed"
    assert lines[1] == rates
    assert "saturation ████████░░ 83%  queued 14/5000 (52 kB)  in flight 37" in lines[2]
    assert lines[4].startswith(
        "ENDPOINT   STATE       RUN WAIT KV           PREFIX INFL  REQ/S   TTFT RUN"
    )
    assert lines[5].startswith(
        "worker-2   ✕ ejected     4    2 ████░░░  50%    25%    2    1.5   1.2s"
    )
    assert lines[6].startswith("worker-1   ✓ healthy     2    1 ")
    assert lines[7].startswith("worker-3   ✓ healthy     -    - ░░░░░░░    - ")
    assert sum(line.startswith("worker-") for line in lines) == 10
    assert "0             12/1000    49 kB    2.7s  batch-tenant 75%, small-tenant 25%" in lines
    assert "of the last 40 requests: completed 40" in lines
    assert lines[-1].endswith("batch-tenant") or lines[-1].endswith("interactive")


@pytest.mark.parametrize(("column", "value"), [("STATE", "✕"), ("KV", "█"), ("RUNNING", "▁")])
def test_columns_begin_beneath_their_names(column: str, value: str) -> None:
    lines = drawn(seen(10, 40))
    place = lines[4].index(column)
    if column == "RUNNING":
        assert lines[5].rindex(value) >= place
    else:
        assert lines[5][place] == value


def test_numbers_end_beneath_their_names() -> None:
    lines = drawn(seen(10, 40))
    for column, value in (("RUN ", "4"), ("WAIT", "2"), ("PREFIX", "25%"), ("INFL", "2")):
        end = lines[4].index(column) + len(column.strip())
        assert lines[5][:end].endswith(value), column
    head = next(line for line in lines if line.startswith("AT "))
    row = lines[lines.index(head) + 1]
    for column, value in (("QUEUE", "12ms"), ("TTFT", "81ms"), ("TOTAL", "1.4s")):
        end = head.index(column) + len(column)
        assert row[:end].endswith(value), column
    for column, value in (("OUTCOME", "completed"), ("ENDPOINT", "worker-"), ("FLOW", "i")):
        assert row[head.index(column) :].startswith(value), column


def test_rows_that_do_not_fit_are_counted() -> None:
    lines = drawn(seen(30, 40))
    assert len(lines) == 24
    shown = [line for line in lines if line.startswith("worker-")]
    assert shown[0].startswith("worker-2 ")
    assert f"… {30 - len(shown)} more endpoints" in lines


def test_a_taller_terminal_shows_more() -> None:
    lines = drawn(seen(30, 40), height=60)
    assert sum(line.startswith("worker-") for line in lines) == 30
    assert not any("more endpoints" in line for line in lines)
    assert len(lines) == 60


def test_without_a_limit_everything_is_shown() -> None:
    lines = drawn(seen(300, 40), height=None)
    assert sum(line.startswith("worker-") for line in lines) == 300
    assert sum("completed" in line for line in lines) == 11


def test_a_picker_without_flow_control_needs_no_lines_for_queues() -> None:
    lines = drawn(seen(2, 0, QueuesView()))
    assert lines[2] == "flow control off"
    assert not any("PRIORITY" in line for line in lines)
    assert "no request yet" in lines


def test_a_silent_picker_leaves_its_last_picture() -> None:
    lost = Title("http://127.0.0.1:9090", "does not answer since 10:00:00, trying again")
    lines = frame(seen(2, 3), lost, Room(80, 24, Glyphs()))
    assert "✕ does not answer since 10:00:00" in lines[0].plain
    assert any("worker-1" in line.plain for line in lines)
    assert len(frame(None, lost, Room(80, 24, Glyphs()))) == 1


def test_a_wide_terminal_shows_ids() -> None:
    """Users can copy them for `pointsman explain`."""
    lines = drawn(seen(2, 3), width=130)
    assert summary(2).request_id in "\n".join(lines)


@examples(60)
@given(
    st.integers(0, 40),
    st.integers(0, 30),
    st.integers(20, 200),
    st.one_of(st.none(), st.integers(1, 70)),
    st.text(max_size=30),
    st.booleans(),
    st.lists(st.sampled_from([*"s/fpjkxy", "up", "down", "enter", "escape", "backspace"])),
)
def test_no_line_is_ever_too_long_and_there_are_never_too_many(
    endpoints: int,
    decisions: int,
    width: int,
    height: int | None,
    name: str,
    is_ascii: bool,
    keys: list[str],
) -> None:
    bands = tuple(
        replace(band, flows=tuple(replace(flow, fairness_id=name) for flow in band.flows))
        for band in QUEUES.bands * 4
    )
    what = seen(endpoints, decisions, replace(QUEUES, bands=bands), name)
    wishes = Wishes()
    for key in keys:
        wishes = wishes.pressed(key, what)
    lines = frame(what, TITLE, Room(width, height, ASCII if is_ascii else Glyphs()), wishes)
    assert all(cell_len(line.plain) <= width for line in lines)
    assert height is None or len(lines) <= height
    assert all(line.plain.isprintable() for line in lines)
    assert not is_ascii or all(line.plain.isascii() for line in lines)


def pressed(what: Seen, *keys: str) -> Wishes:
    wishes = Wishes()
    for key in keys:
        wishes = wishes.pressed(key, what)
    return wishes


def names(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("worker-")]


def test_a_key_changes_the_order_of_endpoints() -> None:
    """Each press takes the next order, and then the first again."""
    what = seen(5, 0)
    assert names(drawn(what)) == [f"worker-{number}" for number in (2, 1, 3, 4, 5)]
    lines = drawn(what, width=120, wishes=pressed(what, "s"))
    assert names(lines) == [f"worker-{number}" for number in (5, 4, 2, 1, 3)]
    assert lines[3] == f"by running   {KEYS}"
    assert pressed(what, *"ssssss") == Wishes()


def test_typed_text_narrows_both_lists() -> None:
    """Letters extend the text, also those of commands; Enter keeps the text, Escape clears it."""
    what = seen(12, 40)
    wishes = pressed(what, "/", *"worker-1x", "backspace")
    lines = drawn(what, wishes=wishes)
    assert names(lines) == ["worker-1", "worker-10", "worker-11", "worker-12"]
    assert lines[3].startswith("by trouble, with 'worker-1_' ")
    accepted = wishes.pressed("enter", what)
    assert (accepted.text, accepted.is_typing) == ("worker-1", False)
    assert pressed(what, "/", *"spf", "escape") == Wishes()
    assert len(accepted.requests(what)) == 8  # of ten endpoints: 1 and 10


def test_failures_alone_can_be_shown() -> None:
    what = seen(1, 0)
    outcomes = (("completed", 200), ("completed", 500), ("refused", 429), ("waiting", None))
    listed = tuple(
        summary(at, outcome=outcome, status=status) for at, (outcome, status) in enumerate(outcomes)
    )
    wishes = pressed(what, "f")
    assert [one.status for one in wishes.requests(replace_decisions(what, listed))] == [500, 429]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": 400}, "client error 400"),
        ({"status": 503}, "server error 503"),
        ({"outcome": "client-gone", "status": None}, "client gone"),
        (
            {"outcome": "refused", "status": 503, "reason": "rejected-no-endpoints"},
            "no endpoint 503",
        ),
        (
            {"outcome": "evicted", "status": 429, "reason": "evicted-priority"},
            "stopped for others 429",
        ),
        ({"outcome": "new-one", "status": 200}, "new-one"),
    ],
)
def test_outcomes_are_words(changes: dict[str, object], words: str) -> None:
    what = replace_decisions(seen(1, 0), (summary(1, **changes),))
    assert drawn(what)[-1][9:31].rstrip() == words


def replace_decisions(what: Seen, listed: tuple[RecordSummary, ...]) -> Seen:
    return Seen(what.pool, what.queues, listed)


def test_a_request_is_marked_and_stays_so() -> None:
    what = seen(2, 30)
    wishes = pressed(what, "down", "down", "j", "up")
    assert wishes.chosen == what.decisions[1]
    newer = tuple(summary(100 + number) for number in range(25))
    later = replace_decisions(what, newer + what.decisions)
    lines = frame(later, TITLE, Room(140, 24, Glyphs()), wishes)
    [marked] = [line for line in lines if any(span.style == "reverse" for span in line.spans)]
    assert what.decisions[1].request_id in marked.plain
    assert wishes.pressed("down", later).chosen == what.decisions[2]
    assert pressed(seen(2, 0), "down").chosen is None
