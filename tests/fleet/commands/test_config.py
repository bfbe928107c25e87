"""`pointsman config`: findings with positions, exit statuses, effective values."""

import io
import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from fleet.commands.cli import main

GOOD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
"""
BAD = GOOD + "- {type: queue-scorrer}\n- {type: by-label, parameters: {label: 5}}\nplugin: 1\n"


def test_a_good_file_is_said_to_be_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD)
    assert main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: nothing wrong\n"


def test_every_finding_is_a_line_with_its_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BAD)
    assert main(["config", "check", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:5:4: error: plugins[1].type: unknown plugin type")
    assert lines[0].endswith("did you mean 'queue-scorer'?")
    assert lines[1].startswith(f"{path}:6:4: warning: plugins[2].type: ")
    assert lines[2].startswith(f"{path}:6:33: error: plugins[2].parameters")
    assert lines[-1] == f"{path}: 3 errors, 1 warning"


def test_findings_as_json_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--json", "--config-text", BAD]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["file"], report["valid"]) == ("--config-text", False)
    first = report["findings"][0]
    assert (first["line"], first["column"], first["key"]) == (5, 4, "plugins[1].type")
    assert (first["severity"], first["nearest"]) == ("error", "queue-scorer")
    assert "queue-scorer" in first["allowed"]
    assert {one["severity"] for one in report["findings"]} == {"error", "warning"}


def test_warnings_alone_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD + "parser: {pluginRef: openai-parser}\n"
    assert main(["config", "check", "--json", "--config-text", text]) == 0
    assert json.loads(capsys.readouterr().out)["valid"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["config", "check", "/nowhere/c.yaml"], "cannot read /nowhere/c.yaml"),
        (["config", "check"], "give a file"),
        (
            ["config", "check", "f", "--config-text", "x"],
            "give one of these: a file, --config-text",
        ),
    ],
)
def test_an_unreadable_file_is_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_effective_values_are_shown_with_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--origin", "--config-text", GOOD]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = [line for line in lines if line.startswith("- type: queue-scorer")]
    assert [line.endswith("  # --config-text:4") for line in written] == [True]
    assert any(line.strip().endswith("# default") for line in lines)
    assert main(["config", "show"]) == 0
    assert "#" not in capsys.readouterr().out


def test_a_configuration_with_errors_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--config-text", BAD]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unknown plugin type" in captured.err


def test_experimental_plugins_need_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD + "- {type: agent-identity}\n"
    assert main(["config", "check", "--config-text", text]) == 1
    assert "--allow-experimental-plugins" in capsys.readouterr().out
    allowed = ["config", "check", "--allow-experimental-plugins", "--config-text", text]
    assert main(allowed) == 0


ENDPOINTS = """\
endpoints: [{name: a, address: 10.0.0.1, port: 8000}]
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: chat}
spec: {poolRef: {name: mine}, priority: 10}
"""


def test_an_endpoints_file_is_checked_with_all_its_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "e.yaml"
    command = ["config", "check", "--endpoints-file", str(path), "--pool-name", "mine"]
    path.write_text(ENDPOINTS)
    assert main(command) == 0
    assert capsys.readouterr().out == f"{path}: nothing wrong\n"
    assert main(command[:-2]) == 0
    assert f"{path}:6:8: warning: spec.poolRef: InferenceObjective 'chat': is for" in (
        capsys.readouterr().out
    )
    path.write_text(ENDPOINTS.replace("priority", "prio"))
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:6:31: error: spec.prio: InferenceObjective 'chat': unknown")
    assert lines[1] == f"{path}: 1 error, 0 warnings"
    path.write_text("endpoints: {")
    assert main([*command, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["valid"], report["findings"][0]["severity"]) == (False, "error")


def test_a_file_of_objectives_alone_is_checked_as_up_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "o.yaml"
    command = ["config", "check", "--objectives", str(path)]
    objective = ENDPOINTS.partition("---\n")[2].replace("mine", "default")
    path.write_text(objective)
    assert main(command) == 0
    assert capsys.readouterr().out == f"{path}: nothing wrong\n"
    path.write_text(objective.replace("priority", "prio"))
    assert main(command) == 1
    assert "error: spec.prio: InferenceObjective 'chat': unknown" in capsys.readouterr().out
    assert main([*command, "--config-text", "x"]) == 2
    assert "give one of these: " in capsys.readouterr().err


def test_standard_input_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    assert main(["config", "check", "-"]) == 1
    assert capsys.readouterr().out.startswith("standard input:5:4: error: ")


def test_a_configuration_to_begin_with_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    assert main(["config", "init", str(path)]) == 0
    assert main(["config", "check", str(path)]) == 0
    capsys.readouterr()
    assert main(["config", "init"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert main(["config", "init", str(path)]) == 2
    assert capsys.readouterr().err == f"pointsman: cannot write {path}: File exists\n"


def test_the_schema_says_what_the_check_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    good = yaml.safe_load(GOOD)
    good["plugins"].append({"type": "by-label", "parameters": {"label": "a", "validValues": ["b"]}})
    assert not list(judge.iter_errors(good))
    found = {".".join(map(str, one.path)) for one in judge.iter_errors(yaml.safe_load(BAD))}
    assert found == {"", "plugins.1.type", "plugins.2.parameters"}
