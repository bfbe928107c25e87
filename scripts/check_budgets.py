"""Refuse what makes the house hard to read: long files and functions, scattered ones, names twice.

Run from the repository root: `python scripts/check_budgets.py`. A file has at most 800 lines, a
function 60 (kernels, `worker/ops`, are exempt from the second). A module that one other module of
its own room imports, and nothing else does, is a section of that module, unless its first line says
why it stands apart (`# Apart: pure, so that walks can run it.`). A public class name occurs once in
a program. A test file has the name of a module of the room that its folder mirrors, with or without
an aspect behind it, or says a claim, in three words at least. Complexity and parameter counts are
ruff's (C901, PLR0913).
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
ROOTS = ("pointsman", "picker", "worker", "fleet", "conformance", "scripts", "tests", "benchmarks")
PROGRAMS = ("picker", "worker", "fleet")
KERNELS = ("worker/ops/",)
APART = "# Apart: "
CLAIM_WORDS = 3
NAMED_BY_FOLDER = {"test_kernels"}
FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "manager", "handler", "misc"}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a module, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        doc = node.body[0]
        lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
    return lines


def findings(path: Path) -> Iterator[str]:
    """What is over budget in one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}:1: {lines} lines, the budget is {MAX_FILE_LINES}"
    if path.stem in FORBIDDEN_STEMS:
        yield f"{path}:1: '{path.stem}' says nothing; name the file by what lives there"
    if str(path).startswith(KERNELS):
        return
    for node in functions(ast.parse(text, filename=str(path))):
        if length(node) > MAX_FUNCTION_LINES:
            size = f"has {length(node)} lines, the budget is {MAX_FUNCTION_LINES}"
            yield f"{path}:{node.lineno}: {node.name} {size}"


def imports(tree: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules among `modules` that a module imports, by their dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


def scattered(program: str) -> Iterator[str]:
    """Modules of one program with a single reader, and public class names that occur twice."""
    modules = {
        ".".join(path.with_suffix("").parts): path
        for path in sorted(Path(program).rglob("*.py"))
        if "generated" not in path.parts
    }
    importers: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, list[Path]] = defaultdict(list)
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for imported in imports(tree, modules):
            importers[imported].add(name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(path)
    for name, path in modules.items():
        readers = [one.rpartition(".")[0] for one in importers[name]]
        alone = readers == [name.rpartition(".")[0]] and not path.stem.startswith("__")
        if alone and not path.read_text(encoding="utf-8").startswith(APART):
            [reader] = importers[name]
            yield f"{path}:1: only {reader} imports it: merge them, or say why not ({APART}…)"
    for class_name, paths in classes.items():
        if len(paths) > 1:
            yield f"{paths[1]}:1: class {class_name} is also in {paths[0]}: one word, one meaning"


def misnamed(program: str) -> Iterator[str]:
    """Test files of one program's rooms whose name is neither that of a source nor a claim."""
    for path in sorted(Path("tests", program).glob("*/**/test_*.py")):
        room = path.parent.relative_to("tests")
        words = path.stem.split("_")[1:]
        if not room.is_dir() or len(words) >= CLAIM_WORDS or path.stem in NAMED_BY_FOLDER:
            continue
        # The tests of a folder that `tests` does not mirror are in the one above it.
        modules = [
            one
            for one in room.rglob("*.*")
            if one.parent == room or not Path("tests", one.parent).is_dir()
        ]
        names = {one.stem.strip("_") for one in modules} | {one.parent.name for one in modules}
        if not any("_".join(words[:count]) in names for count in range(1, CLAIM_WORDS)):
            yield f"{path}:1: no module of {room} has its name: name the source, or say a claim"


def main() -> int:
    """Print every finding; exit 1 when there is one."""
    found = [
        line
        for root in ROOTS
        for path in sorted(Path(root).rglob("*.py"))
        for line in findings(path)
    ]
    found += [line for program in PROGRAMS for line in scattered(program)]
    found += [line for program in PROGRAMS for line in misnamed(program)]
    for line in found:
        print(line)
    print(f"budgets: {len(found)} finding(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
