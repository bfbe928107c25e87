"""Plugin types are found in the files of a package."""

from pathlib import Path

import pytest

from picker.config.catalog import modules_of
from picker.errors import ConfigError

ROW = """
from picker.framework.registry import PluginType

{name} = {rows}
"""
ONE = "PluginType('{}', object)"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"plugins_{abs(hash(request.node.nodeid))}"
    folder = tmp_path / name / "kind"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(folder)
    return name


def names(package: str) -> list[str]:
    return [row.name for _, rows in modules_of(package) for row in rows]


def test_a_file_defines_the_type_of_its_name_or_several(package: str) -> None:
    Path("my_type.py").write_text(ROW.format(name="PLUGIN", rows=ONE.format("my-type")))
    several = f"({ONE.format('a')}, {ONE.format('b')})"
    Path("subject.py").write_text(ROW.format(name="PLUGINS", rows=several))
    Path("_helper.py").write_text("raise AssertionError\n")
    assert names(package) == ["my-type", "a", "b"]


@pytest.mark.parametrize("text", ["", ROW.format(name="PLUGIN", rows=ONE.format("other"))])
def test_a_file_without_its_type_is_an_error(package: str, text: str) -> None:
    Path("my_type.py").write_text(text)
    with pytest.raises(ConfigError, match=r"kind\.my_type must define PLUGIN.*'my-type'"):
        names(package)


def test_a_package_that_does_not_exist_has_no_types() -> None:
    assert names("no_such_package") == []
