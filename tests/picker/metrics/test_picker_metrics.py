"""Series have the reference's names, and clients cannot multiply them without bound."""

import math
import re
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from base.series import Computed, Declaration, Histogram, Twin
from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.errors import Code
from picker.flowcontrol.outcomes import FlowOutcome
from picker.flowcontrol.reporting import FlowReporter
from picker.flowcontrol.shell.controller import FlowController
from picker.framework.flow import QueuedRequest
from picker.metrics import label_caps
from picker.metrics.label_caps import (
    MAX_LABEL_SETS,
    MAX_NAMES,
    BoundedLabels,
    PageRoom,
    RequestLabels,
)
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.telemetry.plugin_metrics import PluginCollector
from picker.telemetry.pool_metrics import PoolCollector
from picker.types import DEFAULT_FAIRNESS_ID, Api, InferenceRequest, ParsedBody
from tests.depth import examples

METRICS_DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
SERIES_NAME = re.compile(
    r"\b(?:llm_d_epp|pointsman|inference_(?:objective|pool|extension)|llm_d_inference_scheduler"
    r"|kvcache)"
    r"_[a-z0-9_]+"
)
REQUEST = ("model_name", "target_model_name", "fairness_id", "priority")
MODELS = REQUEST[:2]
PLUGIN = ("extension_point", "plugin_type", "plugin_name")
INDEX = ("plugin_name", "plugin_type")
ATTEMPT = ("status", "target_model_name", "endpoint_name", "namespace", "port")
REWRITE = ("model_rewrite_name", "model_name", "target_model")

ERRORS = tuple(code.value for code in Code)
OBJECTIVE, EXTENSION = "inference_objective_", "inference_extension_"
SCHEDULER = "llm_d_inference_scheduler_"

