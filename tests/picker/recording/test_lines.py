"""Lines of a recording survive a round trip; an invalid line is refused with its number."""

import math
import types
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.recording import lines
from picker.recording.lines import (
    AnyLine,
    Header,
    RecordingError,
    Stop,
    decoded,
    encoded,
    read_recording,
)
from picker.types import Endpoint, EndpointMetrics, MultiModalFeature, Usage
from tests.depth import examples

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = st.one_of(FLOATS, st.sampled_from(["nan", "inf", "-inf"]))
VALUES = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
LINE_TYPES = typing.get_args(AnyLine)


def of(kind: type[msgspec.Struct]) -> st.SearchStrategy[typing.Any]:
    hints = typing.get_type_hints(kind)
    names = [name for name in kind.__struct_fields__ if name != "key" or kind is not Endpoint]
    return st.builds(kind, **{name: _field(hints[name]) for name in names})


def _field(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    simple = {
        str: TEXTS,
        int: INTS,
        float: FLOATS,
        bool: st.booleans(),
        bytes: st.binary(max_size=9),
        type(None): st.none(),
        typing.Any: VALUES,
        msgspec.UnsetType: st.just(msgspec.UNSET),
    }
    if hint in simple:
        return simple[hint]
    if hint == lines.Number:
        return NUMBERS
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        # A text in a union with structs is the word "last".
        has_struct = any(isinstance(arg, type) and issubclass(arg, msgspec.Struct) for arg in args)
        return st.one_of(
            [st.just("last") if arg is str and has_struct else _field(arg) for arg in args]
        )
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(_field(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_field, args))
    if origin is frozenset:
        return st.frozensets(_field(args[0]), max_size=3)
    if origin is dict or str(origin).endswith("Mapping'>"):
        return st.dictionaries(TEXTS, _field(args[1]), max_size=3)
    if hint is MultiModalFeature:
        return st.builds(MultiModalFeature, TEXTS, TEXTS, INTS, INTS)
    return of(hint)


@pytest.mark.parametrize("kind", LINE_TYPES, ids=lambda kind: kind.__name__)
def test_every_kind_of_line_survives_a_round_trip(kind: type[msgspec.Struct]) -> None:

    @examples(60)
    @given(of(kind))
    def holds(line: typing.Any) -> None:
        text = encoded(line)
        assert text.endswith(b"\n")
        assert text.count(b"\n") == 1
        assert decoded(text) == line

    holds()


@given(FLOATS)
def test_floats_are_exact(value: float) -> None:
    back = decoded(encoded(lines.Stop("ended", value)))
    assert isinstance(back, lines.Stop)
    assert back.at == value
    assert math.copysign(1.0, back.at) == math.copysign(1.0, value)


def test_nested_values_have_their_types_after_a_round_trip() -> None:
    metrics = EndpointMetrics(
        3, 4, 0.25, 16, 100, 7.0, frozenset("ab"), frozenset("c"), 2, 1.5, 0.1
    )
    change = lines.CandidateChange("default/a", metrics=metrics)
    back = msgspec.json.decode(msgspec.json.encode(change), type=lines.CandidateChange)
    assert back.metrics == metrics
    assert isinstance(back.metrics, EndpointMetrics)
    assert type(back.metrics.active_models) is frozenset
    end = lines.End(1, "r", "completed", 2.0, Usage(1, 2, 3, None))
    assert decoded(encoded(end)) == end


def test_a_value_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be recorded"):
        encoded(
            lines.DecisionLine(
                1, 0, 0.0, 0, lines.RequestLine("r", "raw", {}, 0.0), findings={"a/b": object()}
            )
        )


HEADER = Header(1, "0", "pool", "c.yaml", "kind: x", 7, True, 1.0, 2.0)
FIRST, LAST = encoded(HEADER), encoded(Stop("ended", 3.0))


def read(path: Path, content: bytes) -> list[object]:
    path.write_bytes(content)
    return [one.line for one in read_recording(path)]


def test_a_half_written_last_line_is_tolerated(tmp_path: Path) -> None:
    for cut in range(1, len(LAST) - 1):
        assert read(tmp_path / "r", FIRST + LAST[:cut]) == [HEADER, None]
    assert read(tmp_path / "r", FIRST + LAST[:-1]) == [HEADER, Stop("ended", 3.0)]


def test_only_another_run_may_follow_a_half_written_line(tmp_path: Path) -> None:
    torn = LAST[:9] + b"\n"
    assert read(tmp_path / "r", FIRST + torn + FIRST) == [HEADER, None, HEADER]
    with pytest.raises(RecordingError, match=r"r:2: no line of a recording"):
        read(tmp_path / "r", FIRST + torn + LAST)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", r"r: empty, no recording"),
        (b"hello\n", r"r:1: no recording"),
        (LAST, r"r:1: no recording: it does not begin with a header"),
        (FIRST[:20], r"r:1: no recording"),
        (FIRST + b"\n" + LAST, r"r:2: no line of a recording"),
        (FIRST + b'{"line":"stop","reason":1,"at":2}\n' + LAST, r"r:2: .*\$\.reason"),
        (FIRST + b'{"line":"other"}\n' + LAST, r"r:2: no line of a recording: .*'other'"),
        (FIRST + b"\xff\xfe\n" + LAST, r"r:2: no line"),
        (FIRST + b"[" * 100_000 + b"\n" + LAST, r"r:2: no line"),
        (FIRST.replace(b'"format_version":1', b'"format_version":2'), r"r:1: format 2, .* reads 1"),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(RecordingError, match=why):
        read(tmp_path / "r", content)


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="No such file"):
        list(read_recording(tmp_path / "missing"))
    with pytest.raises(RecordingError, match="directory"):
        list(read_recording(tmp_path))
