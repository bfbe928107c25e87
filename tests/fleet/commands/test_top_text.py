"""Numbers and texts in cells of a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fleet.commands.top_text import ASCII, Glyphs, bar, cell, clean, rate, seconds, size, sparkline
from tests.depth import examples

GLYPHS = Glyphs()


@examples(200)
@given(st.text(max_size=40), st.integers(0, 30), st.booleans())
def test_a_cell_has_its_width_for_any_text(text: str, width: int, is_ascii: bool) -> None:
    made = cell(text, width, ASCII if is_ascii else GLYPHS)
    assert cell_len(made) == width
    assert made.isprintable()
    assert made.isascii() or not is_ascii


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\x07", "\x9b31m", "\u202egnp", "\u200b\x00"])
def test_control_characters_are_removed(text: str) -> None:
    assert not set(clean(text, GLYPHS)) & {"\x1b", "\n", "\x07", "\x9b", "\u202e", "\u200b", "\x00"}


def test_cut_text_is_marked() -> None:
    assert cell("worker-12345", 8, GLYPHS) == "worker-…"
    assert cell("worker-12345", 8, ASCII) == "worker-~"
    assert cell("7", 4, GLYPHS, right=True) == "   7"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.000_21, "210us"),
        (0.000_002, "2.0us"),
        (0.0081, "8.1ms"),
        (0.081, "81ms"),
        (1.44, "1.4s"),
        (14.4, "14s"),
        (1440, "1440s"),
        (40_000, "11h"),
    ],
)
def test_spans_of_time_are_short(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_other_numbers_are_short() -> None:
    assert [rate(value) for value in (None, 0.25, 12.34, 1234.5)] == ["-", "0.2", "12.3", "1234"]
    assert [size(value) for value in (0, 999, 52_300, 1_500_000)] == [
        "0 B",
        "999 B",
        "52 kB",
        "1.5 MB",
    ]
    assert bar(0.5, 4, GLYPHS) == "██░░"
    assert bar(7.0, 4, GLYPHS) == "████"
    assert sparkline((0, None, 5, 10), 10, 6, GLYPHS) == "  ▁ ▅█"
    assert sparkline((0, None, 5, 10), 10, 2, GLYPHS) == "▅█"
