"""Series count as those of `prometheus_client`; a twin adds up label sets that coincide in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client import Summary as TheirSummary
from prometheus_client.parser import text_string_to_metric_families

from base.series import (
    Counter,
    Declaration,
    Gauge,
    Histogram,
    Page,
    Summary,
    Twin,
    metrics_of,
    text_of,
)
from tests.depth import examples

BOUNDS = (0.0, 0.5, 1.0, 10.0)


def declared(*labels: str, twin: tuple[str, ...] = ()) -> Declaration:
    return Declaration("requests", "Some text.", labels, (Twin("old", twin),))


@examples(50)
@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from(BOUNDS), max_size=20))
def test_a_histogram_counts_as_the_library_does(values: list[float]) -> None:
    ours = Histogram(Declaration("h", "Some text."), BOUNDS)
    registry = CollectorRegistry()
    theirs = TheirHistogram("h", "Some text.", buckets=BOUNDS, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (metric,) = metrics_of(ours)
    for sample in metric.samples:
        assert registry.get_sample_value(sample.name, sample.labels) == sample.value


def test_a_twin_adds_up_label_sets_that_coincide() -> None:
    """The twin has fewer labels than the series."""
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


def test_a_gauge_has_its_last_value_or_that_of_its_function() -> None:
    gauge = Gauge(Declaration("g", "Some text."))
    gauge.set(3)
    gauge.inc()
    gauge.dec(2)
    assert "".join(text_of(gauge)).endswith("\ng 2.0\n")
    values = iter((7, 8))
    gauge.set_function(lambda: next(values))
    assert ["".join(text_of(gauge)).split()[-1] for _ in range(2)] == ["7.0", "8.0"]


def test_a_removed_label_set_is_gone() -> None:
    gauge = Gauge(declared("name"))
    gauge.labels("a").set(1)
    gauge.remove("a")
    gauge.remove("a")
    assert 'name="a"' not in "".join(text_of(gauge))


def test_a_wrong_number_of_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="requests has the labels"):
        Counter(declared("model")).labels("m", "n")


@examples(30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=20))
def test_a_page_equals_that_of_the_library_after_every_change(
    values: list[tuple[str, float]],
) -> None:
    """Label sets that did not change keep their text."""
    declared = Declaration("h", "Some text.", ("a",))
    histogram, counter = Histogram(declared, BOUNDS), Counter(Declaration("c_total", "Text."))
    summary = Summary(Declaration("s", "Text.", ("a",)))
    page = Page((histogram, counter, summary))
    registry = CollectorRegistry()
    of_library = (
        TheirHistogram("h", "Some text.", ["a"], buckets=BOUNDS, registry=registry),
        TheirCounter("c", "Text.", registry=registry),
        TheirSummary("s", "Text.", ["a"], registry=registry),
    )
    for label, value in values:
        histogram.labels(label).observe(value)
        counter.inc()
        summary.labels(label).observe(value)
        of_library[0].labels(label).observe(value)
        of_library[1].inc()
        of_library[2].labels(label).observe(value)
        assert samples(page.render()) == samples(generate_latest(registry).decode())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if not one.name.endswith("_created")
    }


def test_a_page_writes_counts_as_whole_numbers_and_escapes_labels() -> None:
    counter = Counter(Declaration("c", "Text.", ("a",)))
    page = Page((counter,))
    assert page.render() == "# HELP c Text.\n# TYPE c counter\n"
    counter.labels('"%\n').inc()
    assert page.render().splitlines()[-1] == r'c{a="\"%\n"} 1'


def test_a_value_observed_many_times_counts_as_often() -> None:
    once, often = (Histogram(Declaration("h", "Text."), BOUNDS) for _ in range(2))
    for _ in range(3):
        once.observe(0.5)
    often.observe_many(0.5, 3)
    assert list(once.numbers()) == list(often.numbers())
