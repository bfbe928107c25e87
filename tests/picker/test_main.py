"""The command line: flags, exit statuses, signals."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from picker.__main__ import _options, build_parser, main
from picker.app import Options
from picker.extproc.options import Transport


def parsed(*argv: str) -> Options:
    return _options(build_parser().parse_args(argv))


def test_without_flags_the_defaults_of_the_reference_apply() -> None:
    """But TLS only with a certificate, and the HTTP port on loopback."""
    assert parsed() == Options()
    assert (parsed().grpc_port, parsed().grpc_health_port, parsed().metrics_port) == (
        9002,
        9003,
        9090,
    )


def test_flags_are_read_in_the_spelling_of_the_reference() -> None:
    """Durations as Go writes them, sizes as Kubernetes does."""
    chosen = parsed(
        *("--config-file", "c.yaml", "--endpoints-file", "e.yaml", "--grpc-port", "1"),
        *("--refresh-metrics-interval", "1m", "--drain-timeout=5s", "--cert-path", "certs"),
        *("--grpc-max-recv-msg-size", "10MiB", "--health-checking", "-v", "4"),
        *("--grpc-transport", "grpcio"),
    )
    assert chosen == Options(
        config_file=Path("c.yaml"),
        endpoints_file=Path("e.yaml"),
        grpc_port=1,
        refresh_metrics_interval_seconds=60.0,
        drain_timeout_seconds=5.0,
        secure_serving=True,
        cert_path=Path("certs"),
        grpc_max_recv_msg_bytes=10 * 1024 * 1024,
        health_checking=True,
        grpc_transport=Transport.GRPCIO,
    )
    assert not parsed("--cert-path", "certs", "--secure-serving=false").secure_serving


@pytest.mark.parametrize(
    "argv",
    [
        ["--ha-enable-leader-election"],
        ["--grpc-port", "70000"],
        ["--drain-timeout", "5"],
        ["--grpc-max-recv-msg-size", "big"],
        ["--secure-serving=maybe"],
        ["--grpc-transport", "carrier-pigeon"],
        ["--config-file", "a", "--config-text", "b"],
        ["--grpc-po", "1"],
    ],
)
def test_what_is_not_supported_or_wrong_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and the flag's name; nothing is ignored or guessed."""
    with pytest.raises(SystemExit) as status:
        main(argv)
    assert status.value.code == 2
    assert argv[0].partition("=")[0] in capsys.readouterr().err


def test_a_picker_that_cannot_start_says_why_and_exits_with_1(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One sentence, no traceback."""
    assert main(["--endpoints-file", "/nowhere/e.yaml"]) == 1
    assert caplog.records[-1].message.startswith("/nowhere/e.yaml: cannot read the endpoints file")
    assert caplog.records[-1].exc_info is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    """One line says when it is ready."""
    path = tmp_path / "e.yaml"
    path.write_text("endpoints: []")
    ports = ["--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0"]
    command = [*("-m", "picker", "--bind-address", "127.0.0.1", "--endpoints-file"), str(path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *ports, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    async for line in process.stderr:
        lines.append(line.decode())
        if "picker ready: ext_proc 127.0.0.1:" in lines[-1]:
            process.send_signal(number)
    assert await process.wait() == 0, "".join(lines)
    assert "draining" in lines[-1]
