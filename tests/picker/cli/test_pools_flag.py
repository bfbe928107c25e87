"""The flag `--pool`: its values, its errors, and the options of each pool."""

from pathlib import Path

import pytest

from picker.cli.flags import build_parser, options_of
from picker.cli.options import KubernetesFlags, Options, PeerFlags, PoolFlags, RecordFlags, XdsFlags
from picker.cli.pools import MAX_POOLS, OnePool, split
from picker.errors import ConfigError
from picker.peers.discovery import PeerName

LEGACY = "inference.networking.x-k8s.io"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESPACE", raising=False)
    monkeypatch.delenv("POD_NAME", raising=False)


def options(*argv: str) -> Options:
    return options_of(build_parser().parse_args(argv))


def pools(*texts: str) -> tuple[PoolFlags, ...]:
    return options(*(f"--pool={text}" for text in texts)).pools


def parts(*argv: str) -> dict[str, OnePool]:
    found = split(options(*argv))
    assert len({one.key for one in found}) == len(found)
    return {one.key: one for one in found}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("llama", PoolFlags("llama", "default")),
        ("llama.v2-8b", PoolFlags("llama.v2-8b", "default")),
        ("research/mixtral", PoolFlags("mixtral", "research")),
        ("llama:9012", PoolFlags("llama", "default", grpc_port=9012)),
        ("llama:0", PoolFlags("llama", "default", grpc_port=0)),
        ("research/mixtral:9014", PoolFlags("mixtral", "research", grpc_port=9014)),
        ("name=llama", PoolFlags("llama", "default")),
        (f"group={LEGACY},name=a,namespace=b", PoolFlags("a", "b", LEGACY)),
        (
            "name=a,grpc-port=9,endpoints-file=/e/f.yaml,config-file=c.yaml",
            PoolFlags(
                "a",
                "default",
                grpc_port=9,
                endpoints_file=Path("/e/f.yaml"),
                config_file=Path("c.yaml"),
            ),
        ),
    ],
)
def test_a_value_has_a_short_and_a_long_form(text: str, meant: PoolFlags) -> None:
    assert pools(text) == (meant,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no pool; write [NAMESPACE/]NAME[:PORT], or name=NAME"),
        (":9012", "':9012' is no pool"),
        ("/a", "'/a' is no pool"),
        ("a/", "'a/' is no pool"),
        ("a:", "'a:' is no pool"),
        ("a/b/c", "'a/b/c' is no pool"),
        ("a:1:2", "'a:1:2' is no pool"),
        ("Llama", "'Llama' is no name of a pool"),
        ("-a", "'-a' is no name of a pool"),
        ("a\n", "is no name of a pool"),
        ("a,b", "'a,b' is no name of a pool"),
        ("a*", "'a*' is no name of a pool"),
        ("x" * 254, "is no name of a pool"),
        ("Team/a", "'Team' is no name of a namespace"),
        ("team.a/a", "'team.a' is no name of a namespace"),
        ("x" * 64 + "/a", "is no name of a namespace"),
        ("a:65536", "'65536' is no port; write 0 to 65535"),
        ("a:-1", "'-1' is no port"),
        ("a:http", "'http' is no port"),
        ("a:٣", "'٣' is no port"),
        ("a: 1", "' 1' is no port"),
        ("namespace=a", "'' is no name of a pool"),
        ("name=A", "'A' is no name of a pool"),
        ("name=a,namespace=A", "'A' is no name of a namespace"),
        ("name=a,port=1", "'port' is none of name, namespace, group, grpc-port"),
        ("name=a, namespace=b", "' namespace' is none of"),
        ("name=a,namespace", "'namespace' is none of"),
        ("name=a,", "'' is none of"),
        ("a,namespace=b", "'a' is none of"),
        ("name=a,name=b", "name is given twice"),
        ("name=a,config-file=x,config-file=x", "config-file is given twice"),
        ("name=", "name has no value"),
        ("name=a,namespace=", "namespace has no value"),
        ("name=a,endpoints-file=", "endpoints-file has no value"),
        ("name=a,grpc-port=65536", "'65536' is no port"),
        ("name=a,group=apps", "group 'apps' has no pools; write inference.networking.k8s.io or"),
        (f"name=a,group={LEGACY},endpoints-file=x", "is of a group or of an endpoints-file"),
    ],
)
def test_an_invalid_value_is_refused(
    text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([f"--pool={text}"])
    assert ended.value.code == 2
    lines = " ".join(capsys.readouterr().err.split())
    assert "argument --pool: " in lines
    assert " ".join(reason.split()) in lines


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--pool=a", "--pool=a"), "--pool names default/a 2 times; each pool is served once"),
        (("--pool=a", "--pool=name=a,endpoints-file=f"), "names default/a 2 times"),
        (("--pool=a", "--pool=default/a:9"), "names default/a 2 times"),
        (("--pool-namespace=n", "--pool=a", "--pool=n/a"), "names n/a 2 times"),
        (tuple(f"--pool=p{n}" for n in range(MAX_POOLS + 1)), "65 pools; 64 at most"),
        (("--pool=a:9002",), "--pool a: port 9002 is also that of --grpc-port; each needs its own"),
        (("--pool=a:7", "--grpc-port=7"), "port 7 is also that of --grpc-port"),
        (("--pool=a:9003",), "port 9003 is also that of --grpc-health-port"),
        (("--pool=a:9090",), "port 9090 is also that of --metrics-port"),
        (("--pool=a:7", "--xds-port=7"), "port 7 is also that of --xds-port"),
        (("--pool=a:9005", "--peers=h:1"), "port 9005 is also that of --peer-port"),
        (("--pool=a:7", "--peer-slices=s", "--peer-port=7"), "port 7 is also that of --peer-port"),
        (("--pool=a:7", "--pool=b:8", "--pool=c:7"), "--pool c: port 7 is also that of --pool a"),
        (("--pool=a:7", "--bind-address=unix:///tmp/s"), "remove 7, and let the proxy name"),
        (("--pool=a:0", "--bind-address=/tmp/s"), "there are no ports at --bind-address /tmp/s"),
        (("--pool=a", "--pool-name=b"), "--pool-name is for a picker of one pool"),
        (("--pool=a", "--endpoints-file=f"), "--endpoints-file is for a picker of one pool"),
        (("--pool=a", "--xds-port=1", "--xds-cluster-name=c"), "--xds-cluster-name is for a pick"),
        (("--pool=a", "--record=d.jsonl"), "--record with --pool needs {pool} in the file's name"),
        (("--pool=a", "--record={pool}/d.jsonl"), "needs {pool} in the file's name"),
    ],
)
def test_a_contradiction_is_refused(argv: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        options(*argv)
    assert reason in str(refusal.value)


def test_a_selector_is_for_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "my-epp-7bdfb47f6-4hxj8")
    with pytest.raises(ConfigError, match="--endpoint-selector is for a picker of one pool"):
        options("--pool=a", "--endpoint-selector=app=x", "--endpoint-target-ports=8000")