# (attribute, labels, full name of the deprecated twin or its prefix, its labels); source: the
# reference's table.
SERIES = [
    ("request_total", REQUEST, OBJECTIVE, (*MODELS, "priority")),
    ("request_error_total", (*REQUEST, "error_code"), OBJECTIVE, (*MODELS, "error_code")),
    ("request_duration_seconds", REQUEST, OBJECTIVE, MODELS),
    ("request_size_bytes", REQUEST, OBJECTIVE + "request_sizes", MODELS),
    ("response_size_bytes", REQUEST, OBJECTIVE + "response_sizes", MODELS),
    ("request_input_tokens", REQUEST, OBJECTIVE + "input_tokens", MODELS),
    ("request_output_tokens", REQUEST, OBJECTIVE + "output_tokens", MODELS),
    ("request_cached_tokens", REQUEST, OBJECTIVE + "prompt_cached_tokens", MODELS),
    ("request_running", REQUEST, OBJECTIVE + "running_requests", ("model_name",)),
    (
        "request_ntpot_seconds",
        REQUEST,
        OBJECTIVE + "normalized_time_per_output_token_seconds",
        MODELS,
    ),
    ("request_ttft_seconds", (*REQUEST, "streaming"), "", ()),
    ("request_streaming_tpot_seconds", REQUEST, "", ()),
    ("request_streaming_itl_seconds", REQUEST, "", ()),
    ("request_processing_duration_seconds", (), "", ()),
    ("response_processing_duration_seconds", (), "", ()),
    ("model_rewrite_decisions_total", REWRITE, EXTENSION, REWRITE),
    ("scheduler_e2e_duration_seconds", (), EXTENSION, ()),
    (
        "scheduler_attempts_total",
        ATTEMPT,
        EXTENSION,
        ("status", "target_model_name", "pod_name", "namespace", "port"),
    ),
    ("plugin_duration_seconds", PLUGIN, EXTENSION, PLUGIN),
    ("plugin_data_scope_violations_total", (*PLUGIN, "access"), "", ()),
    ("prefix_indexer_size", INDEX, EXTENSION, ()),
    ("prefix_indexer_hit_ratio", INDEX, EXTENSION, ()),
    ("prefix_indexer_hit_bytes", INDEX, EXTENSION, ()),
    ("info", ("commit", "build_ref"), EXTENSION, ("commit", "build_ref")),
    ("datalayer_poll_errors_total", ("source_type",), SCHEDULER, ("source_type",)),
    (
        "datalayer_extract_errors_total",
        ("source_type", "extractor_type"),
        SCHEDULER,
        ("source_type", "extractor_type"),
    ),
]
GENERAL = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30),
    *(45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
RESPONSE_SIZES = (*(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536),)
BUCKETS = {
    "request_duration_seconds": GENERAL,
    "request_ttft_seconds": GENERAL[: GENERAL.index(120) + 1],
    "response_size_bytes": RESPONSE_SIZES,
    "request_input_tokens": (*RESPONSE_SIZES, 131072, 262144, 524288, 1048576),
    "request_output_tokens": RESPONSE_SIZES[: RESPONSE_SIZES.index(8192) + 1],
}


def count(metrics: PickerMetrics, attribute: str, *labels: str) -> None:
    series = getattr(metrics, attribute)
    one = series.labels(*labels) if labels else series
    if hasattr(one, "observe"):
        one.observe(0.3)
    else:
        one.inc()


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(("attribute", "labels", "twin", "twin_labels"), SERIES)
def test_series_have_the_references_current_and_deprecated_names_and_labels(
    attribute: str, labels: tuple[str, ...], twin: str, twin_labels: tuple[str, ...]
) -> None:
    metrics = PickerMetrics()
    count(metrics, attribute, *labels)  # each label's value is its name
    renamed = {"endpoint_name": "pod_name"}
    expected = {f"llm_d_epp_{attribute}": {label: label for label in labels}}
    if twin:
        back = {new: old for old, new in renamed.items()}
        expected[twin + attribute if twin.endswith("_") else twin] = {
            label: back.get(label, label) for label in twin_labels
        }
    page = metrics.render()
    for name, wanted in expected.items():
        found = [
            dict(own)
            for (sample, own), value in samples(page).items()
            if sample in (name, f"{name}_count") and value == 1
        ]
        assert found == [wanted], name
        assert f"# TYPE {name} ".encode() in page


@pytest.mark.parametrize("attribute", BUCKETS)
def test_buckets_are_the_references(attribute: str) -> None:
    """The reference mistypes one bucket, but sums over pickers need equal buckets."""
    metrics = PickerMetrics()
    labels = next(row[1] for row in SERIES if row[0] == attribute)
    count(metrics, attribute, *labels)
    bounds = [
        float(dict(own)["le"])
        for (name, own) in samples(metrics.render())
        if name == f"llm_d_epp_{attribute}_bucket"
    ]
    assert tuple(bounds) == (*BUCKETS[attribute], math.inf)


class Pool:
    def collect(self) -> Iterator[Computed]:
        twin = Twin("old_size", ("name", "endpoint"), {"endpoint": "pod"})
        sizes = Declaration("size", "…", ("name", "endpoint"), (twin,))
        yield Computed(sizes, lambda: ((("pool", "pod-1"), 3),))
        yield Computed(Declaration("other", "…"), lambda: (((), 1),))


def test_the_page_equals_that_of_the_library() -> None:
    metrics = PickerMetrics()
    metrics.register(Pool())
    for attribute, labels, _, _ in SERIES:
        for awkward in ("", "m", 'a"b\\c\nd', "ü", "}{,="):
            count(metrics, attribute, *(awkward for _ in labels))
    metrics.request_duration_seconds.labels("a", "b", "c", "0").observe(1e9)
    metrics.info.labels("", "").set(float("inf"))
    ours, theirs = metrics.render(), generate_latest(metrics.registry)
    assert samples(ours) == samples(theirs)
    kinds = [(f.name, f.type) for f in text_string_to_metric_families(ours.decode())]
    assert kinds == [(f.name, f.type) for f in text_string_to_metric_families(theirs.decode())]
    assert len(kinds) == len(set(kinds))


def test_computed_gauges_have_their_deprecated_names() -> None:
    metrics = PickerMetrics()
    metrics.register(Pool())
    found = metrics.registry.get_sample_value("old_size", {"name": "pool", "pod": "pod-1"})
    assert found == 3


def test_two_pickers_in_one_process_do_not_share_series() -> None:
    first, second = PickerMetrics(), PickerMetrics()
    first.request_total.labels("m", "m", "", "0").inc()
    assert b'model_name="m"' in first.render()
    assert b'model_name="m"' not in second.render()


def test_label_values_beyond_the_cap_become_other() -> None:
    labels = BoundedLabels(limit=2)
    assert [labels.admit(v) for v in ("a", "b", "c", "", "a", "d")] == [
        *("a", "b", "other", "", "a", "other")
    ]


SOURCES: dict[str, Callable[[RequestLabels, str], None]] = {
    "a rule": lambda labels, name: labels.pin_rewrites([(name, name)]),
    "a worker's page": lambda labels, name: labels.add_served([name]),
    "a worker's answer": lambda labels, name: labels.answered(name),
}


@pytest.mark.parametrize("source", SOURCES)
def test_unknown_models_share_one_label(source: str) -> None:
    labels = RequestLabels()
    assert labels.of("qwen", "qwen", "default-flow", 1) == ("other", "other", "default-flow", "1")
    SOURCES[source](labels, "qwen")
    assert labels.of("qwen", "qwen", "default-flow", 1) == ("qwen", "qwen", "default-flow", "1")
    assert labels.of("phi", "qwen", "", 0) == ("other", "qwen", "", "0")
    assert (labels.model("qwen"), labels.model("phi")) == ("qwen", "other")


def test_the_default_tenant_is_that_of_requests_without_one() -> None:
    assert label_caps.DEFAULT_FLOW == DEFAULT_FAIRNESS_ID


def test_configured_models_are_reported_whatever_clients_invent() -> None:
    labels = RequestLabels(PageRoom(100_000))
    labels.pin_rewrites([("ours", "ours-v2")])
    labels.add_served(["base", "adapter"])
    for number in range(1000):
        labels.answered(f"m{number}")
        labels.of("base", "adapter", f"tenant-{number}")
        labels.of("base", "base", f"tenant-{number}", number % 3)
    assert labels.of("ours", "ours-v2", "t", 1) == ("ours", "ours-v2", "other", "1")
    assert labels.of("adapter", "adapter") == ("adapter", "adapter", "", "0")
    assert labels.of("ours", "base") == ("other", "base", "", "0")  # a pair that no rule makes
    assert labels.model("m999") == "other"


def test_models_of_workers_are_bounded() -> None:
    """A worker may load adapters without end."""
    labels = RequestLabels()
    for number in range(3000):
        labels.add_served([f"m{number}"])
    assert sum(labels.model(f"m{number}") != "other" for number in range(3000)) == MAX_NAMES


NAMES = st.text(st.characters(), max_size=300)


@examples(100)
@given(st.lists(st.tuples(NAMES, NAMES.filter(bool)), min_size=1, max_size=60))
def test_names_of_clients_do_not_exceed_their_budget_of_the_page(
    names: list[tuple[str, str]],
) -> None:
    metrics = PickerMetrics(PageRoom(300_000))
    metrics.labels.add_served(["m"])
    flow = FlowReporter(metrics, "pool", FlowController(None, lambda: (), lambda: 0.0, metrics))
    for pair in product(("m", "", "nobody-knows"), repeat=2):
        for tenant in ("default-flow", "x" * 300):
            _count_all(metrics, flow, *pair, tenant, 0)
    before = len(metrics.render())
    for model, tenant in names:
        metrics.labels.answered(model)
        for incoming, target in ((model, model), (model, "m"), ("m", model)):
            _count_all(metrics, flow, incoming, target, tenant, 0)
    assert len(metrics.render()) < before + 300_000


def _count_all(
    metrics: PickerMetrics, flow: FlowReporter, model: str, target: str, tenant: str, priority: int
) -> None:
    labels = metrics.labels.of(model, target, tenant, priority)
    own = dict(zip(REQUEST, labels, strict=True))
    for series in metrics.series:
        names = series.declaration.labels
        if set(REQUEST) <= set(names) and not series.declaration.name.count("flow_control"):
            for other in {"streaming": ("true", "false"), "error_code": ERRORS}.get(
                names[-1], ("",)
            ):
                one = series.labels(*(own.get(name, other) for name in names))
                one.observe(0.3) if isinstance(one, Histogram) else one.inc()
    request = InferenceRequest("r", {}, ParsedBody(Api.RAW), model, target, fairness_id=tenant)
    item = QueuedRequest(request, 0, 1.0)
    for outcome in list(FlowOutcome)[1:]:
        flow.waits(labels, item)
        flow.enqueued(labels, outcome, 0.1)
        flow.ended(labels, outcome, 0.1)


def test_a_long_name_is_on_no_page() -> None:
    metrics = PickerMetrics()
    names = ["m" * 256, *(str(i) + "m" * 100_000 for i in range(10))]
    metrics.labels.add_served(names)
    rows = [metrics.labels.of(name, name, name) for name in names]
    assert rows == [(names[0], names[0], names[0], "0"), *[("other", "other", "other", "0")] * 10]
    for row in rows:
        metrics.request_total.labels(*row).inc()
    assert len(metrics.render()) < 100_000


def test_a_long_name_is_not_stored() -> None:
    class Name(str):
        __slots__ = ("__weakref__",)

    labels, name = RequestLabels(), Name("m" * 100_000)
    stored = weakref.ref(name)
    labels.of(name, name, name, 0)
    del name
    assert stored() is None


def test_labels_of_a_tenant_do_not_change() -> None:
    """A gauge must be decremented under the labels under which it was incremented."""
    labels = RequestLabels()
    labels.add_served(["m", "n"])
    asked = [("mn"[i % 2], "m", f"f{i % 901}", i % 3) for i in range(3 * MAX_LABEL_SETS)]
    first = [labels.of(*one) for one in asked]
    assert ("m", "m", "f0", "0") in first
    assert ("m", "m", "other", "1") in first
    assert [labels.of(*one) for one in asked] == first


def test_every_series_is_documented_and_nothing_else() -> None:
    metrics = PickerMetrics()
    metrics.register(PoolCollector("pool", Datastore()))
    assembly = build(default_config(), builtin_plugins(), metrics, lambda: 0.0)
    metrics.register(PluginCollector(lambda: assembly, InflightLoad(), metrics))
    exported = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    }
    written = set(SERIES_NAME.findall(METRICS_DOCUMENT.read_text()))
    assert written - {"llm_d_epp_"} == exported
