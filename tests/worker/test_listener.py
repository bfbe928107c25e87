"""The worker's socket is bound early, announced as a URL, and cleaned up."""

import socket
from pathlib import Path

import pytest

from worker.config import ApiConfig, EngineConfig, ServeConfig
from worker.errors import ConfigError
from worker.listener import bind, bound, is_exposed, shown


def unix(path: Path) -> ServeConfig:
    api = ApiConfig(("m",), 100, 100)
    return ServeConfig("127.0.0.1", 0, api, EngineConfig("sim", None), uds=str(path))


def test_a_unix_socket_is_removed_with_the_worker(short_path: Path) -> None:
    path = short_path / "worker.sock"
    with bound(unix(path)) as listener:
        assert path.is_socket()
        assert shown(listener, tls=False) == f"unix:{path}"
        assert not is_exposed(listener)
    assert not path.exists()


def test_only_the_socket_of_a_dead_worker_is_replaced(short_path: Path) -> None:
    path = short_path / "worker.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with bound(unix(path)) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="--uds"), bound(unix(path)):
            pass
        assert path.is_socket()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="--uds"), bound(unix(path)):
        pass
    assert path.read_text() == "precious"


def test_a_worker_that_does_not_listen_yet_holds_its_socket(short_path: Path) -> None:
    """It looks dead, but a second worker is refused and removes nothing."""
    path = short_path / "worker.sock"
    with bound(unix(path)) as listener:
        before = path.stat().st_ino
        with pytest.raises(ConfigError, match="another worker"), bound(unix(path)):
            pass
        assert path.stat().st_ino == before
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert list(short_path.iterdir()) == []
    with bound(unix(path)):
        assert path.is_socket()


def test_a_worker_removes_only_its_own_socket(short_path: Path) -> None:
    path = short_path / "worker.sock"
    with bound(unix(path)), socket.socket(socket.AF_UNIX) as other:
        path.rename(short_path / "moved.sock")
        other.bind(str(path))
    assert path.is_socket()


@pytest.mark.parametrize(
    ("host", "url", "exposed"),
    [("127.0.0.1", "http://127.0.0.1:", False), ("0.0.0.0", "http://0.0.0.0:", True)],
)
def test_an_address_has_a_url_and_an_exposure(host: str, url: str, exposed: bool) -> None:
    with bind(host, 0) as listener:
        assert shown(listener, tls=False).startswith(url)
        assert shown(listener, tls=True).startswith("https" + url.removeprefix("http"))
        assert is_exposed(listener) is exposed


def test_an_ipv6_address_has_brackets_in_a_url(ipv6: str) -> None:
    with bind(ipv6, 0) as listener:
        assert shown(listener, tls=False).startswith("http://[::1]:")
        assert not is_exposed(listener)


def test_an_unknown_host_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)
