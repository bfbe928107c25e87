"""Commands find the picker of a running fleet, and not that of a fleet that has ended."""

import os
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.run.running_picker import (
    DEFAULT_PICKER,
    RunningFleet,
    picker_behind,
    picker_url,
    running_fleets,
    shown,
    which_of_several,
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def fleet_with(picker: str) -> RunningFleet:
    return RunningFleet(os.getpid(), picker)


def test_without_a_fleet_it_is_the_default(environment: dict[str, str]) -> None:
    assert picker_url(None, environment) == DEFAULT_PICKER


def test_a_running_fleet_is_found_and_forgotten_with_its_end(environment: dict[str, str]) -> None:
    with shown(fleet_with("http://127.0.0.1:8083"), environment):
        assert picker_url(None, environment) == "http://127.0.0.1:8083"
    assert picker_url(None, environment) == DEFAULT_PICKER
    assert list(Path(environment["XDG_RUNTIME_DIR"]).glob("pointsman/*")) == []


def test_a_named_picker_wins(environment: dict[str, str]) -> None:
    with shown(fleet_with("http://127.0.0.1:8083"), environment):
        assert picker_url("http://pod:9090/", environment) == "http://pod:9090"
        assert picker_url("pod:9090", environment) == "http://pod:9090"


def test_a_fleet_that_was_killed_is_not_found(environment: dict[str, str]) -> None:
    """Its file remains without a lock, and is removed."""
    folder = Path(environment["XDG_RUNTIME_DIR"]) / "pointsman"
    folder.mkdir()
    left = folder / "fleet-1.json"
    left.write_text('{"pid": 1, "picker": "http://127.0.0.1:1"}')
    assert running_fleets(environment) == []
    assert not left.exists()


def test_the_later_of_two_fleets_is_meant(environment: dict[str, str]) -> None:
    folder = Path(environment["XDG_RUNTIME_DIR"]) / "pointsman"
    with shown(fleet_with("http://127.0.0.1:2"), environment):
        mine = next(folder.iterdir())
        other = mine.with_name("fleet-0.json")
        mine.rename(other)
        os.utime(other, (1, 1))
        with shown(fleet_with("http://127.0.0.1:3"), environment):
            found = [fleet.picker for fleet in running_fleets(environment)]
            assert found == ["http://127.0.0.1:3", "http://127.0.0.1:2"]
            note = which_of_several(None, environment)
            assert note is not None
            assert note.startswith(
                "2 fleets run here; this is http://127.0.0.1:3 (others: --picker "
            )
            assert which_of_several("127.0.0.1:2", environment) is None
        assert which_of_several(None, environment) is None


def test_the_picker_behind_an_address_is_that_of_its_fleet(environment: dict[str, str]) -> None:
    """A bench gives its configurations to this picker, so it must not be another's."""
    assert picker_behind("http://127.0.0.1:81/v1", environment) == DEFAULT_PICKER
    fleet = RunningFleet(os.getpid(), "http://127.0.0.1:2", 81, url="http://127.0.0.1:80")
    with shown(fleet, environment):
        for port in (80, 81):  # of its front, and of Envoy
            assert picker_behind(f"http://127.0.0.1:{port}", environment) == fleet.picker
        with pytest.raises(FleetError, match="--picker"):
            picker_behind("http://127.0.0.1:82", environment)


def test_a_folder_that_cannot_be_made_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    environment = {"XDG_RUNTIME_DIR": str(blocked)}
    with shown(fleet_with("http://127.0.0.1:8083"), environment):
        assert picker_url(None, environment) == DEFAULT_PICKER
