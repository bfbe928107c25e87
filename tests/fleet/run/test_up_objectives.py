"""Objectives of `pointsman up` reach the picker's endpoints file."""

from pathlib import Path

import pytest

from fleet.commands.cli import main
from fleet.envoy.settings import SocketAddress
from fleet.errors import FleetError
from fleet.run.layout import endpoints_yaml
from fleet.run.preflight import POOL_NAME, read_objectives
from picker.cli.options import Options as PickerOptions
from picker.config.pool_file import read_pool_file
from picker.pool.policies import Objective

OBJECTIVE = """\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: chat}
spec: {poolRef: {name: default}, priority: 10}
"""


def test_objectives_follow_the_endpoints(tmp_path: Path) -> None:
    path, said = tmp_path / "o.yaml", list[str]()
    for text in (OBJECTIVE, f"\ufeff---\n{OBJECTIVE}---\n", OBJECTIVE.rstrip()):
        path.write_text(text)
        objectives = read_objectives(path, said.append, clients_may_name=True)
        workers = {f"worker-{n}": SocketAddress("127.0.0.1", 10 + n) for n in (1, 2)}
        read = read_pool_file(endpoints_yaml(workers, objectives).encode(), "f", POOL_NAME)
        assert read.findings == ()
        assert [one.name for one in read.contents.endpoints] == ["worker-1", "worker-2"]
        assert read.contents.rules.objectives == (Objective("chat", 10),)
    assert said == []
    assert PickerOptions().pool_name == POOL_NAME


def test_objectives_that_the_picker_ignores_cause_a_warning(tmp_path: Path) -> None:
    path, said = tmp_path / "o.yaml", list[str]()
    path.write_text(OBJECTIVE.replace("name: default", "name: other"))
    read_objectives(path, said.append, clients_may_name=True)
    (line,) = said
    assert line.startswith(f"warning: {path}:4:8: spec.poolRef: InferenceObjective 'chat': is for")


@pytest.mark.parametrize(("text", "count"), [(OBJECTIVE, 1), ("", 0)])
def test_objectives_that_clients_cannot_name_cause_a_warning(
    tmp_path: Path, text: str, count: int
) -> None:
    """Envoy strips the header unless clients are trusted with it."""
    path, said = tmp_path / "o.yaml", list[str]()
    path.write_text(text)
    read_objectives(path, said.append, clients_may_name=False)
    assert [line for line in said if "--trust-control-headers" in line] == said
    assert len(said) == count


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OBJECTIVE.replace("10", "ten"), "spec.priority: InferenceObjective 'chat': expected"),
        ("endpoints: []", "expected objects with a kind"),
        ("a: [", "not valid YAML"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_a_file_with_an_error_starts_nothing(
    tmp_path: Path, text: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "o.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FleetError, match=reason):
        read_objectives(path, print, clients_may_name=True)
    assert main(["up", "--engine", "sim", "--objectives", str(path)]) == 2
    assert capsys.readouterr().err.startswith("pointsman: ")
