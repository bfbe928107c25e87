"""The flags of endpoint discovery."""

from __future__ import annotations

import pytest

from picker.cli.flags import build_parser, options_of
from picker.cli.options import Options, XdsFlags


def parsed(*argv: str) -> Options:
    """What a command line asks for."""
    return options_of(build_parser().parse_args(argv))


def test_nobody_is_told_of_endpoints_unless_a_port_is_given() -> None:
    """The other flags alone open nothing."""
    assert parsed("--xds-cluster-name", "x").xds is None


def test_the_pool_is_told_of_under_its_own_name_on_loopback() -> None:
    """Unless other flags say otherwise."""
    assert parsed("--xds-port", "9004", "--pool-name", "llama").xds == XdsFlags(
        9004, "127.0.0.1", "llama"
    )
    chosen = ("--xds-port=0", "--xds-bind-address=::1", "--xds-cluster-name=x")
    assert parsed(*chosen).xds == XdsFlags(0, "::1", "x")


@pytest.mark.parametrize("port", ["65536", "-1", "x", ""])
def test_a_port_is_a_number(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is refused with the range."""
    with pytest.raises(SystemExit):
        parsed(f"--xds-port={port}")
    assert "0 to 65535" in capsys.readouterr().err
