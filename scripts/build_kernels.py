"""Build steps: the kernels of `worker/ops/cpu`, compiled side by side, and the tag of their wheel.

Each instruction set (ISA) has a source of its own, and these take most of the time. A wheel has all
of them, since nothing is known of the CPU that it will run on; an editable install has the best one
that this CPU runs, and the portable one. The variable POINTSMAN_KERNEL_ISAS asks for others: `all`,
`cpu` (every one that this CPU runs), `none`, or names, as in `avx512,avx2`. At run time the library
chooses among the ISAs that it was built with (`choose` in `native.cpp`).

The library is opened by ctypes and uses nothing of Python, so a wheel with it is for any Python 3
on one kind of CPU; a wheel without it is for any CPU.
"""

import os
import platform
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

VARIABLE = "POINTSMAN_KERNEL_ISAS"
PORTABLE = "portable"
_AVX2 = frozenset(("avx2", "fma", "f16c"))
# The best first, with the words of /proc/cpuinfo that it takes: those that `runs` in native.cpp
# asks the CPU for.
ISAS = {
    "avx512": _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx2": _AVX2,
    PORTABLE: frozenset[str](),
}
_ISA_SOURCE = re.compile(r"kernels_(\w+)\.cpp$")
_SYMBOLS = re.compile(rb"\b(GLIBC_2|GLIBCXX_3\.4|CXXABI_1\.3)\.(\d+)\b")
# A version of glibc (2.N), and the newest symbols of libstdc++ where it is the system's:
# GLIBCXX_3.4.N and CXXABI_1.3.N, by the profiles of PEP 600. The oldest is that of torch's wheels.
_SYSTEMS = ((28, 24, 11), (31, 28, 12), (34, 29, 13), (35, 30, 13), (39, 33, 15))


class BuildKernels(build_ext):  # type: ignore[misc]
    """setuptools' `build_ext`, with the sources of the chosen ISAs only, and a compiler per CPU."""

    def run(self) -> None:
        """Choose, and build. Raises `ValueError` for an unknown ISA."""
        cpuinfo = Path("/proc/cpuinfo")
        text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
        in_place = bool(self.inplace or self.editable_mode)
        wanted = os.environ.get(VARIABLE, "")
        self.isas = chosen(wanted, runnable(platform.machine(), text), in_place)
        if in_place and self.isas:
            for ext in self.extensions:  # of older sources, should the compiler fail
                library = Path(self.get_ext_fullpath(ext.name))
                for old in (library, *library.parent.glob(f"{library.stem}.*.so")):
                    old.unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """The library's path, without the name of the Python that builds it."""
        return f"{fullname.replace('.', os.sep)}.so"

    def get_libraries(self, ext: Any) -> list[str]:
        """The libraries to link: those of the extension, and never Python's."""
        return list(ext.libraries)

    def build_extension(self, ext: Any) -> None:
        """Compile and link, with a line of progress after each source; without ISAs, do nothing."""
        if not self.isas:
            return
        compiler = getattr(self.compiler, "compiler_so_cxx", [None])[0]
        if compiler is None:
            raise CompileError("the kernels take GCC or Clang")
        if shutil.which(compiler) is None:
            raise CompileError(f"there is no C++ compiler ({compiler})")
        ext.sources = [source for source in ext.sources if _is_part(source, self.isas)]
        compile_some = self.compiler.compile

        def compile_all(sources: Sequence[str], **options: Any) -> list[str]:
            _say(f"0 of {len(sources)} compiled")
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                futures = [pool.submit(compile_some, [source], **options) for source in sources]
                try:
                    for count, future in enumerate(as_completed(futures), 1):
                        future.result()
                        _say(f"{count} of {len(sources)} compiled")
                except CompileError:
                    pool.shutdown(cancel_futures=True)
                    raise
            return [built for future in futures for built in future.result()]

        self.compiler.compile = compile_all
        super().build_extension(ext)
        _say(f"built for {', '.join(self.isas)}")


class TagWheel(bdist_wheel):  # type: ignore[misc]
    """setuptools' `bdist_wheel`, with the tag of what was built."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag: any Python 3, and the systems that can load the library, if there is one."""
        folder = Path(self.get_finalized_command("build").build_lib)
        libraries = [
            path
            for ext in self.distribution.ext_modules or ()
            for path in folder.rglob(f"{ext.name.rpartition('.')[2]}.so")
        ]
        return "py3", "none", platform_tag(libraries, super().get_tag()[2])


def platform_tag(libraries: Sequence[Path], built_on: str) -> str:
    """The platform of a wheel with `libraries`: the oldest systems with all symbols that they take,
    or `built_on` where these are unknown; `any` without libraries.
    """
    if not libraries:
        return "any"
    newest = dict.fromkeys((b"GLIBC_2", b"GLIBCXX_3.4", b"CXXABI_1.3"), 0)
    for library in libraries:
        for name, number in _SYMBOLS.findall(library.read_bytes()):
            newest[name] = max(newest[name], int(number))
    glibc, *libstdcxx = newest.values()
    for least, *known in _SYSTEMS:
        fits = all(have <= there for have, there in zip(libstdcxx, known, strict=True))
        if fits and glibc and built_on.startswith("linux_"):
            return f"manylinux_2_{max(least, glibc)}_{built_on.removeprefix('linux_')}"
    return built_on


def chosen(wanted: str, runnable: Sequence[str], in_place: bool) -> list[str]:
    """The ISAs to build, best first: those `wanted` (see the top), or what fits the kind of build.
    Raises `ValueError` for an unknown one.
    """
    if wanted == "none":
        return []
    if wanted == "cpu":
        names = set(runnable)
    elif wanted == "all" or not (wanted or in_place):
        names = set(ISAS)
    else:
        names = {*(wanted.split(",") if wanted else runnable[:1]), PORTABLE}
    if not names <= ISAS.keys():
        wrong = ", ".join(sorted(names - ISAS.keys()))
        raise ValueError(f"{VARIABLE}: {wrong}; choose all, cpu, none, or from {', '.join(ISAS)}")
    return [isa for isa in ISAS if isa in names]


def runnable(machine: str, cpuinfo: str) -> list[str]:
    """The ISAs that a CPU runs, best first; all of them if `cpuinfo` does not say."""
    if machine != "x86_64":
        return [PORTABLE]
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    words = frozenset(flags[1].split()) if flags else frozenset[str]().union(*ISAS.values())
    return [isa for isa, needs in ISAS.items() if needs <= words]


def _say(text: str) -> None:
    """Print a line of progress in one write, because the threads of the compilers print, too."""
    print(f"kernels: {text}\n", end="", flush=True)


def _is_part(source: str, isas: Sequence[str]) -> bool:
    found = _ISA_SOURCE.search(source)
    return found is None or found[1] in isas
