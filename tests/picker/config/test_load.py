"""Loading never fails in any other way than with a reason; the golden cases hold the reasons."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.config.build import DEFAULT_CONFIG, build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import MAX_CONFIG_BYTES, load_config
from picker.errors import ConfigError
from picker.metrics import PickerMetrics

LINES = DEFAULT_CONFIG.decode().splitlines()
NOISE = st.sampled_from(["- &a [*a]", "a: &x {b: *x}", "{", "plugins: 5", "? [a]: b", "!!set {a}"])
EDITS = st.lists(
    st.tuples(st.integers(0, len(LINES)), st.one_of(NOISE, st.text(max_size=12))), max_size=4
)


@settings(max_examples=150, deadline=None)
@given(edits=EDITS)
def test_a_mangled_configuration_is_refused_or_built(edits: list[tuple[int, str]]) -> None:
    """Whatever somebody writes between its lines."""
    lines = list(LINES)
    for position, text in edits:
        lines.insert(position, text)
    said = ""
    try:
        content = "\n".join(lines).encode(errors="surrogatepass")
        build(load_config(content, "f"), builtin_plugins(), PickerMetrics(), lambda: 0.0)
    except ConfigError as error:
        said = str(error)
    assert not said or said.startswith("f:")


@pytest.mark.parametrize("content", [b"\xff\xff", b"a: \x00", b"x" * (MAX_CONFIG_BYTES + 1)])
def test_bytes_that_are_no_text_are_refused(content: bytes) -> None:
    """Also too many of them."""
    with pytest.raises(ConfigError, match="f: "):
        load_config(content, "f")


def test_the_built_in_configuration_has_the_reference_weights() -> None:
    """Queue 2, KV cache 2, prefix 3."""
    assembly = build(default_config(), builtin_plugins(), PickerMetrics(), lambda: 0.0)
    scorers = assembly.profiles["default"].scorers
    assert [weighted.weight for weighted in scorers] == [2.0, 2.0, 3.0]
    assert assembly.warnings == ()