def test_the_most_pools_and_the_unused_port_of_peers_are_accepted() -> None:
    assert len(pools(*(f"p{n}:0" for n in range(MAX_POOLS)))) == MAX_POOLS
    assert pools("a:9005", "b:9006")[0].grpc_port == 9005


def test_without_the_flag_there_is_one_pool_with_the_given_options() -> None:
    given = options("--pool-name=p", "--config-text=x")
    (one,) = split(given)
    assert (one.key, one.names) == ("", ("p",))
    assert one.options is given


def test_namespace_and_group_default_to_those_of_the_picker() -> None:
    common = ("--pool-namespace=team", f"--pool-group={LEGACY}")
    found = options(*common, "--pool=a", "--pool=other/b", "--pool=name=c,endpoints-file=f").pools
    assert [one.namespace for one in found] == ["team", "other", "team"]
    assert [one.group for one in found[:2]] == [LEGACY, LEGACY]
    (alone,) = options(*common, "--pool=name=c,endpoints-file=f").pools
    assert alone.namespace == "team"
    own = "--pool=name=a,group=inference.networking.k8s.io"
    assert options(*common, own).pools[0].group == "inference.networking.k8s.io"


def test_the_namespace_is_the_pickers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESPACE", "home")
    assert pools("a", "b/c")[0].namespace == "home"
    assert set(parts("--pool=a")["a"].names) == {"a", "home/a"}


