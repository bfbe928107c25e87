"""The draft model in a worker's flags is found like the model itself."""

import json
from pathlib import Path

import pytest

from fleet.commands.cli import main, with_default_model
from fleet.errors import FleetError
from fleet.run.models import resolve_model, with_found_draft_model


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
def test_a_hub_id_becomes_the_path_of_what_was_fetched(flag: str) -> None:
    """The spelling is vLLM's; other fields and flags are unchanged."""
    asked: list[str] = []

    def resolve(name: str) -> Path:
        asked.append(name)
        return Path("/hub/qwen")

    config = '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}'
    argv = with_found_draft_model(["--port", "1", flag, config, "--seed", "7"], resolve)
    assert asked == ["Qwen/Qwen3-0.6B"]
    assert argv[:-1] == ["--port", "1", "--seed", "7", "--speculative-config"]
    assert json.loads(argv[-1]) == {"model": "/hub/qwen", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    "config",
    [
        '{"model": "ngram", "num_speculative_tokens": 5}',
        '{"method": "suffix"}',
        '{"method": "eagle", "model": "someone/EAGLE"}',
        '{"model": "Qwen/Qwen3-0.6B", "colour": 1}',
        '{"model": 7}',
        "[1]",
        "{",
    ],
)
def test_nothing_else_is_looked_up(config: str) -> None:
    argv = ["-sc", config, "--port", "1"]

    def resolve(name: str) -> Path:
        raise AssertionError(name)

    assert with_found_draft_model(argv, resolve) == argv
    assert with_found_draft_model(["--port", "1"], resolve) == ["--port", "1"]


def test_a_missing_model_is_reported_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"model": "missing.gguf"}'
    with pytest.raises(FleetError, match=r"^--speculative-config: model: no model at missing"):
        with_found_draft_model(["-sc", config], resolve_model)
    model = tmp_path / "m.gguf"
    model.touch()
    assert main(["worker", "--model", str(model), "-sc", config]) == 1
    assert main(["up", "--model", str(model), "--worker-args", f"-sc '{config}'"]) == 1
    output = capsys.readouterr().err.splitlines()
    assert [line.startswith("pointsman: --speculative-config: model: ") for line in output] == [
        True
    ] * 2


def test_a_worker_gets_both_models_by_path(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    given = ["--model", str(model), "-sc", json.dumps({"model": str(model)})]
    engine = ["--engine", "torch", "--model", str(model)]
    found = ["--speculative-config", f'{{"model":"{model}"}}']
    assert with_default_model(given) == [*found, *engine]
    simulated = with_default_model([*given, "--engine", "sim"])
    assert simulated == [*given[2:], "--engine", "sim", "--model", str(model)]
