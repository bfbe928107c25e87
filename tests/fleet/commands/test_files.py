"""The files of deploy/ for a user without a clone."""

from pathlib import Path

import pytest

from fleet.commands.cli import main
from fleet.commands.files import FOLDERS, known

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["files"]) == 0
    there = [
        str(path.relative_to(DEPLOY)) for folder in FOLDERS for path in (DEPLOY / folder).iterdir()
    ]
    assert capsys.readouterr().out.splitlines() == sorted(there) == known()


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (["envoy/override-host.yaml"], ["envoy/override-host.yaml"]),
        (["systemd"], ["systemd/pointsman-picker.service", "systemd/pointsman-worker.service"]),
        (
            ["prometheus/", "grafana"],
            ["prometheus/rules.yaml", "grafana/picker.json", "grafana/worker.json"],
        ),
    ],
)
def test_files_are_written_as_they_are(
    names: list[str], written: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "new" / "folder"
    assert main(["files", *names, "--into", str(into)]) == 0
    paths = [into / Path(one).name for one in written]
    assert capsys.readouterr().out.split() == [str(one) for one in paths]
    for path, name in zip(paths, written, strict=True):
        assert path.read_bytes() == (DEPLOY / name).read_bytes()
    assert len(list(into.iterdir())) == len(written)


def test_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.json").write_text("mine")
    assert main(["files", "grafana"]) == 1
    assert "worker.json is there already" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_target_that_is_no_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    assert main(["files", "grafana", "--into", str(tmp_path / "notes")]) == 1
    assert "notes is not a folder: give another with --into" in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "mine"
