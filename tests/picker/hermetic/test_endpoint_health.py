"""Ejection of an endpoint that answers only errors, in a whole picker."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import completion, destination_of
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.whole_picker import FOUR_SCORERS, WholePicker, whole_picker

EJECTIONS = "pointsman_endpoint_ejections_total"
PROBES = "pointsman_endpoint_probes_total"
BUSY_BUT_WELL = (page(queue=50), page(queue=50))
# It scores best whatever happens: a failing server has no queue.
POOL = (page(queue=0), *BUSY_BUT_WELL)


async def answered(picker: WholePicker, bad: Pod, status: int = 500, served: str | None = None):
    """Send one request, which `bad` answers with `status`, others with 200; return its endpoint."""
    async with picker.stream() as stream:
        destination = destination_of(await stream.ask(completion()))
        is_bad = destination == bad.host_port
        headers = {":status": str(status if is_bad else 200)}
        await stream.response_headers(headers, ends=True, served=served if is_bad else destination)
    return destination


async def test_requests_go_elsewhere_after_three_errors(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(*POOL)) as picker:
        bad = picker.pods[0]
        went = Counter([await answered(picker, bad) for _ in range(20)])
        assert went[bad.host_port] == 3 + (await picker.series(PROBES) or 0)
        assert await picker.series(EJECTIONS, endpoint_name=bad.name) == 1
        assert await picker.series("pointsman_endpoints_ejected") == 1
        assert picker.pool.health()[f"default/{bad.name}"].ejections == 1
        assert await picker.is_idle()


async def test_retries_elsewhere_blame_the_endpoint_that_was_picked(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(*POOL)) as picker:
        bad, well = picker.pods[:2]
        went = Counter([await answered(picker, bad, 200, served=well.host_port) for _ in range(20)])
        assert went[bad.host_port] == 3 + (await picker.series(PROBES) or 0)
        assert await picker.series(EJECTIONS) == 1


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_flag_sets_or_disables_ejection(tmp_path: Path, failures: int) -> None:
    pool, flag = pods(*POOL), {"endpoint_ejection_failures": failures}
    async with whole_picker(tmp_path, pool, FOUR_SCORERS, **flag) as picker:
        bad = picker.pods[0]
        went = Counter([await answered(picker, bad) for _ in range(8)])
        if failures:
            assert went[bad.host_port] == 1 + (await picker.series(PROBES) or 0)
        else:
            assert went[bad.host_port] == 8
            assert await picker.series(EJECTIONS) is None
