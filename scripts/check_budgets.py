"""Check the sizes of files, functions and rooms, and the names of classes and test files.

Run from the repository root: `python scripts/check_budgets.py`. A file has at most 800 lines, a
function 60 (kernels, `worker/ops`, are exempt from the second), a room 16 files (plugins and
operations are exempt). A public class name occurs once in a program. A test file has the name of a
module of the room that its folder mirrors, with or without an aspect behind it, or states a claim
of at least three words. Ruff checks complexity and parameter counts (C901, PLR0913).
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
ROOTS = (
    "pointsman",
    "base",
    "picker",
    "worker",
    "fleet",
    "conformance",
    "scripts",
    "tests",
    "benchmarks",
)
PROGRAMS = ("base", "picker", "worker", "fleet")
KERNELS = ("worker/ops/",)
MAX_ROOM_FILES = 16
MANY_ALIKE = ("picker/plugins/", "picker/contrib/", "worker/ops")
# Rooms that are over the budget today; none of them may grow.
TO_SHRINK: dict[str, int] = {}
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
    """Yield the findings in one file."""
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


def repeated(program: str) -> Iterator[str]:
    """Yield the public class names that occur in two modules of a program."""
    first: dict[str, Path] = {}
    for path in sorted(Path(program).rglob("*.py")):
        if "generated" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if node.name in first:
                    also = f"class {node.name} is also in {first[node.name]}"
                    yield f"{path}:{node.lineno}: {also}: one word, one meaning"
                first[node.name] = path


def crowded(program: str) -> Iterator[str]:
    """Yield the rooms of a program that hold too many files."""
    for room in sorted({path.parent for path in Path(program).rglob("*.py")}):
        count = len(list(room.glob("*.py")))
        most = TO_SHRINK.get(str(room), MAX_ROOM_FILES)
        if count > most and not str(room).startswith(MANY_ALIKE):
            yield f"{room}: {count} files, the budget of a room is {most}"


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
    found += [line for program in PROGRAMS for line in (*repeated(program), *crowded(program))]
    found += [line for program in PROGRAMS for line in misnamed(program)]
    for line in found:
        print(line)
    print(f"budgets: {len(found)} finding(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
