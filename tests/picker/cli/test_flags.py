"""Flags have the names, spellings and defaults of the reference; unsupported ones are refused."""

from pathlib import Path

import pytest

from picker.__main__ import main
from picker.cli.flags import build_parser, options_of
from picker.cli.options import LogFlags, MetricsTls, Options, RecordFlags, TlsFlags, XdsFlags
from picker.errors import ConfigError


def parsed(*argv: str) -> Options:
    return options_of(build_parser().parse_args(argv))


DEFAULTS = Options(tls=TlsFlags())  # a port that others can reach has TLS


def test_without_flags_the_defaults_of_the_reference_apply() -> None:
    assert parsed() == DEFAULTS
    ports = (parsed().grpc_port, parsed().grpc_health_port, parsed().metrics_port)
    assert ports == (9002, 9003, 9090)
    assert not parsed().tracing


def test_flags_are_read_in_the_spelling_of_the_reference() -> None:
    suite = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
    chosen = parsed(
        *("--config-file", "c.yaml", "--endpoints-file", "e.yaml", "--grpc-port", "1"),
        *("--refresh-metrics-interval", "1m", "--drain-timeout=5s", "--cert-path", "certs"),
        *("--grpc-max-recv-msg-size", "10MiB", "--health-checking", "-v", "4"),
        *("--max-unfinished-bodies", "64Mi"),
        *("--grpc-transport", "native", "--tls-min-version=VersionTLS13", "--enable-cert-reload"),
        *("--tls-cipher-suites", f"{suite}, {suite}", "--allow-experimental-plugins"),
        *("--disable-endpoint-subset-filter", "--emit-endpoint-scores=true", "--tracing"),
        *("--refresh-prometheus-metrics-interval", "5s", "--watch-config=false"),
        *("--metrics-cert-dir", "m", "--metrics-client-ca-file", "ca.pem", "--strict-data-scope"),
        *("--processes", "1", "--grpc-max-send-msg-size", "4Mi"),
        *("--endpoint-ejection-failures", "0"),
        *("--zap-encoder=json", "--zap-log-level", "debug"),
    )
    assert chosen == Options(
        config_file=Path("c.yaml"),
        watch_config=False,
        allow_experimental_plugins=True,
        strict_data_scope=True,
        endpoints_file=Path("e.yaml"),
        grpc_port=1,
        grpc_max_recv_msg_bytes=10 * 1024 * 1024,
        max_unfinished_body_bytes=64 * 1024 * 1024,
        health_checking=True,
        tls=TlsFlags(Path("certs"), True, "VersionTLS13", (suite, suite)),
        metrics_tls=MetricsTls(Path("m"), Path("ca.pem")),
        pool_gauges_interval_seconds=5.0,
        refresh_metrics_interval_seconds=60.0,
        disable_endpoint_subset_filter=True,
        emit_endpoint_scores=True,
        tracing=True,
        drain_timeout_seconds=5.0,
        endpoint_ejection_failures=0,
        logs=LogFlags(4, as_json=True),
    )


def test_tls_is_on_with_a_certificate_or_when_asked_for() -> None:
    assert parsed("--secure-serving", "--bind-address=::1").tls == TlsFlags()
    followed = TlsFlags(Path("c"), reload=True)
    assert parsed("--secure-serving=true", "--cert-path", "c").tls == followed
    assert parsed("--bind-address=127.0.0.1", "--cert-path", "c").tls == followed
    assert parsed("--cert-path", "c", "--enable-cert-reload=false").tls == TlsFlags(Path("c"))
    assert parsed("--cert-path", "c", "--secure-serving=false").tls is None


