"""Refuse files over 600 lines, functions over 60, and names the house does not use.

Run from the repository root: `python scripts/check_budgets.py`. Kernels (`worker/ops`) are exempt
from the function budget. Complexity and parameter counts are ruff's (C901, PLR0913).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
ROOTS = ("picker", "worker", "fleet", "conformance", "scripts", "tests", "benchmarks")
KERNELS = ("worker/ops/",)
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


def main() -> int:
    """Print every finding; exit 1 when there is one."""
    found = [
        line
        for root in ROOTS
        for path in sorted(Path(root).rglob("*.py"))
        for line in findings(path)
    ]
    for line in found:
        print(line)
    print(f"budgets: {len(found)} finding(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
