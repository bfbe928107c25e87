"""The exposition of several processes is the sum of theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from picker.metrics.picker_metrics import Collector, Metric, PickerMetrics, gauge_family
from picker.sharing.totals import Numbers, Totals, numbers_of

Sample = tuple[str, tuple[tuple[str, str], ...]]
EVENTS: list[Callable[[PickerMetrics, str], None]] = [
    lambda metrics, model: metrics.request_total.labels(*labels(metrics, model)).inc(),
    lambda metrics, model: metrics.request_running.labels(*labels(metrics, model)).inc(),
    lambda metrics, model: metrics.request_size_bytes.labels(*labels(metrics, model)).observe(700),
    lambda metrics, _: metrics.scheduler_e2e_duration_seconds.observe(0.0004),
    lambda metrics, _: metrics.discovery_errors_total.inc(),
]


def labels(metrics: PickerMetrics, model: str) -> tuple[str, str, str, str]:
    return metrics.request_labels(model, model)


def samples(page: bytes) -> dict[Sample, float]:
    """What a page says; a sample that is told twice is an error."""
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for one in family.samples:
            which = (one.name, tuple(sorted(one.labels.items())))
            assert which not in found
            found[which] = one.value
    return found


def told(metrics: PickerMetrics) -> Numbers:
    """The numbers of a process as they arrive."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(numbers_of(metrics)), type=Numbers)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(['m"', "n\n"])), max_size=8),
        min_size=1,
        max_size=4,
    )
)
def test_every_sample_is_the_sum_of_the_processes(
    happened: list[list[tuple[Callable[[PickerMetrics, str], None], str]]],
) -> None:
    """Buckets, deprecated names and all, as the general parser reads the pages."""
    own, *others = [PickerMetrics() for _ in happened]
    sums: dict[Sample, float] = defaultdict(float)
    for metrics, events in zip((own, *others), happened, strict=True):
        for event, model in events:
            event(metrics, model)
        for which, value in samples(metrics.render()).items():
            sums[which] += value
    page = Totals().render(own, [told(metrics) for metrics in others])
    merged = samples(page)
    assert merged.keys() == sums.keys()
    for which, value in merged.items():
        assert abs(value - sums[which]) < 1e-9, which


def test_counts_of_a_process_that_ended_stay_and_its_gauges_go() -> None:
    """So that no counter ever falls, and nothing is under way in a process that is no more."""
    totals, own, child = Totals(), PickerMetrics(), PickerMetrics()
    child.request_total.labels("m", "m", "", "0").inc(3)
    child.request_running.labels("m", "m", "", "0").inc(2)
    child.scheduler_e2e_duration_seconds.observe(0.1)
    totals.add_ended(told(child))
    totals.add_ended(told(child))
    page = samples(totals.render(own, [told(child)]))
    which = (
        ("fairness_id", ""),
        ("model_name", "m"),
        ("priority", "0"),
        ("target_model_name", "m"),
    )
    assert page["llm_d_epp_request_total", which] == 9
    assert page["llm_d_epp_request_running", which] == 2
    assert page["llm_d_epp_scheduler_e2e_duration_seconds_count", ()] == 3


class Pool(Collector):
    """Gauges that are computed."""

    def __init__(self, *values: tuple[str, float], name: str = "inflight_requests") -> None:
        self._values, self._name = values, name

    def collect(self) -> Iterator[Metric]:
        gauge = gauge_family(self._name, "How many.", ("endpoint_name",))
        for endpoint, value in self._values:
            gauge.add_metric([endpoint], value)
        yield gauge


def test_what_each_process_finds_out_for_itself_is_no_sum() -> None:
    """Each has its own view of the same endpoints; the greatest number is told."""
    processes = [PickerMetrics() for _ in range(3)]
    for metrics, number in zip(processes, (1, 2, 1), strict=True):
        metrics.health.ejected.set(number)
    page = samples(Totals().render(PickerMetrics(), [told(metrics) for metrics in processes]))
    assert page["pointsman_endpoints_ejected", ()] == 2


def test_computed_gauges_are_added_up_and_those_of_the_pool_told_once() -> None:
    """The pool's belong to one process only; a chance is not added to itself."""
    own, one, other = PickerMetrics(), PickerMetrics(), PickerMetrics()
    own.info.labels("", "1").set(1)
    own.register(Pool(("a", 7), name="ready_endpoints"))
    one.register(Pool(("a", 1), ("b", 2)))
    other.register(Pool(("a", 10)))
    for metrics, share in ((one, 0.25), (other, 0.5)):
        metrics.register(Pool(("r", share), name="disaggregatedset_revision_gating_share"))
    page = samples(Totals().render(own, [told(one), told(other)]))
    prefix = "llm_d_epp_"
    assert page[prefix + "inflight_requests", (("endpoint_name", "a"),)] == 11
    assert page[prefix + "inflight_requests", (("endpoint_name", "b"),)] == 2
    assert page[prefix + "ready_endpoints", (("endpoint_name", "a"),)] == 7
    share_of_revision = prefix + "disaggregatedset_revision_gating_share"
    assert page[share_of_revision, (("endpoint_name", "r"),)] == 0.5
    assert page[prefix + "info", (("build_ref", "1"), ("commit", ""))] == 1
