"""Lines of a recording: whatever is written is read back as it was."""

from __future__ import annotations

import math
import types
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.recording import lines
from picker.recording.lines import AnyLine, decoded, encoded
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
    """Any value of a struct, made from what its fields are declared to hold."""
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
        # A text among structs is the one word that stands for some.
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
def test_every_kind_of_line_comes_back_as_it_was(kind: type[msgspec.Struct]) -> None:
    """Encoding and decoding again is identity."""

    @examples(60)
    @given(of(kind))
    def holds(line: typing.Any) -> None:
        text = encoded(line)
        assert text.endswith(b"\n")
        assert text.count(b"\n") == 1
        assert decoded(text) == line

    holds()


@given(FLOATS)
def test_floats_keep_every_bit(value: float) -> None:
    """A time comes back as the same float, the sign of zero included."""
    back = decoded(encoded(lines.Stop("ended", value)))
    assert isinstance(back, lines.Stop)
    assert back.at == value
    assert math.copysign(1.0, back.at) == math.copysign(1.0, value)


def test_metrics_and_usage_are_read_as_the_picker_has_them() -> None:
    """Sets and tuples of nested values keep their types."""
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


def test_what_json_cannot_hold_is_refused() -> None:
    """A value of an unknown type raises instead of being written as something else."""
    with pytest.raises(TypeError, match="object cannot be recorded"):
        encoded(
            lines.DecisionLine(
                1, 0, 0.0, 0, lines.RequestLine("r", "raw", {}, 0.0), findings={"a/b": object()}
            )
        )
