"""The source archive makes a wheel, and the wheel works in an empty environment, in any folder."""

import os
import shutil
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
# Each starts if it is found: on PATH, or among the paths of the variable.
NEWER_PYTHONS = ("3.12", "3.13", "3.14")
PYTHONS_VARIABLE = "POINTSMAN_TEST_PYTHONS"
KERNELS = """
import ctypes, pathlib, pointsman
[path] = pathlib.Path(pointsman.__file__).parent.rglob("_kernels.so")
print(ctypes.CDLL(str(path)).pointsman_runs(b"portable"))
"""
BUILD = "from setuptools.build_meta import build_{0}; build_{0}({1!r})"


@dataclass(frozen=True)
class Installed:
    sources: Path
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
    sources = folder / archive.name.removesuffix(".tar.gz")
    build("wheel", sources, folder)
    [wheel] = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    place = folder / "elsewhere"
    for name in NAMES:
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("raise SystemExit('not ours')\n")
    return Installed(sources, wheel, python, place)


@pytest.fixture
def complete(installed: Installed) -> Installed:
    path = installed.packages / "others.pth"
    path.write_text(sysconfig.get_path("purelib") + "\n")
    return installed


def build(what: str, sources: Path, out: Path, compiler: str = "false", **environment: str) -> None:
    code = BUILD.format(what, str(out))
    run(sys.executable, "-c", code, folder=sources, CC=compiler, CXX=compiler, **environment)


def run(*argv: object, folder: Path | None = None, **environment: str) -> None:
    done = subprocess.run(
        [str(word) for word in argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
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
    assert "ready     sim" in started(complete)


def started(installed: Installed) -> str:
    """Start a fleet, stop it when it is ready, and return its output."""
    argv = (installed.python.with_name("pointsman"), "up", "--engine", "sim", "--workers", "1")
    with subprocess.Popen(
        (*argv, "--port", str(free_port())),
        cwd=installed.folder,
        env={"PATH": os.environ["PATH"], "HOME": str(installed.folder)},
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
    return "".join(lines)


@pytest.fixture(scope="module")
def wheel_with_kernels(installed: Installed) -> Path:
    compiler, folder = shutil.which("g++"), installed.folder.parent / "kernels"
    if compiler is None:
        pytest.skip("there is no g++")
    build("wheel", installed.sources, folder, compiler, POINTSMAN_KERNEL_ISAS="portable")
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.mark.full
def test_a_wheel_with_kernels_is_for_any_python(wheel_with_kernels: Path) -> None:
    assert "-py3-none-manylinux_2_" in wheel_with_kernels.name
    with zipfile.ZipFile(wheel_with_kernels) as file:
        [library] = [name for name in file.namelist() if name.endswith(".so")]
        assert library == "pointsman/worker/ops/cpu/_kernels.so"
        assert b"\0Py" not in file.read(library)  # a symbol of Python's


@pytest.mark.full
@pytest.mark.envoy
@pytest.mark.parametrize("version", NEWER_PYTHONS)
def test_newer_pythons_start_a_fleet_from_that_wheel(
    version: str, installed: Installed, wheel_with_kernels: Path, tmp_path: Path
) -> None:
    found = python_of(version)
    if found is None:
        pytest.skip(f"no python{version} on PATH or in {PYTHONS_VARIABLE}")
    run(found, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    constraints = installed.sources / "constraints.txt"
    run(*pip, "--only-binary=:all:", "-c", constraints, f"{wheel_with_kernels}[sim]")
    for code, out in (("import sys; print(sys.version)", f"{version}."), (KERNELS, "1\n")):
        argv = (python, "-I", "-c", code)
        said = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert said.stdout.startswith(out)
    said_by_up = started(Installed(installed.sources, wheel_with_kernels, python, tmp_path))
    assert "ready     sim" in said_by_up
    assert "Traceback" not in said_by_up


def python_of(version: str) -> str | None:
    named = os.environ.get(PYTHONS_VARIABLE, "").split(os.pathsep)
    for path in (*(name for name in named if name), shutil.which(f"python{version}")):
        if path is not None:
            code = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
            if subprocess.run((path, "-c", code), capture_output=True, check=False).returncode == 0:
                return path
    return None
