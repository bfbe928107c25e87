"""The worker works without its shelves, except for the simulator and the training."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("repository")
    for package in ("base", "worker"):
        shutil.copytree(
            ROOT / package,
            copy / package,
            ignore=lambda folder, names: (
                {"__pycache__"}
                | ({"sim", "training"} & set(names) if Path(folder) == ROOT / "worker" else set())
            ),
        )
    assert not (copy / "worker/sim").exists()
    return copy


def run(repository: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # -S: an editable installation would find the removed shelves in the original repository.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(repository), *sys.path])}
    return subprocess.run(
        [sys.executable, "-S", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=repository,
        env=environment,
    )


def test_the_worker_has_all_other_flags(repository: Path) -> None:
    done = run(repository, "-m", "worker", "--help")
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout
    assert "--sim-seed" not in done.stdout
    assert "--enable-fault-injection" not in done.stdout


def test_the_simulator_is_refused_by_its_flag(repository: Path) -> None:
    done = run(repository, "-m", "worker", "--engine", "sim")
    message = "--engine sim needs worker.sim, which is not installed"
    assert (done.returncode, done.stderr) == (1, f"pointsman worker: {message}\n")


def test_every_module_imports(repository: Path) -> None:
    """Kernels are exempt: their dependencies may be missing on this machine."""
    code = """
import importlib, pkgutil, worker
for module in pkgutil.walk_packages(worker.__path__, "worker."):
    if not {"triton", "_kernels", "__main__", "nixl"} & set(module.name.split(".")):
        importlib.import_module(module.name)
"""
    done = run(repository, "-c", code)
    assert done.returncode == 0, done.stderr
