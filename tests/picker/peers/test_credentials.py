"""The folder of the replicas' certificates."""

from pathlib import Path

import pytest

from picker.errors import ConfigError
from picker.peers.credentials import PeerCredentials
from tests.support.certificates import certificates


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_folder_with_a_missing_or_unusable_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = certificates(tmp_path)
    (folder / name).write_text("no certificate")
    with pytest.raises(ConfigError, match=name):
        PeerCredentials(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        PeerCredentials(folder)


def test_credentials_survive_the_replacement_of_files(tmp_path: Path) -> None:
    folder = certificates(tmp_path)
    credentials = PeerCredentials(folder)
    (folder / "tls.key").unlink()
    assert credentials.of_client() is not None
    assert credentials.of_server() is not None
