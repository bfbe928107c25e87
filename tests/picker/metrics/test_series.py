"""Counting, and what the numbers of label sets that fall together in a twin become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from picker.metrics.series import Counter, Declaration, Gauge, Histogram, Twin, metrics_of, text_of
from tests.depth import examples

BOUNDS = (0.0, 0.5, 1.0, 10.0)


def declared(*labels: str, twin: tuple[str, ...] = ()) -> Declaration:
    return Declaration("requests", "Some text.", labels, (Twin("old", twin),))


@examples(50)
@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from(BOUNDS), max_size=20))
def test_a_histogram_counts_as_the_library_does(values: list[float]) -> None:
    """Bounds are inclusive, and buckets hold those below."""
    ours = Histogram(Declaration("h", "Some text."), BOUNDS)
    registry = CollectorRegistry()
    theirs = TheirHistogram("h", "Some text.", buckets=BOUNDS, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (metric,) = metrics_of(ours)
    for sample in metric.samples:
        assert registry.get_sample_value(sample.name, sample.labels) == sample.value


def test_a_twin_adds_up_what_it_cannot_tell_apart() -> None:
    """Its labels are fewer than those of the series."""
    counter = Counter(declared("model", "tenant", twin=("model",)))
    counter.labels("m", "a").inc()
    counter.labels("m", "b").inc(2)
    counter.labels("n", "a").inc(5)
    assert "".join(text_of(counter)).splitlines()[-2:] == [
        'old{model="m"} 3.0',
        'old{model="n"} 5.0',
    ]
    histogram = Histogram(declared("model"), (1.0,))
    histogram.labels("m").observe(0.5)
    histogram.labels("n").observe(2)
    assert "".join(text_of(histogram)).splitlines()[-4:] == [
        'old_bucket{le="1.0"} 1.0',
        'old_bucket{le="+Inf"} 2.0',
        "old_count 2.0",
        "old_sum 2.5",
    ]


def test_a_gauge_is_what_it_was_set_to_or_what_its_function_says() -> None:
    """The function is asked whenever somebody looks."""
    gauge = Gauge(Declaration("g", "Some text."))
    gauge.set(3)
    gauge.inc()
    gauge.dec(2)
    assert "".join(text_of(gauge)).endswith("\ng 2.0\n")
    values = iter((7, 8))
    gauge.set_function(lambda: next(values))
    assert ["".join(text_of(gauge)).split()[-1] for _ in range(2)] == ["7.0", "8.0"]


def test_a_forgotten_label_set_is_gone() -> None:
    """Forgetting what is not there is no error."""
    gauge = Gauge(declared("name"))
    gauge.labels("a").set(1)
    gauge.remove("a")
    gauge.remove("a")
    assert 'name="a"' not in "".join(text_of(gauge))


def test_a_wrong_number_of_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="requests has the labels"):
        Counter(declared("model")).labels("m", "n")
