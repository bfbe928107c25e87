"""The flags that select a pool of a cluster."""

from pathlib import Path

import pytest

from picker.app.cluster import target_of
from picker.cli.flags import build_parser, options_of
from picker.cli.options import KubernetesFlags, Options
from picker.errors import ConfigError

POD = {"POD_NAME": "my-epp-7bdfb47f6-4hxj8"}
SELECTED = ("--endpoint-selector", "app=vllm", "--endpoint-target-ports", "8000")


def parsed(*argv: str, **environ: str) -> KubernetesFlags | None:
    return options_of(build_parser().parse_args(argv), environ).kubernetes


def test_the_name_of_a_pool_is_enough() -> None:
    assert parsed("--pool-name", "p") == KubernetesFlags(
        "p", "default", "inference.networking.k8s.io"
    )


def test_no_cluster_is_followed_without_these_flags() -> None:
    assert parsed() is None
    options = options_of(build_parser().parse_args([]))
    assert (options.kubernetes, options.pool_name) == (None, "default")


def test_with_an_endpoints_file_the_name_is_a_label() -> None:
    argv = ["--endpoints-file", "e.yaml", "--pool-name", "p", "--pool-namespace", "n"]
    options = options_of(build_parser().parse_args(argv))
    assert (options.kubernetes, options.pool_name) == (None, "p")


def test_each_flag_sets_its_field() -> None:
    assert parsed(
        "--pool-name=p",
        "--pool-namespace=n",
        "--pool-group=inference.networking.x-k8s.io",
        "--kubeconfig=k",
        "--kube-context=c",
        NAMESPACE="other",
    ) == KubernetesFlags("p", "n", "inference.networking.x-k8s.io", "", (), Path("k"), "c")


def test_the_namespace_is_that_of_the_environment_unless_given() -> None:
    flags = parsed("--pool-name=p", "--pool-namespace=", "--kubeconfig=", NAMESPACE="team-a")
    assert (flags.pool_namespace, flags.kubeconfig) == ("team-a", None)


def test_a_pool_of_selected_pods_has_the_name_of_the_pickers_deployment() -> None:
    flags = parsed(
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
    options: Options = options_of(build_parser().parse_args(SELECTED))
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
def test_a_contradiction_is_refused(
    argv: tuple[str, ...], environ: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        parsed(*argv, **environ)


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
