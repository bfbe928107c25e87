"""The flags of `pointsman train-draft` set its settings, or are refused with a reason."""

from pathlib import Path

import pytest

from fleet.commands import cli
from worker.errors import ConfigError
from worker.training.__main__ import main
from worker.training.flags import Settings, resolve


def test_defaults_are_those_of_the_settings() -> None:
    assert resolve(["--model", "m.gguf"]) == Settings(model=Path("m.gguf"))


def test_every_flag_reaches_its_setting(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("hello")
    given = {
        "--tokens": ("tokens", 5),
        "--steps": ("steps", 7),
        "--seed": ("seed", 3),
        "--minutes": ("minutes", 1.5),
        "--num-threads": ("num_threads", 1),
        "--num-rows": ("num_rows", 2),
        "--batch-tokens": ("batch_tokens", 99),
        "--learning-rate": ("learning_rate", 0.5),
        "--passes": ("passes", 4),
        "--draft-vocab-size": ("draft_vocab_size", 11),
        "--intermediate-size": ("intermediate_size", 13),
        "--dtype": ("dtype", "float32"),
    }
    argv = [word for flag, (_, value) in given.items() for word in (flag, str(value))]
    argv += ["--text", str(text), "--out", str(tmp_path), "--start-from", "h", "--overwrite"]
    settings = resolve(["--model", "m", *argv])
    assert (settings.text, settings.out) == ((text,), tmp_path)
    assert (settings.start_from, settings.overwrite) == (Path("h"), True)
    for name, value in given.values():
        assert getattr(settings, name) == value


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model", "m", "--tokens", "0"], "--tokens 0 leaves nothing to learn from"),
        (["--model", "m", "--text", "/no/such/file"], "--text /no/such/file: no such file"),
        (["--tokens", "7"], "--model is missing"),
    ],
)
def test_an_unusable_flag_is_refused(argv: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(argv)


def test_errors_are_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/no/such/model.gguf"]) == 1
    shown = capsys.readouterr().err
    assert shown == "pointsman train-draft: /no/such/model.gguf: no such model file or directory\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["--tokens", "many"],
        ["--minutes", "0"],
        ["--nonsense"],
        ["--seed", "-1"],
        ["--seed", str(1 << 63)],
    ],
)
def test_wrong_flags_exit_with_status_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", "m.gguf", *argv])
    assert ended.value.code == 2
    assert "pointsman train-draft: " in capsys.readouterr().err


def test_the_command_passes_its_flags_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train-draft", "--help"])
    assert ended.value.code == 0
    assert "--draft-vocab-size" in capsys.readouterr().out
    assert cli.main(["train-draft", "--model", "/no/such/model.gguf", "--tokens", "9"]) == 1
    assert "/no/such/model.gguf" in capsys.readouterr().err
