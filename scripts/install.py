"""Install a part of this project into the environment that runs this, and show how far it is.

`python scripts/install.py fleet` installs `.[fleet]`, editable, in the versions of constraints.txt.
One pip installs the packages that the extra needs, while another builds this one, which for the
most part is the compiler's time (`scripts/build_kernels.py`). Where there is no NVIDIA GPU, torch
comes from its index of CPU builds, a twentieth of the size; the variable TORCH_INDEX names another
one. On failure pip's own words are printed.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

ROOT = Path(__file__).parents[1]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WITH_TORCH = ("worker", "fleet", "dev")
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_PIP = (
    *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check"),
    "--no-input",
    "--no-compile",  # what is used is compiled when it is; of torch that is little
)
_CONSTRAINED = ("-c", str(ROOT / "constraints.txt"))
_ISAS = "POINTSMAN_KERNEL_ISAS"  # see scripts/build_kernels.py
_CLEAR = "\r\x1b[K"
_SECONDS_BETWEEN_LINES = 5  # where the output is not a terminal
_OURS = re.compile(r"pointsman\[(.+)\]")
_NO_KERNELS = re.compile(r'building extension ".*" failed: (.*)')


class PipError(Exception):
    """A pip that failed: its exit status, and all that it said."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Packages:
    """The progress of a pip, by its own words and by the folder that it installs into."""

    _FOUND = re.compile(r"(?:Collecting|Processing) (?:\S*/)?([^\s-]+(?:-[^\s-]+)?)")
    # Indented, it is a part of the search. A pip that needs no more than metadata for that
    # downloads all packages behind it.
    _FILE = re.compile(r"( *)(?:Downloading|Using cached) ([^\s-]+-[^\s-]+)\S*\.whl \(")
    _BYTES = re.compile(r"Progress (\d+) of (\d+)")
    _INSTALLING = re.compile(r"Installing collected packages: (.+)")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun = time.time() - 1  # the clock of files is a coarse one
        self._found = self._fetched = 0
        self._at = self._size = ""
        self._names: set[str] = set()
        self._is_installing = self._is_complete = False

    def complete(self) -> None:
        """Note that no pip follows."""
        self._is_complete = True

    def read(self, line: str) -> None:
        """Take a line of pip's."""
        if found := self._FOUND.match(line):
            self._found += 1
            self._is_installing = False
            self._at, self._size = found[1], ""
        elif named := self._FILE.match(line):
            self._fetched += not named[1]
            self._at, self._size = named[2], ""
        elif sizes := self._BYTES.match(line):
            done, total = (int(size) / 1e6 for size in sizes.groups())
            self._size = f" ({done:.0f} of {total:.0f} MB)"
        elif names := self._INSTALLING.match(line):
            self._is_installing = True
            self._names |= {_normalized(name) for name in names[1].split(", ")}

    def __str__(self) -> str:
        if self._is_complete:
            return "packages installed"
        if self._is_installing:
            done = len(self._names & set(self._installed()))
            return f"installed {done} of {len(self._names)} packages"
        if not self._found:
            return "looking for packages"
        number = f"{self._fetched} of {self._found}" if self._fetched else self._found
        return f"package {number}: {self._at}{self._size}"

    def _installed(self) -> Iterator[str]:
        for path in self._folder.glob("*.dist-info"):
            with contextlib.suppress(FileNotFoundError):  # of one that is being replaced
                if path.stat().st_mtime >= self._begun and (path / "RECORD").exists():
                    yield _normalized(path.name.partition("-")[0])


class Build:
    """The progress of the build of this package."""

    _STEP = re.compile(r"\s*(kernels: (?:\d+ of \d+ compiled|built for .+))")

    def __init__(self) -> None:
        self._step = ""

    def read(self, line: str) -> None:
        """Take a line of the build's."""
        if step := self._STEP.match(line):
            self._step = step[1]

    def __str__(self) -> str:
        return self._step


def main(extra: str) -> int:
    """Install; returns the exit status of pip."""

    async def until_a_signal() -> int:
        task = asyncio.create_task(_install(extra), name="install")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(until_a_signal())
    except asyncio.CancelledError:
        return 128 + signal.SIGINT


