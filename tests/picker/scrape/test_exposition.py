"""The targeted scan finds the samples that a general parser finds."""

import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from picker.scrape.exposition import PageSample, greatest, only, scan
from tests.depth import examples

NAMES = ["vllm:running", "vllm:running_total", "a", "x:vllm:running", "vllm:run"]
LABELS = ["model", "engine", "le", "running_lora_adapters"]
LABEL_VALUES = st.one_of(
    st.text(alphabet=[*string.ascii_letters, *'0\\"\n{},=# \t', "é", "☃"], max_size=10),
    st.just("vllm:running 3"),
)
VALUES = st.one_of(
    st.sampled_from(["0", "NaN", "nan", "+Inf", "-Inf", "inf", "-0", "1e400", "5e-324", "0x1p3"]),
    st.floats().map(repr),
    st.integers(-(2**70), 2**70).map(str),
)
BLANKS = st.sampled_from(["", " ", "  ", "\t"])
COMMENTS = st.sampled_from(
    ["", "#", "# HELP vllm:running vllm:running 7", "# TYPE vllm:running gauge", "   # a 5"]
)


def escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    labels = draw(st.dictionaries(st.sampled_from(LABELS), LABEL_VALUES, max_size=3))
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    if labels and draw(st.booleans()):
        inside += ","
    line = draw(BLANKS) + draw(st.sampled_from(NAMES))
    if labels or draw(st.booleans()):
        line += draw(st.sampled_from(["", " "])) + f"{{{inside}}}"
    line += draw(st.sampled_from([" ", "  ", "\t"])) + draw(VALUES)
    return line + draw(st.sampled_from(["", " 1700000000000", " -5", " 0"])) + draw(BLANKS)


PAGES = st.builds(
    lambda lines, times, ending: ending.join(lines * times) + ending,
    st.lists(sample_lines() | COMMENTS, max_size=12),
    st.sampled_from([1, 1, 1, 50]),
    st.sampled_from(["\n", "\n", "\r\n"]),
)


DAMAGED = st.builds(
    lambda page, at, noise: page[:at] + noise + page[at + 1 :],
    PAGES.map(str.encode),
    st.integers(0, 300),
    st.sampled_from([b'"', b"{", b"}", b"\\", b"\n", b"#", b"="]) | st.binary(max_size=3),
)


def oracle(page: str, name: str) -> list[tuple[dict[str, str], float, float | None]] | None:
    """Return what the general parser finds, or None for a page that it refuses as a whole."""
    try:
        families = list(text_string_to_metric_families(page))
    except (ValueError, IndexError, KeyError):
        return None
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, float(sample.value), sample.timestamp) for sample in found]


def same(value: float, other: float) -> bool:
    return value == other or (math.isnan(value) and math.isnan(other))


@examples(150)
@given(page=PAGES, name=st.sampled_from(NAMES))
def test_the_scan_agrees_with_the_general_parser(page: str, name: str) -> None:
    found = scan(page.encode(), [name]).get(name, ())
    expected = oracle(page, name)
    if expected is None:
        return
    assert len(found) == len(expected)
    for sample, (labels, value, timestamp) in zip(found, expected, strict=True):
        assert dict(sample.labels) == labels
        assert same(sample.value, value)
        seconds = None if sample.timestamp_ms is None else sample.timestamp_ms / 1000
        assert seconds == timestamp
    best = greatest(page.encode(), name)
    numbers = [value for _, value, _ in expected if not math.isnan(value)]
    assert (best.value if best else None) == max(numbers, default=None)


@examples(100)
@given(page=PAGES, names=st.sets(st.sampled_from(NAMES)))
def test_the_lines_of_some_series_contain_all_their_samples(page: str, names: set[str]) -> None:
    lines = page.encode().splitlines(keepends=True)
    whole = only(page.encode(), names)
    expected = repr(scan(page.encode(), sorted(names)))
    assert repr(scan(whole, sorted(names))) == expected
    sliced = b"".join(only(line, names) for line in lines)
    assert repr(scan(sliced, sorted(names))) == expected


@examples(100)
@given(page=st.binary(max_size=200) | DAMAGED, tail=st.binary(max_size=60))
def test_no_bytes_make_the_scan_raise(page: bytes, tail: bytes) -> None:
    for sample in scan(page + b"\nvllm:running" + tail, ["vllm:running"]).get("vllm:running", ()):
        assert isinstance(sample, PageSample)
    greatest(page + tail, "vllm:running")
    whole = scan(page + tail + b"\nlast 7\n", ["last"])["last"]
    assert whole[-1].value == 7


@pytest.mark.parametrize(
    "line",
    [
        "load",
        "load ",
        "load x",
        "load 1_000",
        "load 1 2 3",
        'load{a="b" 1',
        'load{a="b} 1',
        "load{a=b} 1",
        'load{="b"} 1',
        "load 1 1.5",
        "load_total 1",
        "# load 1",
        "my_load 1",
    ],
)
def test_a_line_that_is_not_a_sample_of_the_name_is_skipped(line: str) -> None:
    assert scan(line.encode() + b"\nload 7\n", ["load"]) == {"load": (PageSample({}, 7.0),)}


def test_only_wanted_series_that_exist_are_returned() -> None:
    page = b'a{x="1"}\t5 # {trace="z"} 1 2\r\n  b  6\nc 7'
    assert scan(page, ["a", "b", "missing"]) == {
        "a": (PageSample({"x": "1"}, 5.0),),
        "b": (PageSample({}, 6.0),),
    }
