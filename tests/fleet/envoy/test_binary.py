"""The Envoy that is run, and those that are refused."""

from pathlib import Path

import pytest

from fleet.envoy.binary import (
    MINIMUM_VERSION,
    envoy_version,
    find_envoy,
    parse_version,
    require_supported,
)
from fleet.errors import FleetError


@pytest.mark.envoy
def test_the_installed_envoy_is_supported() -> None:
    require_supported(envoy_version(find_envoy()))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("envoy  version: 9e558/1.40.0/Clean/RELEASE/BoringSSL", (1, 40, 0)),
        ("envoy  version: 9e558/1.37.1-dev/Modified/DEBUG/BoringSSL", (1, 37, 1)),
    ],
)
def test_the_version_is_read_from_envoys_own_words(text: str, version: tuple) -> None:
    assert parse_version(text) == version


def test_another_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="cannot read"):
        parse_version("hello")
    with pytest.raises(FleetError, match="does not run"):
        envoy_version(tmp_path / "missing")


def test_an_old_envoy_is_refused() -> None:
    require_supported(MINIMUM_VERSION)
    with pytest.raises(FleetError, match=r"1\.37\.0 is too old, 1\.37\.1"):
        require_supported((1, 37, 0))


def test_the_environment_chooses_the_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "envoy"
    monkeypatch.setenv("POINTSMAN_ENVOY", str(binary))
    with pytest.raises(FleetError, match="not an executable"):
        find_envoy()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o700)
    assert find_envoy() == binary
