"""The source archive makes a wheel, and the wheel works in an empty environment, in any folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.project import read_project
from tests.support.local_ports import free_port

ROOT = Path(__file__).parent.parent
VERSION = read_project(ROOT).version
NAMES = ("base", "picker", "worker", "fleet")
COMMANDS = (
    *("up", "restart", "chat", "top", "explain", "doctor", "bench", "worker", "picker", "config"),
    *("replay", "train-draft", "version"),
)
BUILD = "from setuptools.build_meta import build_{0}; build_{0}({1!r})"


@dataclass(frozen=True)
class Installed:
    wheel: Path
    python: Path
    folder: Path

    def run(self, *argv: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (str(self.python.with_name("pointsman")), *argv),
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.python.parents[1] / "lib" / version / "site-packages"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    build("sdist", ROOT, folder)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)
    [wheel] = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    place = folder / "elsewhere"
    for name in NAMES:
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("raise SystemExit('not ours')\n")
    return Installed(wheel, python, place)


@pytest.fixture
def complete(installed: Installed) -> Installed:
    path = installed.packages / "others.pth"
    path.write_text(sysconfig.get_path("purelib") + "\n")
    return installed


def build(what: str, sources: Path, out: Path) -> None:
    run(sys.executable, "-c", BUILD.format(what, str(out)), folder=sources)


def run(*argv: object, folder: Path | None = None) -> None:
    done = subprocess.run(
        [str(word) for word in argv],
        cwd=folder,
        env={**os.environ, "CC": "false", "CXX": "false", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_one_package_is_installed_for_any_python(installed: Installed) -> None:
    """Without a compiler the wheel has no kernels, and fits any system."""
    assert installed.wheel.name == f"pointsman-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(installed.wheel) as file:
        names = file.namelist()
        assert {name.partition("/")[0] for name in names} == {
            "pointsman",
            f"pointsman-{VERSION}.dist-info",
        }
        assert file.read(f"pointsman-{VERSION}.dist-info/top_level.txt") == b"pointsman\n"
        for data in (
            *("picker/admin/page/index.html", "worker/training/prompts.yaml", "py.typed"),
            *("fleet/deploy/envoy/eds.yaml", "fleet/deploy/systemd/pointsman-picker.service"),
        ):
            assert f"pointsman/{data}" in names


def test_its_page_on_an_index_is_complete(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as file:
        page = Parser().parsestr(file.read(f"pointsman-{VERSION}.dist-info/METADATA").decode())
    for name in ("Author", "Keywords", "License-Expression", "Project-URL", "Requires-Python"):
        assert page[name], name
    text = str(page.get_payload())
    assert "/blob/main/docs/configuration.md" in text
    assert "](docs/" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_extra_is_named_in_one_sentence(installed: Installed, command: str) -> None:
    (installed.packages / "others.pth").unlink(missing_ok=True)
    flags = {"explain": ("--last",), "config": ("check", "-"), "replay": ("recording.jsonl",)}
    done = installed.run(command, *flags.get(command, ()))
    if done.returncode == 0:
        assert command == "version"
    else:
        assert done.stderr.startswith((f"pointsman: `pointsman {command}` needs ", "pointsman"))
        assert done.stderr.count("\n") == 1, done.stderr
        assert "pip install" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work_beside_packages_of_the_same_names(complete: Installed, command: str) -> None:
    done = complete.run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: pointsman {command}" in done.stdout


def test_programs_can_run_a_model_of_their_own(complete: Installed) -> None:
    code = (
        "from pointsman import LLM; llm = LLM(engine='sim'); print(len(llm.generate(['a', 'b'])))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(complete.folder)}
    argv = (str(complete.python), "-W", "error", "-c", code)
    out = subprocess.check_output(argv, cwd=complete.folder, env=environment, text=True)
    assert out == "2\n"


def test_the_files_of_the_tutorials_are_written(complete: Installed) -> None:
    done = complete.run("files", "envoy", "prometheus", "--into", "out")
    assert (done.returncode, done.stderr) == (0, "")
    for path in complete.folder.joinpath("out").iterdir():
        [original] = (ROOT / "deploy").glob(f"*/{path.name}")
        assert path.read_bytes() == original.read_bytes()
    assert "out/eds.yaml" in done.stdout.split()


def test_a_fleet_starts_beside_packages_of_the_same_names(complete: Installed) -> None:
    argv = (complete.python.with_name("pointsman"), "up", "--engine", "sim", "--workers", "1")
    with subprocess.Popen(
        (*argv, "--port", str(free_port())),
        cwd=complete.folder,
        env={"PATH": os.environ["PATH"], "HOME": str(complete.folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as fleet:
        assert fleet.stdout is not None
        lines = []
        for line in fleet.stdout:
            lines.append(line)
            if "curl -N" in line:
                fleet.terminate()
    assert fleet.returncode == 0, "".join(lines)
    assert any("ready     sim" in line for line in lines)
