"""`pointsman bench offline` runs the same prompts in each engine, and prints the ratio."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from fleet.bench.flags import build_parser
from fleet.bench.offline.command import offline_command
from fleet.bench.offline.random_weights import QWEN3_600M, write_checkpoint
from fleet.commands.cli import main
from fleet.errors import FleetError

TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {**QWEN3_600M, **TINY, **HEADS}
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", shape, torch.float32)


def lines_of(model: Path, *flags: str) -> list[str]:
    lines: list[str] = []
    small = ("--requests", "5", "--input-tokens", "3..9", "--output-tokens", "4..6")
    given = build_parser().parse_args(["offline", "--model", str(model), *small, *flags])
    assert offline_command(given, lines.append) == 0
    return [line for text in lines for line in text.split("\n")]


def test_a_run_prints_tokens_and_rates_and_writes_them(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = ("--seed", "3", "--llm", '{"num_threads": 1, "num_gpu_blocks_override": 16}')
    lines = lines_of(model, *flags, "--json", str(path))
    draw = random.Random(3)
    sizes = [draw.randint(3, 9) for _ in range(5)]
    written = json.loads(path.read_text())
    assert written["prompt_tokens"] == sum(sizes)
    assert 20 <= written["output_tokens"] <= 30
    assert lines[0] == f"5 requests, seed 3: {sum(sizes)} prompt tokens,"
    [row] = [line.split() for line in lines if line.startswith("pointsman")]
    seconds = written["seconds"]["pointsman"]
    assert float(row[2].replace(",", "")) == pytest.approx(
        written["output_tokens"] / seconds, rel=0.01
    )


@pytest.mark.full
def test_a_peer_runs_the_same_prompts(model: Path) -> None:
    lines = lines_of(model, "--peer", "transformers")
    assert [line.split()[0] for line in lines if re.search(r"\d$", line)][:2] == [
        "pointsman",
        "transformers",
    ]
    assert re.fullmatch(r"pointsman / transformers: \d+\.\d\d", lines[-1])


def test_an_absent_peer_and_a_wrong_model_are_errors(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"^--peer nano-vllm: it is not installed"):
        lines_of(model, "--peer", "nano-vllm")
    with pytest.raises(FleetError, match=r"^--model .*no such model file"):
        lines_of(tmp_path / "missing")


def test_a_failing_engine_is_named(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--llm", '{"max_model_ln": 4}')
    with pytest.raises(FleetError, match=r"^pointsman ended with status 1; its error is above"):
        lines_of(model, *flags)
    assert "LLM takes no max_model_ln; did you mean max_model_len?" in capfd.readouterr().err


def test_its_flags_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "offline", "--llm", "[1]"])
    assert "--llm: takes a JSON object, not '[1]'" in capsys.readouterr().err
