"""Check the English of docstrings, comments, messages, names and documentation.

Run from the repository root: `python scripts/check_words.py [PATH …]`, for the whole repository
without a path. A docstring opens with a verb or a noun and says more than the name it documents.
`WORDS` lists the words that this project does not use, each with what to write instead; `NAMES`
lists the parts that identifiers do not have. Python strings are checked where they are prose
(several words) and outside tests, Markdown outside its code.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("base", "picker", "worker", "fleet", "conformance")
ROOTS = (*PROGRAMS, "scripts", "benchmarks", "tests", "docs")
PAGES = ("README.md", "CHANGELOG.md")

OPENINGS = re.compile(
    r"(What|How|Which|Whether|Where|Those|Of|As|Who|Whose|Whom|That|Whatever|Whoever|So)\b"
)
# Pattern → replacement to consider.
WORDS = {
    r"nobody|somebody|whoever|everybody|anybody": "name the part: no client, every worker",
    r"tells?|told|telling": "report, publish, notify, say",
    r"that which|those which|so many|so much|so-manieth": "a noun: the count, the entry",
    r"bare": "empty, bodyless, plain",
    r"settling|settles with": "reconcile, complete",
    r"surroundings": "environment, context",
    r"goes on|go on|went on|going on": "continue",
    r"stands(?! for\b)|stood": "is, remains",
    r"lies|lay (in|at|on)": "is",
    r"kept": "stored, retained, cached, unchanged",
    r"becomes of|become of|became of": "happens to, the result of",
    r"of whom|of which there": "rewrite the sentence",
    r"a person|people": "the reader, an operator, a user",
    r"by and by|ever so|hitherto|thither|whither|thereof|wherein": "rewrite the sentence",
}
BANNED = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), better) for word, better in WORDS.items()]
# Parts of identifiers, between underscores or capitals.
NAMES = {
    *("told", "heard", "tell", "tells", "kept", "bare", "heaviest", "apart", "settling"),
    *("nobody", "somebody", "whoever", "anybody", "everybody", "surroundings"),
}
CONSTANTS = re.compile(r"_?(MOST|LEAST|FEW)_")
TEST_NAMES = re.compile(
    r"test_(who|whoever|what|whatever|how|which|whether|where|those|of|as|that)_"
)
PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
MIN_DOCSTRING_WORDS = 4
MIN_PROSE_SPACES = 2
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield the unwanted words of a text that starts at `line`; code in backticks is not read."""
    text = re.sub(r"(`+)[^`]*\1", lambda code: re.sub(r"[^\n]", "·", code[0]), text)
    for pattern, better in BANNED:
        for found in pattern.finditer(text):
            yield line + text.count("\n", 0, found.start()), f"'{found[0]}': {better}"


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Yield each docstring with the name of what it documents."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            match node.body[0]:
                case ast.Expr(value=ast.Constant() as text):
                    yield text, getattr(node, "name", "")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each name that a module defines, from its classes down to its variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def of_code(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the findings in one Python file, each with its line."""
    tree = ast.parse(text, filename=str(path))
    is_test = path.parts[0] == "tests"
    has_messages = not is_test and path.name != Path(__file__).name  # this file lists the words
    documented = dict(docstrings(tree))
    for node, name in documented.items():
        opening = OPENINGS.match(str(node.value).lstrip())
        if opening:
            yield node.lineno, f"docstring of {name or path.stem} opens with '{opening[0]}'"
        if len(str(node.value).split()) < MIN_DOCSTRING_WORDS and not is_test:
            yield (
                node.lineno,
                f"docstring of {name or path.stem} repeats its name: say more or delete",
            )
        yield from prose(str(node.value), node.lineno)
    for line, name in names(tree):
        parts = {part.lower() for part in PART.findall(name)}
        if parts & NAMES or CONSTANTS.match(name) or TEST_NAMES.match(name):
            yield line, f"name {name}: use the field's word (MAX_, MIN_, reported, stored, …)"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from prose(token.string, token.start[0])
    for part in ast.walk(tree):
        match part:
            case ast.Constant(value=str(text)) if has_messages and part not in documented:
                if text.count(" ") >= MIN_PROSE_SPACES:
                    yield from prose(text, part.lineno)


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the findings in one Markdown page outside its fenced code."""
    fenced = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.MULTILINE | re.DOTALL)
    yield from prose(fenced.sub(lambda code: re.sub(r"[^\n]", "·", code[0]), text), 1)


def findings(path: Path) -> Iterator[str]:
    """Yield the findings in one file as `path:line: text`."""
    text = path.read_text(encoding="utf-8")
    found = of_code(path, text) if path.suffix == ".py" else of_page(text)
    for line, message in sorted(set(found)):
        yield f"{path}:{line}: {message}"


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files and pages under `paths`, without generated code and recorded data."""
    for root in paths:
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix in (".py", ".md") and not {"generated", "data"} & set(path.parts):
                yield path


def main() -> int:
    """Print every finding; return 1 if there is one."""
    given = [Path(one) for one in sys.argv[1:]]
    paths = given or [Path(one) for one in (*ROOTS, *PAGES) if Path(one).exists()]
    found = [line for path in files(paths) for line in findings(path)]
    for line in found:
        print(line)
    print(f"words: {len(found)} finding(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