@pytest.mark.parametrize(
    ("address", "is_plain"),
    [
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("unix:///run/picker.sock", True),
        ("/run/picker.sock", True),
    ],
)
def test_only_a_local_port_is_plain_text_by_default(address: str, is_plain: bool) -> None:
    assert parsed("--bind-address", address).tls == (None if is_plain else TlsFlags())


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-cert-reload", "--secure-serving"],
        ["--bind-address=127.0.0.1", "--tls-min-version", "VersionTLS13"],
        ["--secure-serving=false", "--tls-cipher-suites", "x"],
        ["--metrics-client-ca-file", "ca.pem"],
    ],
)
def test_flags_that_would_have_no_effect_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--"):
        parsed(*argv)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--ha-enable-leader-election=perhaps"], "neither true nor false"),
        (["--metrics-endpoint-auth"], "needs a cluster"),
        (["--autoscale=a.yaml", "--peers=a:1"], "needs a picker that receives all requests"),
        (["--autoscale=a.yaml", "--pool=a"], "is for a picker of one pool"),
        (["--total-queued-requests-metric", "x"], "engineConfigs"),
        (["--total-running-requests-metric", "x"], "engineConfigs"),
        (["--kv-cache-usage-percentage-metric", "x"], "engineConfigs"),
        (["--lora-info-metric", "x"], "engineConfigs"),
        (["--cache-info-metric=x"], "engineConfigs"),
        (["--enable-pprof"], "py-spy"),
        (["--zap-devel"], "--zap-encoder"),
        (["--grpc-port", "70000"], "from 0 to 65535"),
        (["--drain-timeout", "5"], "1m30s"),
        (["--grpc-max-recv-msg-size", "big"], "10MiB"),
        (["--grpc-max-send-msg-size", "1k"], "1MiB"),
        (["--max-unfinished-bodies", "63Mi"], "one request body may have 64MiB"),
        (["--secure-serving=maybe"], "neither true nor false"),
        (["--grpc-transport", "h2"], "leave the flag out"),
        (["--zap-encoder", "xml"], "console or json"),
        (["--processes", "2"], "run replicas that are peers"),
        (["--zap-log-level", "loud"], "debug, info, error"),
        (["--enable-cert-reload"], "needs --cert-path"),
        (["--grpc-po", "1"], "unrecognized"),
        *((["--record-max-bytes", size], size) for size in ("1Ki", "much")),
        (["--record-max-bytes=-1"], "'-1' is no size"),
        *(([f"--xds-port={port}"], "from 0 to 65535") for port in ("65536", "-1", "x", "")),
    ],
)
def test_an_unsupported_flag_or_value_is_refused(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main(argv)
    assert status.value.code == 2
    said = capsys.readouterr().err
    assert argv[0].partition("=")[0] in said
    assert reason in said


@pytest.mark.parametrize(
    "flag",
    [
        "--ha-enable-leader-election=false",
        "--metrics-endpoint-auth=false",
        "--enable-pprof=false",
        "--pool-group=inference.networking.k8s.io",
        "--zap-devel=false",
    ],
)
def test_a_refused_flag_is_accepted_with_a_value_that_changes_nothing(flag: str) -> None:
    """Manifests that contain defaults must continue to work."""
    assert parsed(flag) == DEFAULTS


def test_an_empty_value_counts_as_absent_where_there_is_no_default() -> None:
    """Templates render flags without a value."""
    names = ("--config-file", "--config-text", "--cert-path", "--endpoints-file")
    names += ("--metrics-cert-dir", "--metrics-client-ca-file", "--grpc-max-recv-msg-size")
    names += ("--grpc-max-send-msg-size", "--tls-min-version", "--tls-cipher-suites")
    assert parsed(*(f"{name}=" for name in names)) == DEFAULTS


@pytest.mark.parametrize("size", ["0", "1", "63Ki"])
def test_messages_too_small_for_the_headers_of_a_request_are_refused(size: str) -> None:
    with pytest.raises(SystemExit):
        parsed("--grpc-max-recv-msg-size", size)


def test_decisions_are_recorded_with_prompts_up_to_a_gibibyte() -> None:
    assert parsed("--record", "").record is None
    assert parsed("--record", "r").record == RecordFlags(Path("r"), 2**30, keeps_prompts=True)
    argv = ("--record=r", "--record-max-bytes=100Mi", "--no-record-prompts")
    assert parsed(*argv).record == RecordFlags(Path("r"), 100 * 2**20, keeps_prompts=False)


def test_endpoints_are_published_on_loopback_under_the_name_of_the_pool() -> None:
    assert parsed("--xds-cluster-name", "x").xds is None
    named = parsed("--xds-port", "9004", "--pool-name", "llama").xds
    assert named == XdsFlags(9004, "127.0.0.1", "llama")
    chosen = ("--xds-port=0", "--xds-bind-address=::1", "--xds-cluster-name=x")
    assert parsed(*chosen).xds == XdsFlags(0, "::1", "x")