def test_a_key_has_a_namespace_only_where_names_are_equal() -> None:
    found = parts("--pool=a", "--pool=x/b", "--pool=y/b")
    assert {key: one.names for key, one in found.items()} == {
        "a": ("a", "default/a"),
        "x/b": ("x/b",),
        "y/b": ("y/b",),
    }
    assert [one.options.pool_key for one in found.values()] == ["a", "x/b", "y/b"]
    assert [one.options.pool_name for one in found.values()] == ["a", "b", "b"]
    assert {one.options.pool_keys for one in found.values()} == {("a", "x/b", "y/b")}
    assert all(one.options.pools == () for one in found.values())


def test_each_pool_is_followed_in_its_own_namespace_by_the_same_credentials() -> None:
    found = parts(
        "--kubeconfig=k",
        "--kube-context=c",
        "--pool=a",
        f"--pool=name=b,namespace=x,group={LEGACY}",
        "--pool=name=f,endpoints-file=f.yaml",
    )
    group = "inference.networking.k8s.io"
    reached = (Path("k"), "c")
    assert {key: one.options.kubernetes for key, one in found.items()} == {
        "a": KubernetesFlags("a", "default", group, "", (), *reached),
        "b": KubernetesFlags("b", "x", LEGACY, "", (), *reached),
        "f": KubernetesFlags("f", "default", group, "", (), *reached),
    }
    files = [one.options.endpoints_file for one in found.values()]
    assert files == [None, None, Path("f.yaml")]


def test_pools_of_files_alone_need_no_cluster() -> None:
    found = parts("--pool=name=a,endpoints-file=a", "--pool=name=b,endpoints-file=b")
    assert [one.options.kubernetes for one in found.values()] == [None, None]
    with pytest.raises(ConfigError, match="--kubeconfig needs"):
        options("--pool=name=a,endpoints-file=a", "--kubeconfig=k")


@pytest.mark.parametrize("common", [(), ("--config-file=all.yaml",), ("--config-text=all",)])
def test_a_pools_own_configuration_wins(common: tuple[str, ...]) -> None:
    found = parts(*common, "--pool=a", "--pool=name=b,config-file=b.yaml")
    given = options(*common, "--pool=a")
    a, b = found["a"].options, found["b"].options
    assert (a.config_file, a.config_text) == (given.config_file, given.config_text)
    assert (b.config_file, b.config_text) == (Path("b.yaml"), None)


def test_each_pool_has_a_recording_and_a_cluster_of_its_own() -> None:
    given = (
        "--xds-port=9008",
        "--record=/r/{pool}/x-{pool}-{pool}.jsonl",
        "--record-max-bytes=1Mi",
    )
    found = parts(*given, "--pool=a", "--pool=x/b", "--pool=y/b")
    folder, most = Path("/r/{pool}"), 1024 * 1024
    assert {key: one.options.record for key, one in found.items()} == {
        "a": RecordFlags(folder / "x-a-a.jsonl", most),
        "x/b": RecordFlags(folder / "x-x_b-x_b.jsonl", most),
        "y/b": RecordFlags(folder / "x-y_b-y_b.jsonl", most),
    }
    published = [one.options.xds for one in found.values()]
    assert [xds.cluster_name for xds in published if xds is not None] == ["a", "x/b", "y/b"]
    assert isinstance(published[0], XdsFlags)


def test_replicas_are_those_of_the_picker_wherever_a_pool_is() -> None:
    found = parts(
        "--pool-namespace=home",
        "--peer-slices=replicas",
        "--pool=a",
        "--pool=x/b",
        "--pool=name=f,endpoints-file=f",
    )
    slices = PeerName("replicas", 9005)
    assert [one.options.peers for one in found.values()] == [
        PeerFlags((), slices=slices, namespace="home", pool=pool)
        for pool in ("home/a", "x/b", "home/f")
    ]
    assert all(one.options.kubernetes is not None for one in found.values())


def test_the_lease_has_the_name_of_the_first_pool_of_the_cluster() -> None:
    given = options(
        "--ha-enable-leader-election",
        "--pool-namespace=home",
        "--pool=name=f,endpoints-file=f",
        "--pool=x/a",
        "--pool=b",
    )
    assert given.election.lease.namespace == "home"
    assert given.election.lease.name == "epp-home-a.llm-d.ai"


def test_the_model_may_choose_between_several_pools_alone() -> None:
    found = parts("--route-by-model", "--pool=a", "--pool=b")
    assert [one.options.route_by_model for one in found.values()] == [True, True]
    with pytest.raises(ConfigError, match="--route-by-model chooses between several pools"):
        options("--route-by-model", "--pool-name=a")
