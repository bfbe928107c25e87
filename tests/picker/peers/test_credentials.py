"""The folder that replicas' certificates are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from picker.errors import ConfigError
from picker.peers.credentials import PeerCredentials
from tests.support.certificates import certificates


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_folder_without_one_of_its_files_is_refused(tmp_path: Path, name: str) -> None:
    """Or with something else in it."""
    folder = certificates(tmp_path)
    (folder / name).write_text("no certificate")
    with pytest.raises(ConfigError, match=name):
        PeerCredentials(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        PeerCredentials(folder)


def test_what_cannot_be_read_for_a_moment_is_as_before(tmp_path: Path) -> None:
    """While files are replaced."""
    folder = certificates(tmp_path)
    credentials = PeerCredentials(folder)
    (folder / "tls.key").unlink()
    assert credentials.of_client() is not None
    assert credentials.of_server() is not None
