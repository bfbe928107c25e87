"""Endpoints of the picker's file, and the pages that it scrapes from them."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import DESTINATION, completion, destination_of
from tests.support.picker.metrics_pages import (
    SGLANG,
    START_SECONDS,
    Pod,
    page,
    pods,
    serving,
)
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker, write_endpoints
from tests.support.waiting import until

QUEUES = HEAD + "plugins: [{type: queue-scorer}, {type: max-score-picker}]"


def hint(pod: Pod) -> dict[str, dict[str, list[str]]]:
    return {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": [pod.host_port]}}


async def known(picker: WholePicker, name: str) -> Mapping[str, object]:
    return (await picker.endpoints())[name]["metrics"]


async def test_two_engines_serve_one_pool(tmp_path: Path) -> None:
    labels = [{"llm-d.ai/engine-type": "sglang"}, {}]
    two = pods(page(9, 0.5, engine=SGLANG), page(3, 0.5), labels=labels)
    async with whole_picker(tmp_path, two, QUEUES) as picker:
        assert await picker.destination(completion()) == two[1].host_port
        two[0].page = page(1, 0.5, engine=SGLANG)
        await picker.knows("pod-0", waiting_requests=1)
        assert await picker.destination(completion()) == two[0].host_port


@pytest.mark.parametrize("broken", [None, "", "<html>", "vllm:num_requests_waiting NaN\n"])
async def test_an_endpoint_without_metrics_is_not_idle(tmp_path: Path, broken: str | None) -> None:
    bad, good = pods(broken, page(50, 0.9))
    bad.name, good.name = "bad", "good"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(bad))
        async with whole_picker(tmp_path, [good]) as picker:
            write_endpoints(picker.endpoints_file, [bad, good])
            await until(picker.endpoints, lambda found: bad.asked >= 2 and "bad" in found)
            assert (await picker.endpoints())["bad"]["metrics"] is None
            for _ in range(4):
                assert await picker.destination(completion()) == good.host_port
            assert await picker.destination(completion(), metadata=hint(bad)) == bad.host_port


RENAMED = "vllm:kv_cache_usage_perc", "vllm:kv_cache_share"
BUCKETS = "".join(
    f'vllm:request_latency_seconds_bucket{{engine="{number % 40}",le="{number}"}} 7\n'
    for number in range(30_000)
)


@pytest.mark.parametrize(
    "long_queue",
    [
        page(60, 0.1).replace(*RENAMED),
        page(60, 0.1).replace(RENAMED[0], "vllm:gpu_cache_usage_perc"),
        page(60, 0.1).replace("perc 0.1", "perc NaN"),
        page(60, 0.1) + BUCKETS,
    ],
    ids=["renamed", "old name", "no number", "two megabytes"],
)
async def test_a_queue_counts_on_an_incomplete_page(tmp_path: Path, long_queue: str) -> None:
    three = pods(long_queue, page(1, 0.5), page(2, 0.4))
    async with whole_picker(tmp_path, three) as picker:
        await picker.knows("pod-0", waiting_requests=60)
        served = {await picker.destination(completion(prompt=str(number))) for number in range(12)}
        assert three[0].host_port not in served


async def test_a_restart_makes_an_endpoint_forget_its_prefixes(tmp_path: Path) -> None:
    """A new start time of the process means an empty cache."""
    config = (
        HEAD
        + """
plugins: [{type: prefix-cache-scorer}, {type: kv-cache-utilization-scorer}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache-scorer, weight: 5}, {pluginRef: kv-cache-utilization-scorer}]
"""
    )
    full, empty = two = pods(page(kv=0.9), page(kv=0.1))
    body = completion(prompt="a long story " * 100)
    async with whole_picker(tmp_path, two, config) as picker:
        assert await picker.destination(body, metadata=hint(full)) == full.host_port
        for _ in range(2):
            assert await picker.destination(body) == full.host_port
        size = await picker.series("llm_d_epp_prefix_indexer_size")
        assert size
        started = START_SECONDS + 500
        full.page = page(kv=0.9, started=started)
        await picker.knows("pod-0", process_start_time_seconds=started)
        assert await picker.series("llm_d_epp_prefix_indexer_size") == 0
        assert await picker.destination(body) == empty.host_port


async def test_endpoints_come_and_go_with_the_file(tmp_path: Path) -> None:
    """H47: endpoints that left the file are not asked."""
    one, other = two = pods(page(0), page(1))
    async with whole_picker(tmp_path, two, QUEUES) as picker:
        assert await picker.destination(completion()) == one.host_port
        before = one.asked
        await until(lambda: one.asked >= before + 3)
        picker.list_endpoints([other])
        await until(picker.endpoints, lambda found: list(found) == ["pod-1"])
        asked, asked_other = one.asked, other.asked
        for _ in range(3):
            assert await picker.destination(completion()) == other.host_port
        await until(lambda: other.asked >= asked_other + 4)
        assert one.asked <= asked + 1  # one may have been under way
        bad = Pod("bad", "not_a_name", None, port=80)
        write_endpoints(picker.endpoints_file, [bad, one])
        await until(picker.endpoints, lambda found: list(found) == ["pod-0"])
        assert await picker.series("pointsman_discovery_errors_total") == 1
        assert await picker.destination(completion()) == one.host_port
        picker.endpoints_file.write_text("endpoints: 7")
        await until(
            lambda: picker.series("pointsman_discovery_errors_total"), lambda found: found == 2
        )
        assert await picker.destination(completion()) == one.host_port


async def test_requests_in_flight_count_before_any_page_shows_them(tmp_path: Path) -> None:
    three = pods(page(), page(), page())
    async with AsyncExitStack() as stack, whole_picker(tmp_path, three, None) as picker:
        found = []
        for number in range(9):
            stream = await stack.enter_async_context(picker.stream())
            found.append(destination_of(await stream.ask(completion(prompt=f"{number} q"))))
        assert sorted(found) == sorted([one.host_port for one in three] * 3)
        rows = await picker.endpoints()
        assert [row["inflight_requests"] for row in rows.values()] == [3, 3, 3]
        await stack.aclose()
        assert await picker.is_idle()
