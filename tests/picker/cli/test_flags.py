"""Flags have the names and defaults of the reference; unsupported or useless ones are refused."""

import re
from pathlib import Path

import pytest

from picker.__main__ import main
from picker.app.cluster import target_of
from picker.app.in_use import hash_seed_of
from picker.cli.flags import build_parser, options_of
from picker.cli.options import (
    KubernetesFlags,
    LogFlags,
    MetricsTls,
    Options,
    PeerFlags,
    RecordFlags,
    TlsFlags,
    XdsFlags,
)
from picker.errors import ConfigError
from picker.k8s.elector import Timings
from picker.peers.discovery import PeerName


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
    ("argv", "reason"),
    [
        (["--ha-enable-leader-election=perhaps"], "neither true nor false"),
        (["--metrics-endpoint-auth"], "needs a cluster"),
        (["--total-queued-requests-metric", "x"], "engineConfigs"),
        (["--total-running-requests-metric", "x"], "engineConfigs"),
        (["--kv-cache-usage-percentage-metric", "x"], "engineConfigs"),
        (["--lora-info-metric", "x"], "engineConfigs"),
        (["--cache-info-metric=x"], "engineConfigs"),
        (["--enable-pprof"], "py-spy"),
        (["--model-server-metrics-port=9000"], "metrics-data-source"),
        (["--zap-devel"], "--zap-encoder"),
        (["--grpc-port", "70000"], "from 0 to 65535"),
        (["--drain-timeout", "5"], "1m30s"),
        (["--grpc-max-recv-msg-size", "big"], "10MiB"),
        *(
            (["--grpc-max-recv-msg-size", size], "headers of a request may have")
            for size in ("0", "1", "63Ki")
        ),
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
        "--model-server-metrics-path=/metrics",
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


ELECTS = ("--pool-name=pool", "--pool-namespace=team", "--ha-enable-leader-election")


def test_no_leader_is_elected_without_the_flag() -> None:
    assert parsed("--pool-name=pool").election is None
    assert parsed("--pool-name=pool", "--ha-enable-leader-election=false").election is None


def test_the_lease_has_the_name_that_the_reference_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POD_NAME", "picker-abc-xyz")
    first, second = parsed(*ELECTS).election, parsed(*ELECTS).election
    assert str(first.lease) == "team/epp-team-pool.llm-d.ai"
    assert first.timings == Timings(15.0, 10.0, 2.0)
    assert re.fullmatch(r"picker-abc-xyz_[0-9a-f-]{36}", first.identity)
    assert first.identity != second.identity


def test_the_lease_of_selected_pods_has_the_name_of_the_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POD_NAME", "picker-abc-xyz")
    pods = ("--endpoint-selector=app=x", "--endpoint-target-ports=8000", "--pool-namespace=team")
    election = parsed(*pods, "--ha-enable-leader-election").election
    assert election.lease.name == "epp-team-picker.llm-d.ai"


def test_timings_are_durations() -> None:
    election = parsed(
        *ELECTS,
        "--leader-election-lease-duration=4s",
        "--leader-election-renew-deadline=3s",
        "--leader-election-retry-period=500ms",
    ).election
    assert election.timings == Timings(4.0, 3.0, 0.5)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--ha-enable-leader-election"], "--pool-name"),
        (["--endpoints-file=x", "--ha-enable-leader-election"], "without --endpoints-file"),
        (["--pool-name=x", "--leader-election-retry-period=1s"], "no effect without --ha-enable"),
        ([*ELECTS, "--leader-election-lease-duration=1500ms"], "whole seconds"),
        ([*ELECTS, "--leader-election-lease-duration=10m"], "1 to 120"),
        ([*ELECTS, "--leader-election-renew-deadline=15s"], "two replicas would lead"),
        ([*ELECTS, "--leader-election-retry-period=9s"], "well below the 10s"),
        ([*ELECTS, "--leader-election-retry-period=10ms"], "at least 0.1s"),
        (["--pool-namespace=a", "--ha-enable-leader-election", f"--pool-name={'x' * 250}"], "253"),
        (["--peer-cert-path", "d"], "--peers, --peer-service or"),
        (["--peer-insecure"], "--peers, --peer-service or"),
        (["--peers", "a:1", "--record", "f"], "--hash-seed-file"),
        (["--peers", "a"], "HOST:PORT"),
        (["--enable-cert-reload", "--secure-serving"], "needs --cert-path"),
        (["--bind-address=127.0.0.1", "--tls-min-version", "VersionTLS13"], "--secure-serving"),
        (["--secure-serving=false", "--tls-cipher-suites", "x"], "--secure-serving"),
        (["--metrics-client-ca-file", "ca.pem"], "needs --metrics-cert-dir"),
    ],
)
def test_a_contradiction_is_refused(argv: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parsed(*argv)


POD = {"POD_NAME": "my-epp-7bdfb47f6-4hxj8"}
SELECTED = ("--endpoint-selector", "app=vllm", "--endpoint-target-ports", "8000")


def cluster(*argv: str, **environ: str) -> KubernetesFlags | None:
    return options_of(build_parser().parse_args(argv), environ).kubernetes


def test_the_name_of_a_pool_is_enough() -> None:
    assert cluster("--pool-name", "p") == KubernetesFlags(
        "p", "default", "inference.networking.k8s.io"
    )


def test_no_cluster_is_followed_without_these_flags() -> None:
    assert cluster() is None
    options = parsed()
    assert (options.kubernetes, options.pool_name) == (None, "default")


def test_with_an_endpoints_file_the_name_is_a_label() -> None:
    argv = ["--endpoints-file", "e.yaml", "--pool-name", "p", "--pool-namespace", "n"]
    options = parsed(*argv)
    assert (options.kubernetes, options.pool_name) == (None, "p")


def test_each_flag_sets_its_field() -> None:
    assert cluster(
        "--pool-name=p",
        "--pool-namespace=n",
        "--pool-group=inference.networking.x-k8s.io",
        "--kubeconfig=k",
        "--kube-context=c",
        NAMESPACE="other",
    ) == KubernetesFlags("p", "n", "inference.networking.x-k8s.io", "", (), Path("k"), "c")


def test_the_namespace_is_that_of_the_environment_unless_given() -> None:
    flags = cluster("--pool-name=p", "--pool-namespace=", "--kubeconfig=", NAMESPACE="team-a")
    assert (flags.pool_namespace, flags.kubeconfig) == ("team-a", None)


def test_a_pool_of_selected_pods_has_the_name_of_the_pickers_deployment() -> None:
    flags = cluster(
        "--endpoint-selector",
        "app in (a,b), !old",
        "--endpoint-target-ports",
        "8000,8001",
        "--endpoint-target-ports=8000",
        **POD,
    )
    assert flags.pool_name == "my-epp"
    assert flags.endpoint_target_ports == (8000, 8001)
    target = target_of(flags)
    assert target.pods.selector == "app in (a,b), !old"
    assert target.pods.selects({"app": "b"})


def test_options_have_the_name_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", POD["POD_NAME"])
    options = parsed(*SELECTED)
    assert options.pool_name == "my-epp"
    assert options.kubernetes is not None


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        ((*SELECTED, "--pool-name", "p"), POD, "--pool-name or from --endpoint-selector"),
        (("--endpoint-selector", "a=b"), POD, "needs --endpoint-target-ports, e.g. 8000"),
        (("--endpoint-target-ports", "1"), POD, "needs --endpoint-selector"),
        (("--endpoint-target-ports", "1", "--pool-name", "p"), {}, "needs --endpoint-selector"),
        ((*SELECTED, "--endpoint-target-ports", "1,2,3,4,5,6,7,8"), POD, "9 ports; 8 at most"),
        (SELECTED, {}, "needs the variable POD_NAME"),
        (SELECTED, {"POD_NAME": "single"}, "no Pod of a Deployment"),
        (
            ("--kubeconfig", "k"),
            {},
            "--kubeconfig needs --pool-name, --pool or --endpoint-selector",
        ),
        (("--kube-context", "c"), {}, "--kube-context needs"),
        (("--endpoints-file", "e", *SELECTED), POD, "remove --endpoint-selector"),
        (("--endpoints-file", "e", "--kubeconfig", "k"), {}, "remove --kubeconfig"),
        (("--pool-name", "p"), {"NAMESPACE": "Bad_Name"}, "the variable NAMESPACE"),
    ],
)
def test_a_contradiction_about_the_cluster_is_refused(
    argv: tuple[str, ...], environ: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        cluster(*argv, **environ)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--endpoint-selector", "a=b=c"), "cannot be read at 'a=b=c'"),
        (("--endpoint-selector", "bad key=x"), "cannot be read"),
        (("--endpoint-target-ports", "0"), "'0' is no port"),
        (("--endpoint-target-ports", "8000,x"), "'x' is no port"),
        (("--endpoint-target-ports", "65536"), "'65536' is no port"),
        (("--pool-group", "x.io"), "'x.io' has no pools"),
        (("--pool-name", "Bad_Name"), "no name of an object"),
        (("--pool-namespace", "a.b"), "no name of a namespace"),
    ],
)
def test_a_malformed_value_is_refused(
    argv: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(argv)
    said = capsys.readouterr().err
    assert f"argument {argv[0]}" in said
    assert text in said


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
