"""The pool of a whole picker: the pages that it scrapes, health, subsets, objectives; a cluster."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from picker.cli.options import KubernetesFlags
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.kubernetes_objects import CRDS, pool
from tests.support.picker.ext_proc_stream import (
    DESTINATION,
    Message,
    completion,
    destination_of,
    directed,
    refused,
)
from tests.support.picker.metrics_pages import SGLANG, START_SECONDS, Pod, page, pods, serving
from tests.support.picker.steady_requests import Traffic
from tests.support.picker.whole_picker import (
    FOUR_SCORERS,
    HEAD,
    WholePicker,
    objective,
    rewrite,
    rule,
    whole_picker,
    write_endpoints,
)
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


EJECTIONS = "pointsman_endpoint_ejections_total"
PROBES = "pointsman_endpoint_probes_total"
BUSY_BUT_WELL = (page(queue=50), page(queue=50))
# It scores best whatever happens: a failing server has no queue.
BEST_AND_OTHERS = (page(queue=0), *BUSY_BUT_WELL)


async def answered(picker: WholePicker, bad: Pod, status: int = 500, served: str | None = None):
    """Send one request, which `bad` answers with `status`, others with 200; return its endpoint."""
    async with picker.stream() as stream:
        destination = destination_of(await stream.ask(completion()))
        is_bad = destination == bad.host_port
        headers = {":status": str(status if is_bad else 200)}
        await stream.response_headers(headers, ends=True, served=served if is_bad else destination)
    return destination


async def test_requests_go_elsewhere_after_three_errors(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(*BEST_AND_OTHERS)) as picker:
        bad = picker.pods[0]
        went = Counter([await answered(picker, bad) for _ in range(20)])
        assert went[bad.host_port] == 3 + (await picker.series(PROBES) or 0)
        assert await picker.series(EJECTIONS, endpoint_name=bad.name) == 1
        assert await picker.series("pointsman_endpoints_ejected") == 1
        assert picker.pool.health()[f"default/{bad.name}"].ejections == 1
        assert await picker.is_idle()


async def test_retries_elsewhere_blame_the_endpoint_that_was_picked(tmp_path: Path) -> None:
    async with whole_picker(tmp_path, pods(*BEST_AND_OTHERS)) as picker:
        bad, well = picker.pods[:2]
        went = Counter([await answered(picker, bad, 200, served=well.host_port) for _ in range(20)])
        assert went[bad.host_port] == 3 + (await picker.series(PROBES) or 0)
        assert await picker.series(EJECTIONS) == 1


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_flag_sets_or_disables_ejection(tmp_path: Path, failures: int) -> None:
    pool, flag = pods(*BEST_AND_OTHERS), {"endpoint_ejection_failures": failures}
    async with whole_picker(tmp_path, pool, FOUR_SCORERS, **flag) as picker:
        bad = picker.pods[0]
        went = Counter([await answered(picker, bad) for _ in range(8)])
        if failures:
            assert went[bad.host_port] == 1 + (await picker.series(PROBES) or 0)
        else:
            assert went[bad.host_port] == 8
            assert await picker.series(EJECTIONS) is None


PREFIX = "  - {pluginRef: prefix-cache-scorer}\n"

NO_ENDPOINT = refused(
    503, "Service Unavailable", "No endpoint is available for this request", "rejected-no-endpoints"
)
Hint = Callable[[Sequence[Pod]], Any]


def subset(value: Any) -> dict[str, Any]:
    return {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": value}}


HINTS: list[tuple[Hint, int | None]] = [
    (lambda p: [p[2].host_port], 2),  # H10: only the busiest
    (lambda p: [p[0].host_port, p[2].host_port], 0),  # the best of two
    (lambda p: [p[2].host_port, "10.9.9.9:80"], 2),  # H26: one unknown
    (lambda p: f"{p[2].host_port}, {p[0].host_port}", 0),  # one string
    (lambda p: ["192.168.1.99"], None),  # H11: no such endpoint
    (lambda p: [], None),  # an empty list: no endpoint
]


async def test_only_endpoints_in_the_subset_serve(tmp_path: Path) -> None:
    three = pods(page(3, 0.2), page(0, 0.1), page(10, 0.2))
    async with whole_picker(tmp_path, three) as picker:
        for number, (hint, expected) in enumerate(HINTS):
            body = completion(prompt=f"{number}")  # no endpoint has its prefix
            said = await picker.ask(body, metadata=subset(hint(three)))
            wanted = NO_ENDPOINT if expected is None else directed(three[expected].host_port, body)
            assert said == wanted, number


def formula(loads: Sequence[tuple[int, float, tuple[str, ...]]]) -> list[float]:
    """Return the total scores of queue, KV cache and adapters, for the adapter `T`."""
    queues = [queue for queue, _, _ in loads]
    span = max(queues) - min(queues)
    return [
        ((max(queues) - queue) / span if span else 1.0)
        + (1 - kv)
        + (1.0 if "T" in adapters else 0.8 if len(adapters) < 4 else 0.0)
        for queue, kv, adapters in loads
    ]


async def test_any_subset_is_decided_by_the_formula(tmp_path: Path) -> None:
    rng = Random(5)
    names = ("T", "a", "b", "c", "d")
    loads = [
        (rng.randrange(9), rng.randrange(100) / 100, tuple(rng.sample(names, rng.randrange(5))))
        for _ in range(12)
    ]
    twelve = pods(*(page(*load) for load in loads))
    body = completion("T", stream=False)
    async with whole_picker(tmp_path, twelve, FOUR_SCORERS.replace(PREFIX, "")) as picker:
        for _ in range(20):
            chosen = rng.sample(range(12), rng.randrange(1, 12))
            scores = formula([loads[index] for index in chosen])
            hint = subset([twelve[index].host_port for index in chosen])
            went = await picker.destination(body, metadata=hint)
            score = scores[[twelve[index].host_port for index in chosen].index(went)]
            assert score == pytest.approx(max(scores))
            await until(picker.is_idle)


async def test_the_subset_can_be_switched_off(tmp_path: Path) -> None:
    two = pods(page(), page(5, 0.5))
    async with whole_picker(tmp_path, two, disable_endpoint_subset_filter=True) as picker:
        for hint in ([two[1].host_port], []):
            said = await picker.ask(completion(), metadata=subset(hint))
            assert destination_of(said) == two[0].host_port


APP = {"app": "vllm"}
INFERENCE_POOLS = "inferencepools"


@dataclass
class Scene:
    api: KubeApi
    kubelet: Kubelet
    picker: WholePicker
    traffic: Traffic

    async def serves(self, *places: str) -> None:
        async def are_known() -> bool:
            known = await self.picker.endpoints()
            return {row["address"] for row in known.values()} == set(places)

        await until(are_known)
        await self.traffic.only_at(places)

    def write_pool(self, labels: Mapping[str, str], *ports: int) -> None:
        targets = [{"number": port} for port in ports]
        selector = {"matchLabels": dict(labels)}
        self.api.write(pool(name="pool", selector=selector, targetPorts=targets))


def options_for(api: KubeApi, folder: Path, **changes: Any) -> dict[str, Any]:
    kubeconfig = api.write_kubeconfig(folder / "kubeconfig")
    flags = KubernetesFlags("pool", kubeconfig=kubeconfig)
    return {"endpoints_file": None, "kubernetes": flags, "pool_name": "pool"} | changes


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Scene]:
    async with running_kube_api(None, *sorted(CRDS.glob("*.yaml"))) as api:
        kubelet = Kubelet(api)
        kubelet.run("a", "127.0.0.11", APP, grace_seconds=600)
        kubelet.run("b", "127.0.0.12", APP, grace_seconds=600)
        api.write(pool(name="pool"))
        options = options_for(api, folder)
        async with whole_picker(folder, (), FOUR_SCORERS, **options) as picker:
            traffic = Traffic(picker)
            scene = Scene(api, kubelet, picker, traffic)

            async def is_ready() -> bool:
                return bool(await picker.endpoints()) and (await picker.get("/readyz"))[0] == 200

            await until(is_ready)
            task = asyncio.create_task(traffic.run())
            try:
                yield scene
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert traffic.failed == []


async def test_pods_terminate_flap_move_and_join_under_requests(tmp_path: Path) -> None:
    async with following(tmp_path) as scene:
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000")
        scene.kubelet.run("c", "127.0.0.13", APP, grace_seconds=600)
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000", "127.0.0.13:8000")
        scene.kubelet.delete("a")  # its Pod stays, ready, for its grace
        await scene.serves("127.0.0.12:8000", "127.0.0.13:8000")
        scene.kubelet.move("b", "127.0.0.22")
        await scene.serves("127.0.0.22:8000", "127.0.0.13:8000")
        for is_ready in (False, True):  # all of the node's, as when its kubelet starts again
            for name in "bc":
                scene.kubelet.set_ready(name, is_ready)
                await asyncio.sleep(0)
        await scene.serves("127.0.0.22:8000", "127.0.0.13:8000")
        scene.kubelet.set_ready("b", False)
        await scene.serves("127.0.0.13:8000")


async def test_an_outage_of_the_api_server_does_not_stop_requests(tmp_path: Path) -> None:
    async with following(tmp_path) as scene:
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000")
        await scene.api.go_away()
        scene.kubelet.delete("a")
        scene.kubelet.run("d", "127.0.0.14", APP)
        scene.api.write(pool(name="pool", targetPorts=[{"number": 8080}]))

        async def is_said() -> bool:
            status, text = await scene.picker.get("/readyz")
            is_shown = "the last known state is in use" in text
            assert not set(text) & set("<[")  # words, and nothing of Python's objects
            return status == 200 and is_shown and "no connection to 127.0.0.1:" in text

        await until(is_said)
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000")
        await scene.api.come_back(forget_changes=True)
        await scene.serves("127.0.0.12:8080", "127.0.0.14:8080")


OBJECTIVE = "x-llm-d-inference-objective"


def model_of(said: list[Message]) -> str:
    pieces = [one.request_body.response.body_mutation.streamed_response.body for one in said[1:]]
    return json.loads(b"".join(pieces))["model"]


async def test_changes_apply_whole_and_fail_no_request(tmp_path: Path) -> None:
    first, second = pods(page(), page())
    states = {
        pod.name: [objective("o", priority), rewrite("r", rule("m", **{model: None}))]
        for pod, priority, model in ((first, 1, "v1"), (second, 2, "v2"))
    }
    seen: Counter[tuple[str, str]] = Counter()
    async with whole_picker(tmp_path, [first, second]) as picker:
        picker.policies = states[first.name]
        picker.list_endpoints([first])
        await until(lambda: _only(picker, first.name))
        done = asyncio.Event()

        async def client() -> None:
            while not done.is_set():
                said = await picker.ask(completion("m"), {OBJECTIVE: "o"})
                seen[destination_of(said), model_of(said)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            for pod in (second, first) * 3:
                picker.policies = states[pod.name]
                picker.list_endpoints([pod])
                await until(lambda name=pod.name: _only(picker, name))
            done.set()
        assert seen.keys() == {(first.host_port, "v1"), (second.host_port, "v2")}
        assert await picker.outcomes() == {"client-gone": sum(seen.values())}
        for model, priority in (("v1", "1"), ("v2", "2")):
            fields = {"target_model_name": model, "priority": priority}
            counted = sum(count for (_, name), count in seen.items() if name == model)
            assert await picker.requests(**fields) == counted


async def _only(picker, name: str) -> bool:  # type: ignore[no-untyped-def]
    return list(await picker.endpoints()) == [name]
