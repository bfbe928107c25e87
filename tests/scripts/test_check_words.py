"""The words check finds each kind of unwanted English, and only that."""

from pathlib import Path

import pytest

from scripts.check_words import findings


def found(folder: Path, name: str, text: str) -> list[str]:
    path = folder / name
    path.write_text(text)
    return [line.removeprefix(f"{path}:") for line in findings(path)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""What a scorer needs to know."""\n', "1: docstring of part opens with 'What'"),
        ('def f():\n    """Of each row the sum."""\n', "2: docstring of f opens with 'Of'"),
        ('def f():\n    """The f."""\n', "2: docstring of f repeats its name"),
        ("x = 1\n# Nobody waits here.\n", "2: 'Nobody'"),
        ('x = f("the queue goes on without it")\n', "1: 'goes on'"),
        ("MOST_ROWS = 1\n", "1: name MOST_ROWS"),
        ("def f(kept_rows):\n    return 1\n", "1: name kept_rows"),
        ("class ToldRows:\n    x = 1\n", "1: name ToldRows"),
        ("self.rows_heard = 1\n", "1: name rows_heard"),
        ("def test_who_leaves():\n    pass\n", "1: name test_who_leaves"),
    ],
)
def test_each_kind_is_found_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    [line] = found(tmp_path, "part.py", text)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    "text",
    [
        '"""Ofcourse is no opening: the pattern wants a whole word."""\n',
        '"""The field `kept` of the wire: code is not read."""\n',
        'PATTERN = "told"\n',
        "ALMOST_FULL = barely = 1\n",
        "# It stands for the whole pool.\n",
        "class Walk(NodeVisitor):\n    def visit_Name(self, node):\n        pass\n",
    ],
)
def test_good_text_is_no_finding(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, "part.py", text) == []


def test_fenced_code_of_a_page_is_not_read(tmp_path: Path) -> None:
    page = "# Page\n\n```\nnobody\n```\n\nThe picker was told.\n"
    assert found(tmp_path, "page.md", page) == ["7: 'told': report, publish, notify, say"]
