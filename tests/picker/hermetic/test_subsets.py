"""The subset hint of the gateway restricts the endpoints whatever their load (H10, H11, H25–27)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.picker.ext_proc_stream import completion, destination_of, directed, refused
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.whole_picker import FOUR_SCORERS, whole_picker
from tests.support.waiting import until

PREFIX = "  - {pluginRef: prefix-cache-scorer}\n"

NO_ENDPOINT = refused(
    503,
    "Service Unavailable",
    "No endpoint is available for this request",
    "rejected-no-endpoints",
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