async def _install(extra: str) -> int:
    clock = asyncio.get_running_loop().time
    begun = clock()
    packages, build = Packages(Path(sysconfig.get_path("purelib"))), Build()

    def shown() -> str:
        return "; ".join(text for text in (str(packages), str(build)) if text)

    failures: list[PipError] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            display = tasks.create_task(_show(shown), name="display")
            await _renew_pip()
            ours = tasks.create_task(_install_ours(extra, build.read), name="build")
            await _install_packages(extra, packages.read)
            packages.complete()
            said = await ours
            display.cancel()
    except* PipError as group:
        failures = [failure for failure in group.exceptions if isinstance(failure, PipError)]
    if failures:
        _say("", end="")
        print(failures[0], file=sys.stderr)
        return failures[0].status
    _say(f"installed pointsman[{extra}] in {clock() - begun:.0f} s")
    if reason := _NO_KERNELS.search(said):
        _say(_without_kernels(extra, reason[1], said))
    return 0


async def _show(shown: Callable[[], str]) -> None:
    """Print the state, on a terminal in one line that changes."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    while True:
        await asyncio.sleep(0.2 if sys.stdout.isatty() else _SECONDS_BETWEEN_LINES)
        text = f"{clock() - begun:.0f} s: {shown()}"
        if sys.stdout.isatty():
            _say(text[: shutil.get_terminal_size().columns - 1], end="")
        else:
            _say(text)


async def _renew_pip() -> None:
    """Install a newer pip in place of one that takes three times as long to choose versions and
    does not say how far a download is: those that come with Python 3.11 and 3.12.
    """
    if _pip_version() < (25,):
        with contextlib.suppress(PipError):  # an index without it
            await _run(*_PIP, "--progress-bar=off", "--upgrade", "pip", read=_ignore)


async def _install_packages(extra: str, read: Callable[[str], None]) -> None:
    """Install all that the extra needs, but for this project."""
    pip = (*_PIP, f"--progress-bar={'raw' if _pip_version() >= (24, 1) else 'off'}")
    if extra in WITH_TORCH and not any(path.exists() for path in _GPUS):
        index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
        # Where that index cannot be reached the usual one has to do, as it does for all else.
        once = ("--retries=0", "--timeout=10", "--no-deps", f"--index-url={index}")
        try:
            await _run(*pip, *_CONSTRAINED, *once, "torch", read=read)
        except PipError:
            _say(f"{index} cannot be reached, or has no torch for us: taking torch from the")
            _say("usual index, which may be several GB (TORCH_INDEX names another one)")
    await _run(*pip, *_CONSTRAINED, "--no-warn-conflicts", *requirements(extra), read=read)


async def _install_ours(extra: str, read: Callable[[str], None]) -> str:
    """Install this project and nothing else; returns what pip said."""
    # Kernels are for models, and tests run those of every ISA that the CPU has.
    isas = {"dev": "cpu"}.get(extra, "") if extra in WITH_TORCH else "none"
    command = (*_PIP, "--verbose", "--no-deps", "--editable", str(ROOT))
    return await _run(*command, read=read, **{_ISAS: os.environ.get(_ISAS, isas)})


def requirements(extra: str) -> list[str]:
    """Read the requirements of `pointsman[extra]` from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    extras = [extra]
    for name in extras:
        for requirement in project["optional-dependencies"][name]:
            ours = _OURS.fullmatch(requirement)
            extras += ours[1].split(",") if ours else ()
            found += () if ours else (requirement,)
    return found


async def _run(*command: str, read: Callable[[str], None], **environment: str) -> str:
    """Run a pip, with `environment` added to ours; it ends with this task at the latest. Returns
    all that it said, or raises `PipError`.
    """
    said = []
    pip = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
        start_new_session=True,
    )
    try:
        async for raw in cast("asyncio.StreamReader", pip.stdout):
            line = raw.decode(errors="replace")
            read(line)
            if not line.startswith("Progress "):
                said.append(line)
        status = await pip.wait()
    finally:
        if pip.returncode is None:
            # A process that has just been reaped may not have its `returncode` yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pip.pid, signal.SIGTERM)  # and its compilers
            await pip.wait()
    if status:
        raise PipError(status, "".join(said))
    return "".join(said)


def _without_kernels(extra: str, reason: str, said: str) -> str:
    """A sentence on what is missing; the compiler's words precede it, if there is a compiler."""
    words = ""
    if "no C++ compiler" not in reason:
        reason = "the C++ compiler failed"
        words = (
            said.partition("running build_ext\n")[2].partition("warning: BuildKernels")[0] + "\n"
        )
    return (
        f"{words}Without native kernels ({reason}) models on the CPU run in torch, at a fraction of"
        f" the speed. Install g++ (Fedora: gcc-c++), and run {sys.executable} {__file__} {extra}"
    )


def _say(text: str, end: str = "\n") -> None:
    """Print, in place of the line of progress on a terminal."""
    print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}", end=end, flush=True)


def _pip_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _ignore(line: str) -> None:
    """Read nothing from a line."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
