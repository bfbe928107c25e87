"""Configurations are written into the file of a picker, and removed again."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.bench.picker_config import FollowedConfig
from fleet.errors import FleetError
from fleet.http_client import ConnectError, HttpAnswer
from fleet.picker_views import PickerViews
from picker.admin.views import ConfigView

pytestmark = pytest.mark.looptime


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file of a picker, which is as before at the end."""
    file = tmp_path / "live.yaml"
    file.write_text("original")
    yield file
    assert file.read_text() == "original"


def picker(path: Path, takes: Callable[[str], bool] = lambda _: True) -> Callable[[], ConfigView]:
    """A picker that reads its file at every second look, and reports why it rejects one."""
    used, looks = [path.read_text() if path.exists() else "built in"], [0]

    def look() -> ConfigView:
        looks[0] += 1
        written = path.read_text() if path.exists() else used[0]
        if looks[0] % 2 == 0 and takes(written):
            used[0] = written
        problem = None if takes(written) else "unknown plugin"
        return ConfigView(str(path), used[0], "", 0.0, (), problem)

    return look


async def test_each_is_in_use_at_its_turn_and_the_first_is_put_back(path: Path) -> None:
    look = picker(path)
    with FollowedConfig(look) as followed:
        for text in (b"a", b"b", b"b", b"a"):
            await followed.use(text, "x.yaml")
            assert look().written == text.decode()
    assert os.listdir(path.parent) == ["live.yaml"]


async def test_a_rejected_configuration_ends_the_comparison(path: Path) -> None:
    with (
        pytest.raises(FleetError, match=r"the picker rejects x.yaml: unknown plugin"),
        FollowedConfig(picker(path, lambda text: text != "bad")) as followed,
    ):
        await followed.use(b"bad", "x.yaml")


async def test_a_file_that_cannot_be_written_is_one_sentence(path: Path) -> None:
    (path.parent / ".live.yaml.bench").mkdir()
    with (
        pytest.raises(FleetError, match=r"cannot write the picker's file .*live.yaml: "),
        FollowedConfig(picker(path)) as followed,
    ):
        await followed.use(b"a", "x.yaml")


async def test_a_picker_that_follows_nothing_is_not_waited_for_forever(path: Path) -> None:
    frozen = picker(path)()
    with (
        pytest.raises(FleetError, match=r"has not taken x.yaml in 10 s"),
        FollowedConfig(lambda: frozen) as followed,
    ):
        await followed.use(b"a", "x.yaml")


@pytest.mark.parametrize("content", [None, "another"])
def test_only_the_file_that_the_picker_has_is_written(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "live.yaml"
    frozen = ConfigView(str(path), "original", "", 0.0)
    if content is not None:
        path.write_text(content)
    with pytest.raises(FleetError, match="--compare needs a picker that follows a file"):
        FollowedConfig(lambda: frozen)
    assert [one.read_text() for one in tmp_path.iterdir()] == ([content] if content else [])


@pytest.mark.parametrize("content", [None, b"<html>", b"{}"])
def test_another_server_gets_the_needs_of_a_comparison_as_its_error(content: bytes | None) -> None:
    def fetch(_: str) -> HttpAnswer:
        if content is None:
            raise ConnectError("refused")
        return HttpAnswer(200 if content == b"{}" else 404, content)

    views = PickerViews("http://127.0.0.1:1", fetch)
    with pytest.raises(FleetError) as caught:
        FollowedConfig(views.config)
    assert "http://127.0.0.1:1" in str(caught.value)
    assert "`pointsman up --config /a/path.yaml`" in str(caught.value)
    assert "--picker" in str(caught.value)
