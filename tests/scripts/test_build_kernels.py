"""Kernels are built for the CPUs that a build is for, and compiled side by side."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.build_kernels import ISAS, VARIABLE, chosen, platform_tag, runnable
from worker.ops.cpu import native

ROOT = Path(__file__).parents[2]
SOURCES = ("native", *(f"kernels_{isa}" for isa in ISAS))
ZEN_2 = "processor\t: 0\nflags\t\t: fpu sse2 fma f16c avx avx2 bmi2\nbogomips\t: 1\n"
ZEN_4 = ZEN_2.replace("bmi2", "avx512f avx512bw avx512dq avx512vl avx512_vnni")
SETUP = """
import sys
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from scripts.build_kernels import BuildKernels

extension = Extension("_kernels", sys.argv[2:], language="c++", optional=True)
commands = {"build_ext": {"ours": BuildKernels, "theirs": build_ext}[sys.argv[1]]}
setup(name="x", ext_modules=[extension], cmdclass=commands, script_args=["build_ext", "--inplace"])
"""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.mark.parametrize(
    ("wanted", "cpu", "clone", "isas"),
    [
        ("", ["avx2", "portable"], False, ["avx512", "avx2", "portable"]),
        ("", ["avx512", "avx2", "portable"], True, ["avx512", "portable"]),
        ("", ["avx2", "portable"], True, ["avx2", "portable"]),
        ("", ["portable"], True, ["portable"]),
        ("all", ["portable"], True, ["avx512", "avx2", "portable"]),
        ("cpu", ["avx2", "portable"], False, ["avx2", "portable"]),
        ("avx2", ["portable"], True, ["avx2", "portable"]),
        ("avx2,avx512", ["portable"], False, ["avx512", "avx2", "portable"]),
        ("none", ["avx2", "portable"], False, []),
    ],
)
def test_a_wheel_has_all_kernels_and_a_clone_those_of_its_cpu(
    wanted: str, cpu: list[str], clone: bool, isas: list[str]
) -> None:
    assert chosen(wanted, cpu, clone) == isas


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^POINTSMAN_KERNEL_ISAS: mmx, sse; choose all, cpu, "):
        chosen("sse,avx2,mmx", ["portable"], True)


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "isas"),
    [
        ("x86_64", ZEN_4, ["avx512", "avx2", "portable"]),
        ("x86_64", ZEN_4.replace(" avx512_vnni", ""), ["avx2", "portable"]),
        ("x86_64", ZEN_2, ["avx2", "portable"]),
        ("x86_64", ZEN_2.replace(" f16c", ""), ["portable"]),
        ("x86_64", "", ["avx512", "avx2", "portable"]),
        ("aarch64", "Features\t: fp asimd\n", ["portable"]),
    ],
)
def test_the_instruction_sets_of_a_cpu_are_those_it_lists(
    machine: str, cpuinfo: str, isas: list[str]
) -> None:
    assert runnable(machine, cpuinfo) == isas


@pytest.mark.parametrize(
    ("symbols", "built_on", "tag"),
    [
        ("GLIBC_2.2.5 GLIBC_2.16 GLIBCXX_3.4.22", "linux_x86_64", "manylinux_2_28_x86_64"),
        ("GLIBC_2.17 GLIBC_2.29 CXXABI_1.3.11", "linux_aarch64", "manylinux_2_29_aarch64"),
        ("GLIBC_2.17 GLIBCXX_3.4.9 CXXABI_1.3.12", "linux_x86_64", "manylinux_2_31_x86_64"),
        ("GLIBC_2.38 GLIBCXX_3.4.30", "linux_x86_64", "manylinux_2_38_x86_64"),
        ("GLIBC_2.17 GLIBCXX_3.4.22 CXXABI_1.3.15", "linux_x86_64", "manylinux_2_39_x86_64"),
        ("GLIBC_2.17 GLIBCXX_3.4.99", "linux_x86_64", "linux_x86_64"),
        ("of musl", "linux_x86_64", "linux_x86_64"),
        ("GLIBC_2.17", "macosx_14_0_arm64", "macosx_14_0_arm64"),
        (None, "linux_x86_64", "any"),
    ],
)
def test_a_wheel_is_for_the_systems_that_have_its_symbols(
    symbols: str | None, built_on: str, tag: str, tmp_path: Path
) -> None:
    libraries = [tmp_path / "a.so", tmp_path / "b.so"] if symbols is not None else []
    for library, text in zip(libraries, ("GLIBC_2.3.4", symbols or ""), strict=False):
        library.write_bytes(b"\x7fELF\0" + text.replace(" ", "\0").encode() + b"\0")
    if symbols == "of musl":
        libraries = libraries[1:]
    assert platform_tag(libraries, built_on) == tag


def test_build_and_library_agree_on_this_cpu() -> None:
    library = native._library(native.FOLDER)
    if library is None:
        pytest.skip("the kernels are not built")
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = [isa for isa in ISAS if library.pointsman_runs(isa.encode())]
    assert found == runnable(platform.machine(), cpuinfo)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in SOURCES:
        text = f'extern "C" int of_{name}(int x) {{ return x * {len(name)}; }}\n'
        (tmp_path / f"{name}.cpp").write_text(text)
    return tmp_path


def build(project: Path, command: str = "ours", **environment: str) -> tuple[str, str]:
    for old in project.glob("build"):
        shutil.rmtree(old)
    sources = [f"{name}.cpp" for name in SOURCES]
    done = subprocess.run(
        [sys.executable, "-c", SETUP, command, *sources],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    symbols = ""
    for library in project.glob("*.so"):
        listed = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
        symbols = "".join(sorted(re.findall(r"\S \w+$\n", listed.stdout, re.MULTILINE)))
    return done.stdout, symbols


@needs_compiler
def test_sources_compiled_side_by_side_make_the_same_library(project: Path) -> None:
    _, expected = build(project, "theirs")
    said, symbols = build(project, **{VARIABLE: "all"})
    assert symbols == expected
    assert all(f"T of_{name}\n" in symbols for name in SOURCES)
    progress = [line for line in said.splitlines() if line.startswith("kernels: ")]
    assert progress == [
        *(f"kernels: {count} of 4 compiled" for count in range(5)),
        "kernels: built for avx512, avx2, portable",
    ]


@needs_compiler
def test_sources_of_other_instruction_sets_are_left_out(project: Path) -> None:
    said, symbols = build(project, **{VARIABLE: "avx2"})
    assert re.findall(r"of_(\w+)", symbols) == ["kernels_avx2", "kernels_portable", "native"]
    assert "kernels: 3 of 3 compiled" in said


@needs_compiler
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "g++-of-nowhere"}, "failed: there is no C++ compiler (g++-of-nowhere)"),
        ({"CXX": "false"}, "failed: "),
    ],
)
def test_a_compiler_that_fails_leaves_no_old_library(
    project: Path, environment: dict[str, str], reason: str
) -> None:
    assert build(project)[1]
    assert [library.name for library in project.glob("*.so")] == ["_kernels.so"]
    project.joinpath("_kernels.cpython-311-x86_64-linux-gnu.so").touch()
    said, symbols = build(project, **environment)
    assert not list(project.glob("*.so"))
    assert reason in said
    assert symbols == ""


@needs_compiler
def test_a_build_without_kernels_leaves_the_library_alone(project: Path) -> None:
    _, before = build(project)
    said, after = build(project, **{VARIABLE: "none", "CXX": "g++-of-nowhere"})
    assert before == after != ""
    assert "failed" not in said
