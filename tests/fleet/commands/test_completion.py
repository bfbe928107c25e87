"""Scripts that complete command lines."""

import shutil
import subprocess

import pytest

from fleet.commands.cli import main

ASK = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _pointsman; echo "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shell") / "pointsman"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return str(path)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["re"], "restart replay"),
        (["up", "--eng"], "--engine"),
        (["up", "--engine", ""], "torch sim"),
        (["config", "sh"], "show"),
        (["restart", "w"], "workers"),
        (["picker", "--grpc-p"], "--grpc-port"),
        (["up", "--port", "x"], ""),
    ],
)
def test_bash_completes_commands_flags_and_values(
    script: str, words: list[str], found: str
) -> None:
    command = ["bash", "--norc", "-c", ASK, script, "pointsman", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (found, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("up", "train-draft", "grpc-port"))
    if shutil.which(shell) is not None:
        command = [shell, "--no-execute"] if shell == "fish" else [shell, "-n"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
