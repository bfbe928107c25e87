"""`python -m conformance.epp`: which picker is tested, and what it is said to provide."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conformance.case import Case, Provision, Strength
from conformance.epp.__main__ import PLACES, main
from conformance.epp.cases import ALL
from conformance.k8s.__main__ import asked_of, parser
from conformance.k8s.__main__ import main as k8s_main
from conformance.k8s.cases import ALL as K8S
from conformance.pickers.by_address import RunningPicker
from conformance.pickers.by_command import CommandPicker, endpoints_document, unknown_places

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
ENDPOINTS = ("127.0.0.11:8000", "[::1]:8001")


def test_the_list_shows_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALL)
    assert all(case.id in line for case, line in zip(ALL, lines, strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing-like-that"], "no case is called nothing-like-that"),
        (["--address", "127.0.0.1:1"], "--address needs --endpoints"),
        (["--command", "x {grpc_prt}"], "unknown places: grpc_prt"),
        (["--command", "x", "--provides", "all"], "'all' is not a valid Provision"),
        (["--command", "/nonexistent/picker"], "cannot start /nonexistent/picker"),
        (["--command", f"{sys.executable} -c pass"], "the picker has ended by itself"),
    ],
)
def test_an_impossible_run_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("case", [*ALL, *K8S], ids=lambda case: case.id)
def test_a_case_says_what_it_asks(case: Case[object]) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case.id)
    assert [one.id for one in (*ALL, *K8S)].count(case.id) == 1
    dagger = "†" if case.strength is Strength.SHOULD else ""
    assert len(re.findall(rf" `{case.id}`{dagger}[ ,]", PAGE.read_text())) == 1
    assert case.text.endswith(".")
    word = {"MUST": "MUST|may|should", "SHOULD": "should"}[case.strength.value]
    assert re.search(word, case.text)
    assert case.source


def test_the_other_suite_says_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert k8s_main(["--list", "--only", "pool-*"]) == 0
    assert k8s_main(["--only", "nothing-like-that"]) == 2
    assert k8s_main(["--command", "p {endpoints_file}"]) == 2
    assert k8s_main(["--several-pools-command", "p {pool_name}"]) == 2
    said = capsys.readouterr().out
    assert "--command has unknown places: endpoints_file" in said
    assert "--several-pools-command has unknown places: pool_name" in said


def test_a_picker_that_cannot_serve_several_pools_is_not_asked_to() -> None:
    only = ["--kubeconfig", "/nonexistent"]
    for given, is_asked in (
        ([], True),
        (["--command", "p"], False),
        (["--command", "p", "--several-pools-command", "p {pool_1} {port_3}"], True),
    ):
        asked = asked_of(parser().parse_args([*only, *given]))
        assert (asked.several_command is not None) is is_asked


def test_a_command_is_filled_in(tmp_path: Path) -> None:
    command = ["p", "--grpc-port={grpc_port}", "{endpoints_file}", "{health_port}"]
    picker = CommandPicker(command, tmp_path, ENDPOINTS, provides=frozenset({Provision.TLS}))
    assert picker.provides == {
        Provision.TLS,
        Provision.RESTART,
        Provision.HEALTH,
        Provision.POOL_CHANGES,
    }
    assert picker.is_tls
    assert not picker.is_running
    assert len(list(yaml.safe_load_all((tmp_path / "endpoints.yaml").read_text()))) == 2
    plain = CommandPicker(["p"], tmp_path, ENDPOINTS, provides=frozenset())
    assert plain.provides == {Provision.RESTART}
    assert plain.health_address is None


def test_a_foreign_picker_is_not_touched() -> None:
    picker = RunningPicker("127.0.0.1:1", None, frozenset(Provision))
    assert not picker.provides & {Provision.RESTART, Provision.POOL_CHANGES}
    with pytest.raises(RuntimeError, match="not ended by it"):
        picker.ask_to_end()


def test_the_endpoints_file_lists_the_pool_and_the_objective() -> None:
    listed, objective = yaml.safe_load_all(endpoints_document(ENDPOINTS))
    assert [(one["address"], one["port"]) for one in listed["endpoints"]] == [
        ("127.0.0.11", "8000"),
        ("::1", "8001"),
    ]
    assert objective["spec"]["priority"] < 0


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("p {grpc_port} {config_file}", []),
        ("p {port} {grpc_port} {Port}", ["Port", "port"]),
        ("p --json {}", []),
    ],
)
def test_unknown_places_are_named(command: str, unknown: list[str]) -> None:
    assert unknown_places(command, PLACES) == unknown


def test_every_case_has_a_check() -> None:
    checks: list[Callable[..., object]] = [case.check for case in ALL]
    assert not [one.__name__ for one in checks if one.__name__.startswith("test_")]
