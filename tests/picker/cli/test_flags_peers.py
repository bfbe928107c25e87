"""The flags of peers."""

from pathlib import Path

import pytest

from picker.app.in_use import hash_seed_of
from picker.cli.flags import build_parser, options_of
from picker.cli.options import Options, PeerFlags
from picker.errors import ConfigError
from picker.peers.discovery import PeerName


def parsed(*argv: str) -> Options:
    return options_of(build_parser().parse_args([*argv]))


def test_there_are_no_peers_without_flags() -> None:
    assert parsed().peers is None
    assert parsed("--peers=", "--peer-service=", "--peer-cert-path=").peers is None


def test_peers_are_named_one_by_one_or_by_a_service() -> None:
    flags = parsed("--peers", "a:1, b:2", "--peer-service", "all.ns.svc", "--peer-port", "77").peers
    names = (PeerName("a", 1), PeerName("b", 2), PeerName("all.ns.svc", 77))
    assert flags == PeerFlags(names, 77, "127.0.0.1")
    assert parsed("--peer-service", "all").peers == PeerFlags((PeerName("all", 9005),))


def test_the_port_is_open_to_others_only_with_certificates_or_on_request() -> None:
    """The port trusts every client."""
    service = ("--peer-service", "all")
    with_certificates = parsed(*service, "--peer-cert-path", "certs").peers
    assert with_certificates.bind_address == "0.0.0.0"
    trusting = parsed(*service, "--peer-insecure").peers
    assert trusting.bind_address == "0.0.0.0"
    with pytest.raises(ConfigError, match="--peer-cert-path"):
        parsed(*service, "--peer-bind-address", "0.0.0.0")
    for loopback in ("127.0.0.1", "::1", "localhost"):
        assert parsed(*service, "--peer-bind-address", loopback).peers is not None


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--peer-cert-path", "d"], "--peers, --peer-service or"),
        (["--peer-insecure"], "--peers, --peer-service or"),
        (["--peers", "a:1", "--record", "f"], "--hash-seed-file"),
        (["--peers", "a"], "HOST:PORT"),
    ],
)
def test_a_contradiction_is_refused(argv: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parsed(*argv)


def test_a_secret_gives_a_seed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen characters and more")
    seed = hash_seed_of(secret)
    secret.write_text("sixteen characters and more\n")
    assert hash_seed_of(secret) == seed
    secret.write_text("another, also long enough")
    assert hash_seed_of(secret) != seed
    secret.write_text("short")
    with pytest.raises(ConfigError, match="16"):
        hash_seed_of(secret)
    with pytest.raises(ConfigError, match="cannot read"):
        hash_seed_of(tmp_path / "absent")
    assert hash_seed_of(None) is None


def test_the_slices_of_a_service_name_the_replicas() -> None:
    flags = parsed("--peer-slices", "all").peers
    assert flags == PeerFlags((), slices=PeerName("all", 9005))
    given = parsed("--peer-slices", "all:77", "--peer-server-name", "replicas").peers
    assert (given.slices, given.server_name) == (PeerName("all", 77), "replicas")


@pytest.mark.parametrize("flags", [("all,other",), ("All",), ("a.b",), ("all", "--peers", "a:1")])
def test_slices_are_of_one_service_and_name_all(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--peer-slices"):
        parsed("--peer-slices", *flags)
