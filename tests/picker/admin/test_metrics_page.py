"""The metrics page: several pools on one page, and cached gauges."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from base.series import Computed, Declaration
from picker.admin.answers import Turns
from picker.admin.metrics_page import LABEL, RememberedCollector, merged, of_pool, whole
from picker.metrics.picker_metrics import PickerMetrics
from tests.depth import by_depth, examples
from tests.support.picker.admin_scene import other_task
from tests.support.picker.configured_requests import routing
from tests.support.picker.pools_port import asked, whole_pools

Sample = tuple[str, frozenset[tuple[str, str]], float]
KEYS = ("llama", "research/mixtral", "sales/mixtral")
ODD = (
    'a"b',
    "a\\",
    "a\nb",
    "a,b",
    "{a}",
    "} 7",
    "a b",
    'inference_pool="x"',
    "inference_pool=",
    ",inference_pool=",
    '",inference_pool="',
    "# HELP x y",
    "\n# TYPE llm_d_epp_info counter\n",
    *(f"a{space}b" for space in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"),
    "ü",
    "",
)


class _Computed:
    def __init__(self, value: str) -> None:
        self._value = value

    def collect(self) -> Iterator[Computed]:
        declaration = Declaration("llm_d_epp_computed", "One.", ("name",))
        yield Computed(declaration, lambda: (((self._value,), 3),))


def _busy(model: str, pool: str, count: int = 1) -> PickerMetrics:
    metrics = PickerMetrics()
    metrics.labels.add_served([model])
    labels = metrics.labels.of(model, model, "tenant", 1)
    metrics.request_total.labels(*labels).inc(count)
    metrics.request_running.labels(*labels).set(count)
    for value in (0.001, 0.3, 1e9):
        metrics.request_duration_seconds.labels(*labels).observe(value)
    metrics.flow.pool_saturation.labels(pool, "s").set(0.5)
    metrics.discovery_errors_total.inc(count)
    metrics.register(_Computed(model))
    return metrics


def _page(process: PickerMetrics, pools: Mapping[str, PickerMetrics]) -> bytes:
    return asyncio.run(merged(process, pools, Turns()))


def _samples(page: bytes) -> list[Sample]:
    families = text_string_to_metric_families(page.decode())
    return [
        (one.name, frozenset(one.labels.items()), one.value)
        for family in families
        for one in family.samples
    ]


def _with_label(samples: list[Sample], key: str) -> list[Sample]:
    return [
        (name, labels if LABEL in dict(labels) else labels | {(LABEL, key)}, value)
        for name, labels, value in samples
    ]


def _check_form(page: bytes) -> None:
    text = page.decode()
    assert text.endswith("\n")
    family, declared, finished = "", Counter[str](), set()
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            kind, name = line.split(" ")[1:3]
            declared[f"{kind} {name}"] += 1
            if name != family:
                assert name not in finished, f"{name} is in two places"
                finished.add(family)
                family = name
            continue
        name = line.partition("{")[0].partition(" ")[0]
        assert name in {family, *(f"{family}_{end}" for end in ("bucket", "count", "sum"))}, line
    assert set(declared.values()) == {1}
    names = {one.partition(" ")[2] for one in declared}
    assert declared.keys() == {f"{kind} {name}" for kind in ("HELP", "TYPE") for name in names}


def _check_histograms(page: bytes) -> None:
    lines: dict[tuple[str, frozenset[tuple[str, str]]], list[tuple[float, float]]] = {}
    counts = {}
    previous = None
    for name, labels, value in _samples(page):
        own = dict(labels)
        le = own.pop("le", None)
        place = name.removesuffix("_bucket"), frozenset(own.items())
        if le is not None:
            assert place == previous or place not in lines
            lines.setdefault(place, []).append((float(le), value))
        elif name.endswith("_count"):
            counts[name.removesuffix("_count"), labels] = value
        previous = place
    assert lines
    for place, buckets in lines.items():
        assert buckets == sorted(buckets)
        values = [value for _, value in buckets]
        assert values == sorted(values)
        assert buckets[-1] == (float("inf"), counts[place])


@pytest.mark.full
@pytest.mark.parametrize("model", ODD)
def test_names_of_clients_affect_only_their_label(model: str) -> None:
    pools = {key: _busy(model, key) for key in KEYS}
    page = _page(PickerMetrics(), pools)
    _check_form(page)
    _check_histograms(page)
    samples = Counter(_samples(page))
    assert set(samples.values()) == {1}
    for key, metrics in pools.items():
        own = _with_label(_samples(metrics.render(of_pool(metrics))), key)
        assert own
        assert Counter(own) <= samples


# Any character that can be encoded, and more often those above.
MODELS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.lists(st.sampled_from([*ODD, '"', "\\", "=", LABEL]), max_size=6).map("".join),
)


@examples(40)
@given(
    st.dictionaries(st.sampled_from(KEYS), st.tuples(MODELS, st.integers(1, 9)), min_size=1),
    st.integers(0, 9),
)
def test_the_page_has_exactly_the_samples_of_the_single_pages(
    counted: dict[str, tuple[str, int]], refused: int
) -> None:
    process = PickerMetrics()
    process.unknown_pool_total.inc(refused)
    pools = {key: _busy(model, key, count) for key, (model, count) in counted.items()}
    page = _page(process, pools)
    _check_form(page)
    expected = _samples(process.render(process.of_process))
    for key, metrics in pools.items():
        expected += _with_label(_samples(metrics.render(of_pool(metrics))), key)
    found = _samples(page)
    assert Counter(found) == Counter(expected)
    assert len({sample[:2] for sample in found}) == len(found)


def test_series_of_the_process_appear_once_and_without_a_pool() -> None:
    process, pools = PickerMetrics(), {key: _busy("m", key) for key in KEYS}
    process.info.labels("", "1").set(1)
    process.unknown_pool_total.inc(7)
    lines = _page(process, pools).decode().splitlines()
    assert lines.count("pointsman_unknown_pool_total 7.0") == 1
    assert sum(line.startswith("pointsman_unknown_pool_total") for line in lines) == 1
    assert sum(line.startswith("llm_d_epp_info{") for line in lines) == 1
    for metrics in pools.values():
        assert b"pointsman_unknown_pool_total" not in metrics.render(of_pool(metrics))


def test_a_series_with_a_pool_label_gets_no_other() -> None:
    """Flow control labels its series itself; a second label would make the page invalid."""
    page = _page(PickerMetrics(), {"llama": _busy("m", "as-it-was")}).decode()
    (line,) = [one for one in page.splitlines() if one.startswith("llm_d_epp_flow_control_pool_s")]
    assert (
        line == 'llm_d_epp_flow_control_pool_saturation{inference_pool="as-it-was",stage="s"} 0.5'
    )


def test_samples_without_labels_get_one_and_empty_series_have_only_a_type() -> None:
    lines = _page(PickerMetrics(), {"a": _busy("m", "a", 2), "b": PickerMetrics()}).splitlines()
    assert b'pointsman_discovery_errors_total{inference_pool="a"} 2.0' in lines
    assert b'pointsman_discovery_errors_total{inference_pool="b"} 0.0' in lines
    assert lines.count(b"# TYPE llm_d_epp_request_total counter") == 1
    assert not [
        line for line in lines if line.startswith(b'llm_d_epp_request_total{inference_pool="b')
    ]


async def test_the_page_yields_to_other_tasks_after_each_pool() -> None:
    pools = {str(number): PickerMetrics() for number in range(8)}
    async with other_task() as turns:
        await merged(PickerMetrics(), pools, Turns())
    assert len(turns) >= 8


async def test_the_page_of_a_whole_picker_is_the_sum_of_its_pools_pages(tmp_path: Path) -> None:
    pools = {"here/qwen": {"one": 1}, "there/qwen": {"two": 2}, "here/llama": {"three": 3}}
    async with whole_pools(tmp_path, pools) as whole:
        for number, key in enumerate(("here/qwen", "there/qwen", "there/qwen")):
            await whole.ask(key, f"r-{number}")
        page = (await asked(whole.url, "/metrics")).body
        _check_form(page)
        _check_histograms(page)
        found = _samples(page)
        assert len({sample[:2] for sample in found}) == len(found)
        routed = {
            dict(labels)[LABEL]: value
            for name, labels, value in found
            if name == "llm_d_epp_request_total"
        }
        assert routed == {"here/qwen": 1, "there/qwen": 2}
        of_pools = {sample[:2] for sample in found if LABEL in dict(sample[1])}
        single: list[Sample] = []
        for key in ("here/qwen", "there/qwen", "llama"):
            single += _with_label(
                _samples((await asked(whole.url, f"/pools/{key}/metrics")).body), key
            )
        assert {sample[:2] for sample in single} == of_pools


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> Iterator[Computed]:
        self.asked += 1
        yield Computed(Declaration("x", ""), lambda: ())


@pytest.mark.parametrize(
    ("interval_seconds", "calls"),
    [(5.0, [(10.0, 1), (14.9, 1), (15.0, 2), (16.0, 2), (30.0, 3)]), (0.0, [(1.0, 1), (1.0, 2)])],
)
def test_gauges_are_cached_for_the_interval(
    interval_seconds: float, calls: list[tuple[float, int]]
) -> None:
    now = [0.0]
    inner = Counting()
    collector = RememberedCollector(inner, interval_seconds, lambda: now[0])
    for moment, times in calls:
        now[0] = moment
        assert len(list(collector.collect())) == 1
        assert inner.asked == times


async def test_invented_names_neither_grow_the_page_nor_delay_requests() -> None:
    house = routing("plugins: [{type: active-request-scorer}, {type: prefix-cache-scorer}]\n")
    for number in range(by_depth(400, 30_000)):
        body = {"model": f"model-{number // 4}" if number % 2 else "m", "prompt": f"{number}"}
        named = {
            "x_llm_d_inference_fairness_id": f"tenant-{number}",
            "x_llm_d_inference_objective": f"objective-{number}",
            f"x_header_{number}": "value",
        }
        exchange, decision = await house.route(body, **named)
        usage = b'{"usage":{"prompt_tokens":9,"completion_tokens":3}}'
        house.answer(exchange, decision, usage)
    pieces = [b"".join(map(str.encode, lines)) for lines in house.metrics.pieces()]
    assert len(b"".join(pieces)) < 1_500_000
    assert max(map(len, pieces)) < 200 * 400  # bytes of 200 lines
    models = {labels[0] for labels, _ in house.metrics.request_total.numbers()}
    assert {"m", "other"} < models
    async with other_task() as turns:
        assert await whole(house.metrics, None, Turns()) == b"".join(pieces)
    assert len(turns) >= len(pieces)
